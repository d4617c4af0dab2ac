"""Measurements of saves in the background: how long they hold training up, and what it takes meanwhile.

A way to save has a method ``save`` for the thread that trains, and ``wait`` for what goes on after that; those of files
also tell whether it has ended.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measuring import MIB, Clock, Meter, barrier, of_ranks, trim
from sharded import TAKES_URLS, collect, fit_idle, make_trainer, save_by_trainer
from states import State, one_huge, whole
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import DataLoader, IterableDataset

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO

WARM_UP_STEPS = 20
WIDTH, BATCH = 512, 512


class Noting(TorchCheckpointIO):
    """Saves files, and tells when it has: ``AsyncCheckpointIO`` of stock Lightning does not."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def save_checkpoint(self, *arguments: Any, **more: Any) -> None:
        try:
            super().save_checkpoint(*arguments, **more)
        finally:
            self.ended.set()


class Plugin:
    """Saves files with ``AsyncCheckpointIO``."""

    def __init__(self) -> None:
        self._io = Noting()
        self.plugins: list[Any] = [AsyncCheckpointIO(self._io)]

    def save(self, trainer: Trainer, url: str) -> None:
        self._io.ended.clear()
        trainer.save_checkpoint(url)

    def has_ended(self) -> bool:
        return self._io.ended.is_set()

    def wait(self) -> None:
        self._io.ended.wait()


class ShardsByPlugin:
    """Saves shards with it. Stock Lightning does not ask it for these: there, training waits for the whole save."""

    def __init__(self) -> None:
        self.plugins: list[Any] = [AsyncCheckpointIO()] if TAKES_URLS else []

    def save(self, trainer: Trainer, url: str) -> None:
        save_by_trainer(trainer, url)

    def wait(self) -> None:
        for plugin in self.plugins:
            plugin.drain()


class Torch:
    """Saves with ``dcp.async_save``.

    Args:
        collect: Returns the state to save.
        keeps_memory: Whether its copies of the state are made into memory that is kept from one save to the next, which
            it offers (:class:`DefaultStager`), but does not do by itself. Other options of that need CUDA.
    """

    plugins: tuple[Any, ...] = ()

    def __init__(self, collect: Callable[[Trainer], dict[str, Any]], keeps_memory: bool) -> None:
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if keeps_memory else None
        self._collect = collect
        self._group: Any = None
        self._saved: Any = None

    def save(self, trainer: Trainer, url: str) -> None:
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        self._saved = dcp.async_save(
            self._collect(trainer), storage_writer=FsspecWriter(url), async_stager=self._stager,
            process_group=self._group, no_dist=self._group is None,
        )  # fmt: skip

    def has_ended(self) -> bool:
        return bool(self._saved.done())

    def wait(self) -> None:
        self._saved.result()


def collect_file(trainer: Trainer) -> dict[str, Any]:
    return {"state_dict": trainer.lightning_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}


def way_to_save(name: str, is_sharded: bool) -> Any:
    """Returns ``"plugin"``, ``"torch"`` or ``"torch, kept"``."""
    if name == "plugin":
        return ShardsByPlugin() if is_sharded else Plugin()
    return Torch(collect if is_sharded else collect_file, name == "torch, kept")


class Stalls(Callback):
    """Saves again and again at the end of the only batch; ``result`` is what it took.

    Args:
        meter: Of this process.
        way: The way to save.
        collect: Returns the state; what that takes by itself is measured as well.
        url: Where to; a number is added.
        saves: How often, after the first.
    """

    def __init__(self, meter: Meter, way: Any, collect: Callable[[Trainer], Any], url: str, saves: int) -> None:
        self._meter, self._way, self._collect, self._url, self._saves = meter, way, collect, url, saves
        self.result: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        state = State(pl_module, trainer.optimizers[0])
        state.fill()
        tensors = state.tensors
        buffers = [torch.ones_like(tensor) for tensor in tensors]
        self._meter.ready()
        stalls, saved, copied = [], [], []
        trim()
        with self._meter.watcher.watching() as peak:
            for number in range(self._saves + 1):
                copied.append(slowest(partial(copy, buffers, tensors)))
                stalls.append(slowest(partial(self._way.save, trainer, f"{self._url}.{number}")))
                saved.append(stalls[-1] + slowest(self._way.wait))
        trim()
        kept = self._meter.watcher.level() - peak.before
        collected = [slowest(partial(self._collect, trainer)) for _ in range(self._saves)]
        stall, copied_in = statistics.median(stalls[1:]), statistics.median(copied[1:])
        self.result = {
            "first_s": stalls[0],
            "stalls_s": stalls[1:],
            "copies_s": copied[1:],
            "ratio": stall / copied_in,
            "collected_s": collected,
            "rest_ratio": (stall - statistics.median(collected)) / copied_in,
            "saved_s": saved[1:],
            "memory_mib": max(of_ranks(peak.extra)) / MIB,
            "kept_mib": max(of_ranks(kept)) / MIB,
        }


