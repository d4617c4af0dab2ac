"""Measures whichever Lightning is installed in the environment that runs it; only what every release offers is used.

Each line of standard input asks for one measurement (see ``run.py``), and is answered by one line of JSON; before that,
``"ready"`` says that all is prepared, and an empty line starts what is measured. Lightning is imported once; a
measurement runs in a fork of that process, so that none meets the memory or the connections of another.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import background
import fsspec.config
import s3fs  # noqa: F401  # here, rather than in each measurement
import sharded
import torch
from measuring import MIB, Clock, answer, ready
from memory import Watcher
from torch.utils.data import DataLoader, TensorDataset

import lightning
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

TICK = 0.001
PARAMETERS = 24
LEARNING_RATE = 0.1


def make_state(mib: int, tensor_mib: int) -> dict[str, torch.Tensor]:
    """Tensors of float32, each filled with its own number."""
    return {str(number): torch.full((tensor_mib * MIB // 4,), number + 1.0) for number in range(mib // tensor_mib)}


def warm_up(url: str, load: bool = False) -> None:
    """Imports the store's client and connects to the store: what the first checkpoint of a process waits for."""
    place = f"{url}.warm-up"
    TorchCheckpointIO().save_checkpoint({"x": torch.ones(MIB // 4)}, place)
    if load:
        TorchCheckpointIO().load_checkpoint(place)


def save(url: str, mib: int, tensor_mib: int) -> dict[str, float]:
    """Saves one file."""
    watcher = Watcher()
    warm_up(url)
    state = make_state(mib, tensor_mib)
    ready()
    before = watcher.level()
    with watcher.watching() as peak, Clock() as clock:
        TorchCheckpointIO().save_checkpoint(state, url)
    return {"wall_s": clock.wall, "cpu_s": clock.cpu, "memory_mib": (peak.bytes - before) / MIB}


def save_local(url: str, mib: int, tensor_mib: int) -> dict[str, float]:
    """Saves one file to a disk, and waits until it is there, if saving it has not."""
    warm_up(url)
    state = make_state(mib, tensor_mib)
    ready()
    with Clock() as durable:
        with Clock() as clock:
            TorchCheckpointIO().save_checkpoint(state, url)
        with open(url, "rb+") as file:
            os.fsync(file.fileno())
    os.remove(url)
    return {"wall_s": clock.wall, "cpu_s": clock.cpu, "durable_s": durable.wall}


def hold_up(url: str, mib: int, tensor_mib: int) -> dict[str, float]:
    """How late a thread that wakes up every millisecond is while another one saves, and while another one sleeps."""
    warm_up(url)
    state = make_state(mib, tensor_mib)
    ready()
    with Clock() as clock:
        busy = _delays(lambda: TorchCheckpointIO().save_checkpoint(state, url))
    idle = _delays(lambda: time.sleep(clock.wall))
    return {
        "longest_ms": busy[-1] * 1e3,
        "p99_ms": busy[len(busy) * 99 // 100] * 1e3,
        "idle_longest_ms": idle[-1] * 1e3,
        "idle_p99_ms": idle[len(idle) * 99 // 100] * 1e3,
    }


def _delays(work: Callable[[], None]) -> list[float]:
    """Seconds by which this thread's short sleeps were too long while another thread did ``work``, in order of size."""
    thread = threading.Thread(target=work)
    delays = []
    thread.start()
    while thread.is_alive():
        start = time.perf_counter()
        time.sleep(TICK)
        delays.append(time.perf_counter() - start - TICK)
    return sorted(delays)


def load(url: str, mib: int, tensor_mib: int) -> dict[str, float]:
    """Loads what :func:`save` saved, and compares it."""
    watcher = Watcher()
    warm_up(url, load=True)
    ready()
    before = watcher.level()
    with watcher.watching() as peak, Clock() as clock:
        state = TorchCheckpointIO().load_checkpoint(url)
    for number in range(mib // tensor_mib):
        tensor = state[str(number)]
        if tensor.numel() != tensor_mib * MIB // 4 or not bool((tensor == number + 1.0).all()):
            raise ValueError(f"tensor {number} is not what was saved")
    return {"wall_s": clock.wall, "cpu_s": clock.cpu, "memory_mib": (peak.bytes - before) / MIB}


def make_training(mib: int) -> tuple[Fabric, Any, Any]:
    """A model with gradients and AdamW, whose state has the given size: three tensors for each parameter."""
    fabric = Fabric(accelerator="cpu", devices=1)
    module = torch.nn.Module()
    for number in range(PARAMETERS):
        module.register_parameter(f"p{number}", torch.nn.Parameter(torch.ones(mib * MIB // PARAMETERS // 3 // 4)))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return fabric, model, optimizer


def save_training(url: str, mib: int) -> dict[str, float]:
    """Saves the state after one step of an optimizer, for :func:`resume`."""
    fabric, model, optimizer = make_training(mib)
    optimizer.step()
    fabric.save(url, {"model": model, "optimizer": optimizer})
    return {}


def resume(url: str, mib: int) -> dict[str, float]:
    """Restores a training state into a model and an optimizer, takes a step, and compares the outcome."""
    watcher = Watcher()
    warm_up(url, load=True)
    fabric, model, optimizer = make_training(mib)
    ready()
    before = watcher.level()
    with watcher.watching() as restore:
        fabric.load(url, {"model": model, "optimizer": optimizer})
    with watcher.watching() as step:
        optimizer.step()
    expected = 1 - 2 * LEARNING_RATE  # nearly, since all gradients are 1
    if any(bool(((parameter - expected).abs() > 0.01).any()) for parameter in model.parameters()):
        raise ValueError("the parameters are not those of two steps")
    return {"restore_mib": (restore.bytes - before) / MIB, "step_mib": (step.bytes - before) / MIB}


class Line(LightningModule):
    """The smallest model that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(url: str, epochs: int) -> dict[str, float]:
    """Trains with checkpoints, of which the newest and a copy of it are kept."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(dirpath=url, save_top_k=1, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    ready()
    with Clock() as clock:
        trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(64, 32)), batch_size=16))
    return {"wall_s": clock.wall}


MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = (
    {function.__name__: function for function in (save, save_local, hold_up, load, save_training, resume, fit)}
    | sharded.MEASUREMENTS
    | background.MEASUREMENTS
)


def describe() -> dict[str, str]:
    """Versions of what is measured."""
    versions = {"lightning": lightning.__version__, "torch": torch.__version__}
    for name in ("fsspec", "s3fs", "obstore"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def measure(request: dict[str, Any], rank: int, port: int) -> None:
    """Does what was asked for, as one of the ranks if there are several; does not return."""
    if "s3" in request:
        fsspec.config.conf["s3"] = request["s3"]
    if request["ranks"] > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    result = MEASUREMENTS[request["measure"]](**request["arguments"])
    if rank == 0:
        answer(result)
    os._exit(0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """Answers requests until standard input ends."""
    os.dup2(2, 1)  # what Lightning prints is no answer
    answer(describe())
    for line in sys.stdin:
        request = json.loads(line)
        port = free_port()
        children = set()
        for rank in range(request["ranks"]):
            child = os.fork()
            if not child:
                measure(request, rank, port)
            children.add(child)
        while children:
            ended, status = os.wait()
            children.remove(ended)
            if status:
                for child in children:  # else they would wait for the one that has failed
                    os.kill(child, signal.SIGKILL)
                sys.exit(f"{request['measure']} failed")


if __name__ == "__main__":
    main()
