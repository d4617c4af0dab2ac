"""Measurements of checkpoints of one file."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from measuring import MIB, Clock, Meter
from torch.utils.data import DataLoader

from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

TICK = 0.001
PARAMETERS = 24
LEARNING_RATE = 0.1
#: Of a Trainer that does nothing but what is measured.
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def make_state(mib: int, tensor_mib: int) -> dict[str, torch.Tensor]:
    """Tensors of float32, each filled with its own number."""
    return {str(number): torch.full((tensor_mib * MIB // 4,), number + 1.0) for number in range(mib // tensor_mib)}


def warm_up(url: str, load: bool = False) -> None:
    """Imports the store's client and connects to the store: what the first checkpoint of a process waits for."""
    place = f"{url}.warm-up"
    TorchCheckpointIO().save_checkpoint({"x": torch.ones(MIB // 4)}, place)
    if load:
        TorchCheckpointIO().load_checkpoint(place)


def save(meter: Meter, url: str, mib: int, tensor_mib: int) -> dict[str, float]:
    """Saves one file."""
    warm_up(url)
    state = make_state(mib, tensor_mib)
    return meter.measure(lambda: TorchCheckpointIO().save_checkpoint(state, url))


def save_local(meter: Meter, url: str, mib: int, tensor_mib: int) -> dict[str, float]:
    """Saves one file to a disk, and waits until it is there, if saving it has not."""
    warm_up(url)
    state = make_state(mib, tensor_mib)
    meter.ready()
    with Clock() as durable:
        with Clock() as clock:
            TorchCheckpointIO().save_checkpoint(state, url)
        with open(url, "rb+") as file:
            os.fsync(file.fileno())
    os.remove(url)
    return {"wall_s": clock.wall, "cpu_s": clock.cpu, "durable_s": durable.wall}


def hold_up(meter: Meter, url: str, mib: int, tensor_mib: int) -> dict[str, float]:
    """Measures how late a thread that wakes up every millisecond is while another saves, and while another sleeps."""
    warm_up(url)
    state = make_state(mib, tensor_mib)
    meter.ready()
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


def load(meter: Meter, url: str, mib: int, tensor_mib: int) -> dict[str, float]:
    """Loads what :func:`save` saved, and compares it."""
    warm_up(url, load=True)
    state: dict[str, torch.Tensor] = {}
    taken = meter.measure(lambda: state.update(TorchCheckpointIO().load_checkpoint(url)))
    for number in range(mib // tensor_mib):
        tensor = state[str(number)]
        if tensor.numel() != tensor_mib * MIB // 4 or not bool((tensor == number + 1.0).all()):
            raise ValueError(f"tensor {number} is not what was saved")
    return taken


def make_training(mib: int) -> tuple[Fabric, Any, Any]:
    """A model with gradients and AdamW, whose state has the given size: three tensors for each parameter."""
    fabric = Fabric(accelerator="cpu", devices=1)
    module = torch.nn.ParameterList(torch.ones(mib * MIB // PARAMETERS // 3 // 4) for _ in range(PARAMETERS))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return fabric, model, optimizer


def save_training(meter: Meter, url: str, mib: int) -> dict[str, float]:
    """Saves the state after one step of an optimizer, for :func:`resume`."""
    fabric, model, optimizer = make_training(mib)
    optimizer.step()
    fabric.save(url, {"model": model, "optimizer": optimizer})
    return {}


def resume(meter: Meter, url: str, mib: int) -> dict[str, float]:
    """Restores a training state into a model and an optimizer, takes a step, and compares the outcome."""
    warm_up(url, load=True)
    fabric, model, optimizer = make_training(mib)
    meter.ready()
    with meter.watcher.watching() as restore:
        fabric.load(url, {"model": model, "optimizer": optimizer})
    with meter.watcher.watching() as step:
        optimizer.step()
    expected = 1 - 2 * LEARNING_RATE  # nearly, since all gradients are 1
    if any(bool(((parameter - expected).abs() > 0.01).any()) for parameter in model.parameters()):
        raise ValueError("the parameters are not those of two steps")
    return {"restore_mib": restore.extra / MIB, "step_mib": (step.bytes - restore.before) / MIB}


class Training(LightningModule):
    """Trains a few layers of ``width`` features, and has other parameters beside them, which are frozen."""

    def __init__(self, width: int, depth: int, frozen: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
        self.frozen = torch.nn.ParameterList(torch.nn.Parameter(tensor, requires_grad=False) for tensor in frozen)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.layers.parameters(), lr=1e-6)


def fit(meter: Meter, url: str, epochs: int) -> dict[str, float]:
    """Trains with checkpoints, of which the newest and a copy of it are kept."""
    keep = ModelCheckpoint(dirpath=url, save_top_k=1, save_last=True)
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[keep], **QUIET)
    batches: Any = DataLoader(list(torch.randn(64, 32)), batch_size=16)
    return meter.measure(lambda: trainer.fit(Training(32, 1), batches))


MEASUREMENTS = (save, save_local, hold_up, load, save_training, resume, fit)