def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies in one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    torch.set_num_threads(before)


def slowest(call: Callable[[], Any]) -> float:
    """Seconds that ``call`` takes from when all ranks are there until the last one has done it."""
    barrier()
    with Clock() as clock:
        call()
    return float(max(of_ranks(clock.wall)))


def warm_up(url: str) -> None:
    """Imports what a save needs, and connects to the store."""
    state, place = {"x": torch.ones(MIB // 4)}, f"{url}.warm-up-{os.getpid()}"
    TorchCheckpointIO().save_checkpoint(state, place)
    dcp.async_save(state, storage_writer=FsspecWriter(f"{place}-shards"), no_dist=True).result()


def stall_of_file(meter: Meter, url: str, mib: int, tensor_mib: int, saves: int, way: str) -> dict[str, Any]:
    """Measures how long training stands still for saves of one file."""
    warm_up(url)
    one = way_to_save(way, is_sharded=False)
    stalls = Stalls(meter, one, collect_file, url, saves)
    fit_idle(partial(whole, mib, tensor_mib), stalls, plugins=list(one.plugins))
    return stalls.result


def stall_of_shards(meter: Meter, url: str, strategy: str, mib: int, saves: int, way: str) -> dict[str, Any]:
    """Measures how long training stands still for sharded saves of ``mib`` MiB a rank."""
    warm_up(url)
    one = way_to_save(way, is_sharded=True)
    stalls = Stalls(meter, one, collect, url, saves)
    fit_idle(partial(one_huge, mib), stalls, strategy, list(one.plugins))
    return stalls.result


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


class Steps(Callback):
    """Takes the time of steps without a save, while the state is on its way, and again without.

    Args:
        way: The way to save.
        url: Where to.
        steps: How many without, each time.
    """

    def __init__(self, way: Any, url: str, steps: int) -> None:
        self._way, self._url, self._steps = way, url, steps
        self._last = self._saved_at = self._uploaded = 0.0
        self._without: list[float] = []
        self._during: list[float] = []
        self._again: list[float] = []

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
        without, during, again = (statistics.mean(times) for times in (self._without, self._during, self._again))
        return {
            "without_ms": without * 1e3,
            "during_ms": during * 1e3,
            "ratio": during / without,
            "idle_ratio": again / without,
            "steps_ms": [seconds * 1e3 for seconds in self._during],
            "idle_steps_ms": [seconds * 1e3 for seconds in self._without + self._again],
            "longest_ms": max(self._during) * 1e3,
            "idle_longest_ms": max(self._without + self._again) * 1e3,
            "uploaded_s": self._uploaded,
        }


def steps_beside_a_save(meter: Meter, url: str, mib: int, tensor_mib: int, steps: int, way: str) -> dict[str, Any]:
    """Measures what steps of training take while one file is on its way; they have one core."""
    warm_up(url)
    torch.set_num_threads(1)
    one = way_to_save(way, is_sharded=False)
    timed = Steps(one, url, steps)
    trainer = make_trainer(timed, list(one.plugins), devices=1)
    meter.ready()
    trainer.fit(Stepping(mib, tensor_mib), DataLoader(Endless(), batch_size=None))
    return timed.result


MEASUREMENTS = (stall_of_file, stall_of_shards, steps_beside_a_save)
