"""Measurements of saves in the background: how long they hold training up, and what it takes meanwhile."""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from files import Training, make_state
from measuring import MIB, Clock, Meter, barrier, of_ranks, trim
from sharded import TAKES_URLS, collect, fit_idle, make_trainer, save_by_trainer
from states import State, one_huge, whole
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils.data import DataLoader

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO

WARM_UP_STEPS = 20
WIDTH, BATCH = 512, 512
MANY = 100_000


class Way(NamedTuple):
    """A way to save: what a thread that trains calls, and what tells of that which goes on after it."""

    save: Callable[[Trainer, str], Any]
    wait: Callable[[], Any]
    has_ended: Callable[[], bool]
    plugins: list[Any]


class Noting(TorchCheckpointIO):
    """Saves files, and notes each when it has: ``AsyncCheckpointIO`` of stock Lightning does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: SimpleQueue[None] = SimpleQueue()

    def save_checkpoint(self, *arguments: Any, **more: Any) -> None:
        try:
            super().save_checkpoint(*arguments, **more)
        finally:
            self.ended.put(None)


def by_plugin(is_sharded: bool) -> Way:
    """With ``AsyncCheckpointIO``. Stock Lightning does not ask it for shards: training waits for the whole save."""
    if is_sharded:
        plugin = AsyncCheckpointIO()
        wait = plugin.drain if TAKES_URLS else lambda: None
        return Way(save_by_trainer, wait, lambda: True, [plugin] if TAKES_URLS else [])
    io = Noting()
    return Way(Trainer.save_checkpoint, io.ended.get, lambda: not io.ended.empty(), [AsyncCheckpointIO(io)])


def by_torch(collect: Callable[[Trainer], dict[str, Any]], keeps_memory: bool) -> Way:
    """With ``dcp.async_save``.

    Args:
        collect: Returns the state to save.
        keeps_memory: Whether its copies of the state are made into memory that is kept from one save to the next, which
            it offers (:class:`DefaultStager`), but does not do by itself. Other options of that need CUDA.
    """
    stager = DefaultStager(StagingOptions(False, False, False, False)) if keeps_memory else None
    groups: list[Any] = []
    saved: list[Any] = []

    def save(trainer: Trainer, url: str) -> None:
        if dist.is_initialized() and not groups:
            groups.append(dist.new_group(backend="gloo"))
        group = groups[0] if groups else None
        writer = FsspecWriter(url)
        saved[:] = [
            dcp.async_save(
                collect(trainer), storage_writer=writer, async_stager=stager, process_group=group, no_dist=group is None
            )
        ]

    return Way(save, lambda: saved[0].result(), lambda: bool(saved[0].done()), [])


def way_to_save(name: str, is_sharded: bool) -> Way:
    """Returns ``"plugin"``, ``"torch"`` or ``"torch, kept"``."""
    if name == "plugin":
        return by_plugin(is_sharded)
    return by_torch(collect if is_sharded else collect_file, keeps_memory=name == "torch, kept")


def collect_file(trainer: Trainer) -> dict[str, Any]:
    return {"state_dict": trainer.lightning_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}


def stalls(meter: Meter, way: Way, url: str, saves: int, trainer: Trainer, state: State) -> dict[str, Any]:
    """Saves once, and ``saves`` times more."""
    tensors = state.tensors
    buffers = [torch.ones_like(tensor) for tensor in tensors]
    meter.ready()
    held, saved, copied = [], [], []
    trim()
    with meter.watcher.watching() as peak:
        for number in range(saves + 1):
            copied.append(slowest(partial(copy, buffers, tensors)))
            held.append(slowest(partial(way.save, trainer, f"{url}.{number}")))
            saved.append(held[-1] + slowest(way.wait))
    trim()
    kept = meter.watcher.level() - peak.before
    return {
        "first_s": held[0],
        "stalls_s": held[1:],
        "copies_s": copied[1:],
        "ratio": statistics.median(held[1:]) / statistics.median(copied[1:]),
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
    measure = partial(stalls, meter, one, url, saves)
    return fit_idle(partial(whole, mib, tensor_mib), measure, plugins=one.plugins)


def stall_of_shards(meter: Meter, url: str, strategy: str, mib: int, saves: int, way: str) -> dict[str, Any]:
    """Measures how long training stands still for sharded saves of ``mib`` MiB a rank."""
    warm_up(url)
    one = way_to_save(way, is_sharded=True)
    measure = partial(stalls, meter, one, url, saves)
    return fit_idle(partial(one_huge, mib), measure, strategy, one.plugins)


class Steps(Callback):
    """Takes the time of ``steps`` steps without a save, of all while the state is in flight, and of as many again."""

    def __init__(self, way: Way, url: str, steps: int) -> None:
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
    trainer = make_trainer(timed, one.plugins, devices=1)
    batches: Any = DataLoader([torch.randn(BATCH, WIDTH)] * MANY, batch_size=None)  # the same again and again
    model = Training(WIDTH, 4, make_state(mib, tensor_mib).values())
    meter.ready()
    trainer.fit(model, batches)
    return timed.result


MEASUREMENTS = (stall_of_file, stall_of_shards, steps_beside_a_save)
