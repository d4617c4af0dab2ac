"""Measures sharded checkpoints, as ``client.py`` does others; each measurement runs in every rank at the same time."""

import ctypes
import importlib.util
import statistics
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import stock_shards
import torch
import torch.distributed as dist
from figures import RANKS
from measuring import MIB, Clock, ready
from memory import Watcher
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerStrategy

#: Whether the Lightning that is measured saves shards to URLs; else ``stock_shards.py`` does it.
TAKES_URLS = importlib.util.find_spec("lightning.fabric.storage") is not None
KIB = 1 << 10
#: Of one process in the background: what its stall takes varies.
SAVES = 5
REST = {"steps": 1}


class Layer(torch.nn.Module):
    """Parameters of float32 by number, each of so many bytes of every rank."""

    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__()
        for number, size in sizes.items():
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.zeros(RANKS, size // 4)))

    def by_number(self) -> dict[int, torch.nn.Parameter]:
        found = self.named_parameters(recurse=False)
        return {int(name.removeprefix("weight")): parameter for name, parameter in found}


def one_huge(mib: int) -> torch.nn.Module:
    """A model that takes ``mib`` MiB of a rank with its momenta, three quarters of that for one parameter."""
    sizes = [mib * MIB * 3 // 8, mib * MIB // 16, mib * MIB // 16]
    return torch.nn.Sequential(*(Layer({number: size}) for number, size in enumerate(sizes)))


def many_small(tensors: int, kib: int, kinds: int = 1) -> torch.nn.Module:
    """A model of parameters of ``kib`` KiB a rank; of several kinds in turn, all of a kind before those of the next."""
    return Layer({number: kib * KIB for number in sorted(range(tensors), key=lambda number: number % kinds)})


def shard(module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """Shards with FSDP2."""
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


class CPUStrategy(FSDPStrategy):
    """FSDP1; Lightning takes it on the CPU if it is a subclass."""


class Pieces:
    """What this rank has of a model and its optimizer.

    Args:
        model: The model, sharded.
        optimizer: It keeps a momentum of every parameter; ``None`` if the checkpoint has none.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        layers = [module for module in model.modules() if isinstance(module, Layer)]
        self._parameters = {number: one for layer in layers for number, one in layer.by_number().items()}
        self._optimizer = optimizer
        if optimizer is not None:
            for parameter in self._parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # makes the momenta
            optimizer.zero_grad()

    def fill(self) -> None:
        """Gives each a number of its own."""
        for tensor, number in self._numbered():
            tensor.fill_(number)

    def clear(self) -> None:
        """Forgets the numbers."""
        for tensor, _ in self._numbered():
            tensor.zero_()

    def check(self) -> None:
        """Compares them with what :meth:`fill` gave.

        Raises:
            ValueError: One is different.
        """
        for tensor, number in self._numbered():
            if not bool((tensor == number).all()):
                raise ValueError(f"rank {dist.get_rank()} has not loaded the {number} that was saved")

    def _numbered(self) -> list[tuple[torch.Tensor, float]]:
        found = []
        for number, parameter in self._parameters.items():
            value = number + 1 + dist.get_rank() / RANKS
            found.append((local(parameter), value))
            if self._optimizer is not None:
                found.append((local(self._optimizer.state[parameter]["momentum_buffer"]), -value))
        return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


class Training:
    """A model and its optimizer, set up by Fabric, and what takes them to a checkpoint and back.

    Args:
        strategy: ``"fsdp2"`` or ``"fsdp1"``.
        model: It is sharded here.
        with_optimizer: Whether there is an optimizer.
        plugins: For Fabric.
    """

    def __init__(
        self, strategy: str, model: torch.nn.Module, with_optimizer: bool, plugins: list[Any] | None = None
    ) -> None:
        how: Any
        if strategy == "fsdp1":
            how = CPUStrategy(state_dict_type="sharded")
        else:
            how = ModelParallelStrategy(shard, data_parallel_size=RANKS, tensor_parallel_size=1)
        self._fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=how, plugins=plugins)
        self._fabric.launch()
        if strategy == "fsdp1":  # stock Lightning would pass a device that torch refuses
            policy = ModuleWrapPolicy({Layer})
            model = FullyShardedDataParallel(
                model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
            )
        wrapped = self._fabric.setup_module(model)
        self._state = {"model": wrapped, **REST}
        self._objects: tuple[Any, Any] = (wrapped.module, None)
        if with_optimizer:
            optimizer = momentum(wrapped)
            self._state["optimizer"] = self._fabric.setup_optimizers(optimizer)
            self._objects = (wrapped.module, optimizer)
        self.pieces = Pieces(*self._objects)

    def save(self, url: str) -> None:
        if TAKES_URLS or "://" not in url:
            self._fabric.save(url, self._state)
        else:
            stock_shards.save(url, stock_shards.collect(*self._objects), REST)

    def load(self, url: str) -> None:
        if TAKES_URLS or "://" not in url:
            self._fabric.load(url, self._state)
        else:
            stock_shards.load(url, *self._objects)


def timed(watcher: Watcher, call: Callable[[], None]) -> dict[str, float]:
    """What a collective call took: the time of the slowest rank, the memory of the greatest, the processors of all."""
    ctypes.CDLL(None).malloc_trim(0)  # else what was freed before could be used again, and would not count
    dist.barrier()
    if dist.get_rank() == 0:
        ready()
    dist.barrier()
    before = watcher.level()
    with watcher.watching() as peak, Clock() as clock:
        call()
    wall, cpu, memory = zip(*of_ranks((clock.wall, clock.cpu, peak.bytes - before)), strict=True)
    return {"wall_s": max(wall), "cpu_s": sum(cpu), "memory_mib": max(memory) / MIB}


def of_ranks(own: Any) -> list[Any]:
    """What each rank has; a collective call."""
    ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(ranks, own)
    return ranks


def warm_up(url: str, strategy: str = "fsdp2", load: bool = False) -> None:
    """Imports all that a checkpoint needs, and connects to the store."""
    training = Training(strategy, Layer({0: KIB}), with_optimizer=True)
    training.save(f"{url}.warm-up")
    if load:
        training.load(f"{url}.warm-up")


def save_shards(url: str, strategy: str, mib: int) -> dict[str, float]:
    """Saves a model and its optimizer."""
    watcher = Watcher()
    warm_up(url, strategy)
    training = Training(strategy, one_huge(mib), with_optimizer=True)
    training.pieces.fill()
    result = timed(watcher, lambda: training.save(url))
    return {**result, "cpu_s_per_gib": result["cpu_s"] / (RANKS * mib / 1024)}


def save_in_background(url: str, strategy: str, mib: int) -> dict[str, float]:
    """Saves a model and its optimizer with ``AsyncCheckpointIO``; medians of several saves, with the memory there."""
    from lightning.fabric.plugins import AsyncCheckpointIO  # stock Lightning has none for Fabric

    watcher = Watcher()
    warm_up(url, strategy)
    plugin = AsyncCheckpointIO()
    training = Training(strategy, one_huge(mib), with_optimizer=True, plugins=[plugin])
    training.pieces.fill()
    training.save(f"{url}.first")
    plugin.drain()
    results = []
    for number in range(SAVES):
        stall = Clock()

        def save(place: str = f"{url}.{number}", stall: Clock = stall) -> None:
            with stall:
                training.save(place)
            plugin.drain()

        results.append({**timed(watcher, save), "stall_s": max(of_ranks(stall.wall))})
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


def load_shards(url: str, strategy: str, mib: int) -> dict[str, float]:
    """Loads what :func:`save_shards` saved, and compares it."""
    watcher = Watcher()
    warm_up(url, strategy, load=True)
    training = Training(strategy, one_huge(mib), with_optimizer=True)
    result = timed(watcher, lambda: training.load(url))
    training.pieces.check()
    return result


def save_small(url: str, tensors: int, kib: int, kinds: int) -> dict[str, float]:
    """Saves a model of small parameters, for :func:`load_small`."""
    watcher = Watcher()
    training = Training("fsdp2", many_small(tensors, kib, kinds), with_optimizer=False)
    training.pieces.fill()
    return timed(watcher, lambda: training.save(url))


def load_small(url: str, tensors: int, kib: int, kinds: int) -> dict[str, float]:
    """Loads them in the order of their numbers, whatever ``kinds`` says of that in the file, and compares them."""
    watcher = Watcher()
    warm_up(url, load=True)
    training = Training("fsdp2", many_small(tensors, kib), with_optimizer=False)
    result = timed(watcher, lambda: training.load(url))
    training.pieces.check()
    return result


def shards_on_disk(url: str, strategy: str, mib: int) -> dict[str, float]:
    """Saves a folder to a disk, and loads it, most likely from the system's cache of it."""
    watcher = Watcher()
    Path(url).parent.mkdir(exist_ok=True)
    warm_up(url, strategy, load=True)
    training = Training(strategy, one_huge(mib), with_optimizer=True)
    training.pieces.fill()
    saved = timed(watcher, lambda: training.save(url))
    training.pieces.clear()
    loaded = timed(watcher, lambda: training.load(url))
    training.pieces.check()
    dist.barrier()
    if dist.get_rank() == 0:
        rmtree(Path(url).parent)
    return {f"{verb}_{key}": value for verb, one in (("save", saved), ("load", loaded)) for key, value in one.items()}


class Idle(LightningModule):
    """A model that takes no step.

    Args:
        mib: MiB a rank of its parameters and their momenta.
    """

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self._mib = mib
        self.layers = torch.nn.Module()

    def configure_model(self) -> None:
        self.layers = shard(one_huge(self._mib), self.device_mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return momentum(self)

    def training_step(self, batch: Any, index: int) -> None:
        pass


class Save(Callback):
    """Saves once, at the end of the only batch, and keeps what it took in ``result``."""

    def __init__(self, url: str, watcher: Watcher) -> None:
        self._url, self._watcher = url, watcher
        self.result: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        Pieces(pl_module, trainer.optimizers[0]).fill()
        self.result = timed(self._watcher, lambda: self._save(trainer))

    def _save(self, trainer: Trainer) -> None:
        if TAKES_URLS:
            trainer.save_checkpoint(self._url)
        else:
            strategy = trainer.strategy
            model, optimizer = strategy.lightning_module_state_dict(), strategy.optimizer_state(trainer.optimizers[0])
            stock_shards.save(self._url, {"state_dict": model, "optimizer_0": optimizer}, REST)


def save_shards_by_trainer(url: str, mib: int) -> dict[str, float]:
    """Saves a model and its optimizer of ``mib`` MiB a rank."""
    watcher = Watcher()
    warm_up(url)
    save = Save(url, watcher)
    trainer = Trainer(
        accelerator="cpu", devices=RANKS, strategy=TrainerStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
        max_epochs=1, callbacks=[save], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Idle(mib), DataLoader(TensorDataset(torch.zeros(1))))
    return save.result


MEASUREMENTS: dict[str, Callable[..., dict[str, float]]] = {
    function.__name__: function
    for function in (
        save_shards, save_in_background, load_shards, save_small, load_small, shards_on_disk, save_shards_by_trainer
    )
}  # fmt: skip
