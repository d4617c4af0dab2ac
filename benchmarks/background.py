"""Measures saves in the background, as ``client.py`` does others: how long they hold training up."""

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import sharded
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from figures import RANKS
from measuring import MIB, Clock, ready
from memory import Watcher
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, IterableDataset
from ways import WAYS_OF_FILES, WAYS_OF_SHARDS, Collect, collect_file, collect_shards

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

WARM_UP_STEPS = 20
WIDTH, BATCH = 512, 512


class WholeState(sharded.Idle):
    """A model of ``mib`` MiB with its momenta, in tensors of ``tensor_mib``; it takes no step."""

    def __init__(self, mib: int, tensor_mib: int) -> None:
        super().__init__(mib)
        self._tensor_mib = tensor_mib

    def configure_model(self) -> None:
        count = self._mib // self._tensor_mib // 2
        self.layers = sharded.Layer(dict.fromkeys(range(count), self._tensor_mib * MIB // RANKS))


class FSDP1State(sharded.Idle):
    """That of :class:`~sharded.Idle`, wrapped here: stock Lightning would pass a device that torch refuses."""

    def configure_model(self) -> None:
        policy = ModuleWrapPolicy({sharded.Layer})
        self.layers = FullyShardedDataParallel(
            sharded.one_huge(self._mib), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )


class CPUStrategy(FSDPStrategy):
    """Lightning takes FSDP on the CPU if it is a subclass."""


class Endless(IterableDataset[torch.Tensor]):
    """The same batch again and again."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.randn(BATCH, WIDTH)
        while True:
            yield batch


class Stepping(LightningModule):
    """Trains a few layers, and has ``mib`` MiB of parameters beside them, in tensors of ``tensor_mib``."""

    def __init__(self, mib: int, tensor_mib: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        tensors = (torch.full((tensor_mib * MIB // 4,), 1.0) for _ in range(mib // tensor_mib))
        self.frozen = torch.nn.ParameterList(torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.layers.parameters(), lr=1e-6)


class Stalls(Callback):
    """Saves again and again at the end of the only batch; ``result`` is what it took.

    Args:
        way: How.
        collect: Returns the state; what that takes by itself is measured as well.
        url: Where to; a number is added.
        saves: How often, after the first.
        watcher: Of this process.
    """

    def __init__(self, way: Any, collect: Collect, url: str, saves: int, watcher: Watcher) -> None:
        self._way, self._collect, self._url, self._saves, self._watcher = way, collect, url, saves, watcher
        self.result: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        tensors = state_of(trainer)
        buffers = [torch.ones_like(tensor) for tensor in tensors]
        if trainer.global_rank == 0:
            ready()
        trainer.strategy.barrier()
        before = self._level()
        stalls, saved, copied = [], [], []
        with self._watcher.watching() as peak:
            for number in range(self._saves + 1):
                copied.append(slowest(lambda: copy(buffers, tensors)))
                stalls.append(slowest(lambda number=number: self._way.save(trainer, f"{self._url}.{number}")))  # type: ignore[misc]
                saved.append(stalls[-1] + slowest(self._way.wait))
        kept = self._level() - before
        collected = [slowest(lambda: self._collect(trainer)) for _ in range(self._saves)]
        stall, copied_in = statistics.median(stalls[1:]), statistics.median(copied[1:])
        self.result = {
            "first_s": stalls[0],
            "stalls_s": stalls[1:],
            "copies_s": copied[1:],
            "ratio": stall / copied_in,
            "collected_s": collected,
            "rest_ratio": (stall - statistics.median(collected)) / copied_in,
            "saved_s": saved[1:],
            "memory_mib": greatest(peak.bytes - before) / MIB,
            "kept_mib": greatest(kept) / MIB,
        }

    def _level(self) -> int:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is not to count, here or as used again
        return self._watcher.level()


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """What this rank has of the parameters and of their momenta, each with a number of its own."""
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    found = [sharded.local(one) for one in (*trainer.lightning_module.parameters(), *states) if one.numel() > 1]
    for number, tensor in enumerate(found):
        tensor.fill_(number + 1.0)
    return found


def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """In one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    torch.set_num_threads(before)


def slowest(call: Callable[[], Any]) -> float:
    """Seconds that ``call`` takes from when all ranks are there until the last one has done it."""
    if dist.is_initialized():
        dist.barrier()
    with Clock() as clock:
        call()
    return greatest(clock.wall)


def greatest(own: float) -> float:
    """Of all ranks; a collective call."""
    return max(sharded.of_ranks(own)) if dist.is_initialized() else own


class Momenta(Callback):
    """Has the optimizer make its momenta before the only batch."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        trainer.optimizers[0].step()
        trainer.optimizers[0].zero_grad()


class Steps(Callback):
    """Takes the time of steps without a save, while the state is on its way, and again without.

    Args:
        way: How to save.
        url: Where to.
        steps: How many without, each time.
    """

    def __init__(self, way: Any, url: str, steps: int) -> None:
        self._way, self._url, self._steps = way, url, steps
        self._last = self._saved_at = 0.0
        self._without: list[float] = []
        self._during: list[float] = []
        self._again: list[float] = []
        self._uploaded = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        now = time.perf_counter()
        if trainer.global_step > WARM_UP_STEPS:
            self._took(trainer, now - self._last)
        self._last = time.perf_counter()

    def _took(self, trainer: Trainer, seconds: float) -> None:
        if len(self._without) < self._steps:
            self._without.append(seconds)
            if len(self._without) == self._steps:
                self._saved_at = time.perf_counter()
                self._way.save(trainer, self._url)
        elif not self._uploaded:
            self._during.append(seconds)
            if self._way.has_ended():
                self._uploaded = time.perf_counter() - self._saved_at
                self._way.wait()
        else:
            self._again.append(seconds)
            trainer.should_stop = len(self._again) == self._steps

    @property
    def result(self) -> dict[str, Any]:
        means = [statistics.mean(times) for times in (self._without, self._during, self._again)]
        return {
            "without_ms": means[0] * 1e3,
            "during_ms": means[1] * 1e3,
            "again_ms": means[2] * 1e3,
            "ratio": means[1] / means[0],
            "idle_ratio": means[2] / means[0],
            "steps_ms": [seconds * 1e3 for seconds in self._during],
            "idle_steps_ms": [seconds * 1e3 for seconds in self._without + self._again],
            "longest_ms": max(self._during) * 1e3,
            "idle_longest_ms": max(self._without + self._again) * 1e3,
            "uploaded_s": self._uploaded,
        }


def make_trainer(way: Any, callbacks: list[Callback], strategy: Any = "auto", devices: int = 1) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, plugins=list(way.plugins), callbacks=callbacks,
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip


def warm_up(url: str) -> None:
    """Imports what a save needs, and connects to the store."""
    state, place = {"x": torch.ones(MIB // 4)}, f"{url}.warm-up-{os.getpid()}"
    TorchCheckpointIO().save_checkpoint(state, place)
    dcp.async_save(state, storage_writer=FsspecWriter(f"{place}-shards"), no_dist=True).result()


def stall_of_file(url: str, mib: int, tensor_mib: int, saves: int, way: str) -> dict[str, Any]:
    """How long training stands still for saves of one file."""
    watcher = Watcher()
    warm_up(url)
    one = WAYS_OF_FILES[way]()
    stalls = Stalls(one, collect_file, url, saves, watcher)
    trainer = make_trainer(one, [Momenta(), stalls])
    trainer.fit(WholeState(mib, tensor_mib), DataLoader([0.0]))
    return stalls.result


def stall_of_shards(url: str, strategy: str, mib: int, saves: int, way: str) -> dict[str, Any]:
    """How long training stands still for sharded saves of ``mib`` MiB a rank."""
    watcher = Watcher()
    warm_up(url)
    one = WAYS_OF_SHARDS[way]()
    stalls = Stalls(one, collect_shards, url, saves, watcher)
    how: Any = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    model = sharded.Idle(mib)
    if strategy == "fsdp1":
        how, model = CPUStrategy(state_dict_type="sharded"), FSDP1State(mib)
    trainer = make_trainer(one, [Momenta(), stalls], how, RANKS)
    trainer.fit(model, DataLoader([0.0]))
    return stalls.result


def steps_beside_a_save(url: str, mib: int, tensor_mib: int, steps: int, way: str) -> dict[str, Any]:
    """What steps of training take while one file is on its way; they have one core."""
    warm_up(url)
    torch.set_num_threads(1)
    one = WAYS_OF_FILES[way]()
    timed = Steps(one, url, steps)
    trainer = make_trainer(one, [timed])
    ready()
    trainer.fit(Stepping(mib, tensor_mib), DataLoader(Endless(), batch_size=None))
    return timed.result


MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (stall_of_file, stall_of_shards, steps_beside_a_save)
}
