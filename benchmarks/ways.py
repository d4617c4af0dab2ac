"""Ways to save in the background: Lightning's ``AsyncCheckpointIO``, and torch's ``dcp.async_save``.

Each has a method ``save`` for the thread that trains, and one that waits for what goes on after that; those of files
also tell whether it has ended.
"""

import threading
from collections.abc import Callable
from typing import Any

import sharded
import stock_shards
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO

Collect = Callable[[Trainer], dict[str, Any]]


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
    """Saves shards with it."""

    def __init__(self) -> None:
        self._plugin = AsyncCheckpointIO()
        self.plugins: list[Any] = [self._plugin]

    def save(self, trainer: Trainer, url: str) -> None:
        trainer.save_checkpoint(url)

    def wait(self) -> None:
        self._plugin.drain()


class StockShards:
    """Saves shards as stock Lightning does whatever the plugin, for it does not ask it: while training waits."""

    plugins: tuple[Any, ...] = ()

    def save(self, trainer: Trainer, url: str) -> None:
        stock_shards.save(url, collect_shards(trainer), sharded.REST)

    def wait(self) -> None:
        pass


class Torch:
    """Saves with ``dcp.async_save``.

    Args:
        keeps_memory: Whether its copies of the state are made into memory that is kept from one save to the next, which
            it offers (:class:`DefaultStager`), but does not do by itself. Other options of that need CUDA.
        collect: Returns the state to save.
    """

    plugins: tuple[Any, ...] = ()

    def __init__(self, keeps_memory: bool, collect: Collect) -> None:
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if keeps_memory else None
        self._collect = collect
        self._group: Any = None
        self._saved: Any = None

    def save(self, trainer: Trainer, url: str) -> None:
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        self._saved = dcp.async_save(
            self._collect(trainer),
            storage_writer=FsspecWriter(url),
            async_stager=self._stager,
            process_group=self._group,
            no_dist=self._group is None,
        )

    def has_ended(self) -> bool:
        return bool(self._saved.done())

    def wait(self) -> None:
        self._saved.result()


def collect_file(trainer: Trainer) -> dict[str, Any]:
    return {"state_dict": trainer.lightning_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}


def collect_shards(trainer: Trainer) -> dict[str, Any]:
    """What the strategy gives to whatever saves shards."""
    strategy = trainer.strategy
    model, optimizer = strategy.lightning_module_state_dict(), strategy.optimizer_state(trainer.optimizers[0])
    return {"state_dict": model, "optimizer_0": optimizer}


WAYS_OF_FILES: dict[str, Callable[[], Any]] = {
    "plugin": Plugin,
    "torch": lambda: Torch(False, collect_file),
    "torch, kept": lambda: Torch(True, collect_file),
}
WAYS_OF_SHARDS: dict[str, Callable[[], Any]] = {
    "plugin": ShardsByPlugin if sharded.TAKES_URLS else StockShards,
    "torch": lambda: Torch(False, collect_shards),
    "torch, kept": lambda: Torch(True, collect_shards),
}
