"""Saves a state that is on a device and tells how much memory that took; ``test_sharded_saves.py`` runs it.

``saving_worker.py API DEVICE HUGE_MIB URL`` saves with ``fabric`` or ``trainer`` a model that has a parameter of
HUGE_MIB and an optimizer that has a momentum of it, overwrites both in place as soon as the save has returned, loads
them, and compares. It prints a line of JSON: the extra MiB that the save took of the host and of the device.
"""

import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from memory import Watcher

API, DEVICE, HUGE_MIB, URL = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
MIB = 1 << 20
SEED = 11


class Net(torch.nn.Module):
    """Parameters of several sizes and types, one of them huge; it takes no step."""

    def __init__(self, huge_mib: int) -> None:
        super().__init__()
        self.huge = torch.nn.Parameter(torch.zeros(huge_mib, MIB // 4, device=DEVICE))
        sizes = [(16, MIB // 4)] * 4 + [(3, 5, 7)] * 20
        self.others = torch.nn.ParameterList(torch.zeros(size, device=DEVICE) for size in sizes)
        self.short = torch.nn.Parameter(torch.zeros(33, MIB // 2, device=DEVICE, dtype=torch.bfloat16))


def shard(module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


def make_momenta(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def pieces(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The bytes of all parameters and momenta, in their own memory."""
    for parameter in optimizer.param_groups[0]["params"]:
        for tensor in (parameter, optimizer.state[parameter]["momentum_buffer"]):
            yield (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(torch.uint8)


def fill(optimizer: torch.optim.Optimizer) -> None:
    """Any bits, NaN included."""
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    for piece in pieces(optimizer):
        piece.random_(generator=generator)


def check(optimizer: torch.optim.Optimizer) -> None:
    generator = torch.Generator(DEVICE).manual_seed(SEED)
    for piece in pieces(optimizer):
        if not torch.equal(piece, torch.empty_like(piece).random_(generator=generator)):
            raise ValueError("what was loaded is not what was saved")


class Meter:
    """Extra MiB of the host and of the device that a body takes."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def measure(self, body: Any) -> dict[str, float]:
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed before could be used again, and would not count
        on_device, pinned = self._device(reset=True), self._pinned("current")
        before = self._watcher.level()
        with self._watcher.watching() as peak:
            body()
        extra, most_on_device, most_pinned = peak.bytes - before, self._device(), self._pinned("peak")
        # what was pinned before the body could be used again by it; what the driver hides from the kernel comes on top
        extra += pinned if self._kernel_counts_pinned() else most_pinned
        return {"host_mib": extra / MIB, "device_mib": (most_on_device - on_device) / MIB}

    def _device(self, reset: bool = False) -> int:
        if DEVICE == "cpu":
            return 0
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()
        return torch.cuda.max_memory_allocated()

    def _pinned(self, which: str) -> int:
        return 0 if DEVICE == "cpu" else int(torch.cuda.host_memory_stats()[f"allocated_bytes.{which}"])

    def _kernel_counts_pinned(self) -> bool:
        if DEVICE == "cpu":
            return True
        before = self._watcher.level()
        block = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
        return self._watcher.level() - before > block.nbytes // 2


def setup(huge_mib: int) -> tuple[Fabric, dict[str, Any], torch.optim.Optimizer]:
    strategy = ModelParallelStrategy(shard, data_parallel_size=1, tensor_parallel_size=1)
    fabric = Fabric(accelerator=DEVICE, devices=1, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(Net(huge_mib))
    optimizer = momentum(model)
    make_momenta(optimizer)
    return fabric, {"model": model, "optimizer": fabric.setup_optimizers(optimizer), "steps": 3}, optimizer


def with_fabric(meter: Meter) -> dict[str, float]:
    fabric, state, optimizer = setup(HUGE_MIB)
    fill(optimizer)
    result = meter.measure(lambda: fabric.save(URL, state))
    for piece in pieces(optimizer):
        piece.zero_()
    fabric.load(URL, state)
    check(optimizer)
    return result


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_model(self) -> None:
        self.net = shard(Net(HUGE_MIB), self.device_mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return momentum(self)

    def training_step(self, batch: Any, index: int) -> None:
        pass


class Save(Callback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.result: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        optimizer = trainer.optimizers[0]
        make_momenta(optimizer)
        fill(optimizer)
        self.result = self.meter.measure(lambda: trainer.save_checkpoint(URL))
        for piece in pieces(optimizer):
            piece.zero_()
        trainer.strategy.load_checkpoint(URL)
        check(optimizer)


def with_trainer(meter: Meter) -> dict[str, float]:
    save = Save(meter)
    trainer = Trainer(
        accelerator=DEVICE, devices=1, strategy=TrainerStrategy(data_parallel_size=1, tensor_parallel_size=1),
        max_epochs=1, callbacks=[save], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(TensorDataset(torch.zeros(1))))
    return save.result


def main() -> None:
    meter = Meter(Watcher())  # as the first of all: it forks this process
    fabric, state, _ = setup(1)  # imports all that a checkpoint needs, and connects to the store
    fabric.save(f"{URL}.warm-up", state)
    fabric.load(f"{URL}.warm-up", state)
    del fabric, state
    print(json.dumps(with_trainer(meter) if API == "trainer" else with_fabric(meter)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
