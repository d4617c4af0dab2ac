"""Measurements of sharded checkpoints; each runs in every rank at the same time."""

import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import stock_shards
import torch
from files import QUIET
from measuring import Clock, Meter, barrier, of_ranks, rank
from states import RANKS, Layer, State, many_small, momentum, one_huge, shard
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from lightning.fabric import Fabric, strategies
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import strategies as trainer_strategies

#: Whether the Lightning that is measured saves shards to URLs; else ``stock_shards.py`` does it.
TAKES_URLS = importlib.util.find_spec("lightning.fabric.storage") is not None
#: Of one process in the background: what its stall takes varies.
SAVES = 5
FULL = "fsdp1, full"
REST = {"steps": 1}


class CPUStrategy(strategies.FSDPStrategy):
    """FSDP1 of Fabric; Lightning takes it on the CPU if it is a subclass."""


class TrainerCPUStrategy(trainer_strategies.FSDPStrategy):
    """That of the Trainer."""


class Training:
    """A model and its optimizer, sharded by Fabric, that can be saved and loaded.

    Args:
        strategy: ``"fsdp2"``, ``"fsdp1"``, or ``"fsdp1, full"`` for checkpoints that are one file.
        model: The model.
        has_optimizer: Whether there is an optimizer.
        plugins: The plugins of Fabric.
    """

    def __init__(
        self, strategy: str, model: torch.nn.Module, has_optimizer: bool = True, plugins: list[Any] | None = None
    ) -> None:
        how: Any = CPUStrategy(state_dict_type="full" if strategy == FULL else "sharded")
        if strategy == "fsdp2":
            parallelize = lambda module, mesh: shard(module, "fsdp2", mesh)  # noqa: E731
            how = strategies.ModelParallelStrategy(parallelize, data_parallel_size=RANKS, tensor_parallel_size=1)
        self._fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=how, plugins=plugins)
        self._fabric.launch()
        wrapped = self._fabric.setup_module(model if strategy == "fsdp2" else shard(model, "fsdp1"))
        optimizer = momentum(wrapped) if has_optimizer else None
        self._content = {"model": wrapped, **REST}
        if optimizer is not None:
            self._content["optimizer"] = self._fabric.setup_optimizers(optimizer)
        self._objects = (wrapped.module, optimizer)
        self.state = State(*self._objects)

    def save(self, url: str) -> None:
        if TAKES_URLS or "://" not in url:
            self._fabric.save(url, self._content)
        else:
            stock_shards.save(url, stock_shards.collect(*self._objects), REST)

    def load(self, url: str) -> None:
        if TAKES_URLS or "://" not in url:
            self._fabric.load(url, self._content)
        else:
            stock_shards.load(url, *self._objects)


def warm_up(url: str, strategy: str = "fsdp2", load: bool = False) -> None:
    """Imports all that a checkpoint needs, and connects to the store."""
    training = Training(strategy, Layer({0: 1024}))
    training.save(f"{url}.warm-up")
    if load:
        training.load(f"{url}.warm-up")


def save_shards(meter: Meter, url: str, strategy: str, mib: int) -> dict[str, float]:
    """Saves a model and its optimizer."""
    warm_up(url, strategy)
    training = Training(strategy, one_huge(mib))
    training.state.fill()
    taken = meter.measure(lambda: training.save(url))
    return {**taken, "cpu_s_per_gib": taken["cpu_s"] / (RANKS * mib / 1024)}


def save_in_background(meter: Meter, url: str, strategy: str, mib: int) -> dict[str, float]:
    """Saves a model and its optimizer with ``AsyncCheckpointIO``; medians of several saves, with the memory there."""
    from lightning.fabric.plugins import AsyncCheckpointIO  # stock Lightning has none for Fabric

    warm_up(url, strategy)
    plugin = AsyncCheckpointIO()
    training = Training(strategy, one_huge(mib), plugins=[plugin])
    training.state.fill()
    training.save(f"{url}.first")
    plugin.drain()

    def save(place: str, stall: Clock) -> None:
        with stall:
            training.save(place)
        plugin.drain()

    results = []
    for number in range(SAVES):
        stall = Clock()
        taken = meter.measure(partial(save, f"{url}.{number}", stall))
        results.append({**taken, "stall_s": max(of_ranks(stall.wall))})
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


def load_shards(meter: Meter, url: str, strategy: str, mib: int) -> dict[str, float]:
    """Loads what :func:`save_shards` saved, and compares it."""
    warm_up(url, strategy, load=True)
    return _load(meter, url, Training(strategy, one_huge(mib)))


def save_small(meter: Meter, url: str, tensors: int, kib: int, kinds: int) -> dict[str, float]:
    """Saves a model of small parameters, for :func:`load_small`."""
    training = Training("fsdp2", many_small(tensors, kib, kinds), has_optimizer=False)
    training.state.fill()
    return meter.measure(lambda: training.save(url))


def load_small(meter: Meter, url: str, tensors: int, kib: int, kinds: int) -> dict[str, float]:
    """Loads them in the order of their numbers, whatever ``kinds`` says of that in the file, and compares them."""
    warm_up(url, load=True)
    return _load(meter, url, Training("fsdp2", many_small(tensors, kib), has_optimizer=False))


def _load(meter: Meter, url: str, training: Training) -> dict[str, float]:
    taken = meter.measure(lambda: training.load(url))
    training.state.check()
    return taken


def shards_on_disk(meter: Meter, url: str, strategy: str, mib: int) -> dict[str, float]:
    """Saves to a disk, and loads that, most likely from the system's cache of it."""
    Path(url).parent.mkdir(exist_ok=True)
    warm_up(url, strategy, load=True)
    training = Training(strategy, one_huge(mib))
    training.state.fill()
    saved = meter.measure(lambda: training.save(url))
    training.state.clear()
    loaded = _load(meter, url, training)
    barrier()
    if rank() == 0:
        rmtree(Path(url).parent)
    return {f"{verb}_{key}": value for verb, one in (("save", saved), ("load", loaded)) for key, value in one.items()}


class Idle(LightningModule):
    """A model that takes no step; its strategy is that of :func:`~states.shard`."""

    def __init__(self, build: Callable[[], torch.nn.Module], strategy: str = "") -> None:
        super().__init__()
        self.automatic_optimization = False
        self._build, self._strategy = build, strategy
        self.layers = torch.nn.Module()

    def configure_model(self) -> None:
        self.layers = shard(self._build(), self._strategy, self.device_mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return momentum(self)

    def training_step(self, batch: Any, index: int) -> None:
        pass


class AtEnd(Callback):
    """Measures once, at the end of the only batch, and keeps what came of it in ``result``."""

    def __init__(self, measure: Callable[[Trainer, State], dict[str, Any]]) -> None:
        self._measure = measure
        self.result: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        state = State(pl_module, trainer.optimizers[0])
        state.fill()
        self.result = self._measure(trainer, state)


def fit_idle(
    build: Callable[[], torch.nn.Module],
    measure: Callable[[Trainer, State], dict[str, Any]],
    strategy: str = "",
    plugins: list[Any] | None = None,
) -> dict[str, Any]:
    """Fits such a model, in one process or in all ranks, and returns what was measured then."""
    how: Any = "auto"
    if strategy == "fsdp1":
        how = TrainerCPUStrategy(state_dict_type="sharded")
    elif strategy == "fsdp2":
        how = trainer_strategies.ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    at_end = AtEnd(measure)
    trainer = make_trainer(at_end, plugins, strategy=how, devices=RANKS if strategy else 1)
    trainer.fit(Idle(build, strategy), DataLoader([0.0]))
    return at_end.result


def make_trainer(callback: Callback, plugins: list[Any] | None, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[callback], plugins=plugins, enable_checkpointing=False,
        use_distributed_sampler=False, **QUIET, **options,
    )  # fmt: skip


def collect(trainer: Trainer) -> dict[str, Any]:
    """What the Trainer's strategy gives to whatever saves shards; of FSDP1, what it does in stock Lightning."""
    strategy = trainer.strategy
    if FullyShardedDataParallel.fsdp_modules(strategy.model):
        return stock_shards.collect(strategy.model, trainer.optimizers[0])
    model, optimizer = strategy.lightning_module_state_dict(), strategy.optimizer_state(trainer.optimizers[0])
    return {"state_dict": model, "optimizer_0": optimizer}


def save_by_trainer(trainer: Trainer, url: str) -> None:
    if TAKES_URLS:
        trainer.save_checkpoint(url)
    else:
        stock_shards.save(url, collect(trainer), REST)


def save_shards_by_trainer(meter: Meter, url: str, mib: int) -> dict[str, float]:
    """Saves a model and its optimizer of ``mib`` MiB a rank."""
    warm_up(url)

    def save(trainer: Trainer, state: State) -> dict[str, float]:
        return meter.measure(lambda: save_by_trainer(trainer, url))

    return fit_idle(partial(one_huge, mib), save, "fsdp2")


MEASUREMENTS = (
    save_shards, save_in_background, load_shards, save_small, load_small, shards_on_disk, save_shards_by_trainer
)  # fmt: skip
