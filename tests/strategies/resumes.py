"""Trainings that are saved and resumed by two ranks of :mod:`tests.strategies.ranks`: what of their state is lost.

Each kind of state is a subclass of :class:`Case`. It is trained three times: without any save, with one after the first
of two epochs, and from that save on. In the end all three are to have the same, bit for bit, on each rank.
"""

import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed._tensor import DTensor  # its name in PyTorch 2.4 too
from torch.utils.data import DataLoader, TensorDataset

import lightning.pytorch as pl
from lightning.fabric.storage.collectives import errors
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tests.strategies.forks import Job

WIDTH = 6
#: How many differences are told, and how much of each, for a rank has a pipe to tell them.
_MOST, _LONGEST = 5, 300


class Block(nn.Sequential):
    """What is a unit of its own for FSDP."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *more)


class CPUFSDPStrategy(FSDPStrategy):
    """Lightning accepts FSDP on the CPU for a subclass only."""


class Case(pl.LightningModule):
    """Trains with Adam and a scheduler; subclasses say what is special."""

    #: Which strategies refuse to save this, and what the error says.
    refused: ClassVar[dict[str, str]] = {}
    #: Whether a save in the background may differ from another one, since there is more than usual tensors to copy.
    differs_in_background: ClassVar[bool] = False
    #: After how many of the batches of an epoch to save; None for all.
    save_after: ClassVar[int | None] = None
    #: Whether buffers of other ranks are not saved.
    of_rank_zero: ClassVar[bool] = False
    #: Strategies which cannot train this, or do not have the thing in question.
    without: ClassVar[tuple[str, ...]] = ()

    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.strategy = strategy
        torch.manual_seed(7)
        self.net = self.network()
        self.seen: list[Any] = []
        self.losses: list[float] = []

    def network(self) -> nn.Module:
        return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2))

    def configure_model(self) -> None:
        if self.strategy == "model_parallel" and not hasattr(self.net, "unshard"):
            for block in [part for part in self.net.modules() if isinstance(part, Block)]:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, number: int) -> Tensor | None:
        self.seen.append([self.current_epoch, number, batch[0].sum().item()])
        loss = self.loss(batch[0])
        if loss is not None:
            self.losses.append(loss.item())
        return loss

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).pow(2).mean()

    def train_dataloader(self) -> Any:
        values = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(values), batch_size=2, shuffle=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def extra(self) -> Any:
        """What else there is to compare."""


def run(job: Job) -> dict[str, Any]:
    """For each case and mode of saving, what differs from a run that was not interrupted, or why a save failed."""
    return {"results": dict(_results(job))}


def _results(job: Job) -> Iterator[tuple[str, list[str]]]:
    for name, modes in job["cases"].items():
        case = CASES[name]
        straight = _trained(case, job, "sync") if modes else None
        for mode in modes:
            folder = f"{job['place']}/{name}-{mode}"
            saved = _trained(case, job, mode, save=folder)
            if isinstance(saved, str):
                yield f"{name}-{mode}", [f"save: {saved}", *(str(path) for path in Path(folder).glob("*"))]
                continue
            told = [f"saved: {one}" for one in differences(straight, saved)]
            resumed = _trained(case, job, mode, resume=f"{folder}/saved.ckpt")
            if isinstance(resumed, str):
                yield f"{name}-{mode}", [*told, f"resume: {resumed}"]
                continue
            at = case.save_after or len(straight["seen"]) // 2
            rest = {key: straight[key][at:] for key in ("seen", "losses")}
            told += [f"resumed: {one}" for one in differences({**straight, **rest}, resumed)]
            yield f"{name}-{mode}", told


def continued(job: Job) -> dict[str, Any]:
    """The losses of the second epoch, of a run that was not interrupted and of one that another strategy goes on."""
    straight, saved = _trained(Plain, job, "sync"), _trained(Plain, job, "sync", save=job["place"])
    resumed = _trained(Plain, {**job, "strategy": job["then"]}, "sync", resume=f"{job['place']}/saved.ckpt")
    if isinstance(saved, str) or isinstance(resumed, str):
        return {"losses": [saved if isinstance(saved, str) else resumed]}
    return {"losses": [straight["losses"][len(straight["seen"]) // 2 :], resumed["losses"]]}


def alone(job: Job) -> dict[str, Any]:
    """The error with which a run ends in which one rank fails, and is to save after that; and how long it took.

    With ``all`` both ranks fail.
    """
    if torch.distributed.get_rank() == 1:
        errors.COMING_S = 1.0  # after which the other need not wait any more
    callback = ModelCheckpoint(job["place"], save_on_exception=True, every_n_train_steps=100)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=_strategy(job), max_epochs=2, logger=False, callbacks=[callback],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    since = time.monotonic()
    try:
        trainer.fit((AllFail if job.get("all") else Fails)(job["strategy"]))
    except Exception as error:
        shown = "".join(traceback.format_exception(error))
        return {"fit": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - since, "shown": shown}
    return {}


def _trained(case: type[Case], job: Job, mode: str, save: str | None = None, resume: str | None = None) -> Any:
    """What this rank has in the end, or an error."""
    callbacks: list[Any] = []
    if save is not None:
        every = {"every_n_epochs": 1} if case.save_after is None else {"every_n_train_steps": case.save_after}
        callbacks = [_FirstOnly(save, filename="saved", save_top_k=-1, **every)]
    model = case(job["strategy"])
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=_strategy(job), max_epochs=2, logger=False, callbacks=callbacks,
        plugins=[AsyncCheckpointIO()] if mode == "background" else [], default_root_dir=job["root"],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=bool(callbacks),
    )  # fmt: skip
    try:
        trainer.fit(model, ckpt_path=resume, weights_only=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return _end(trainer, model)


class _FirstOnly(ModelCheckpoint):
    """Saves once."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if not self._last_checkpoint_saved:
            super()._save_checkpoint(trainer, filepath)


def _strategy(job: Job) -> Any:
    sharded = job["kind"] == "sharded"
    if job["strategy"] == "ddp":
        return DDPStrategy(find_unused_parameters=True)
    if job["strategy"] == "fsdp":
        return CPUFSDPStrategy(state_dict_type=job["kind"], auto_wrap_policy={Block})
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=sharded)


def _end(trainer: Any, model: Case) -> dict[str, Any]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizers = [
        {
            "state": {names[of]: told(state) for of, state in optimizer.state.items() if state and of.numel()},
            "groups": [
                {**told(group), "params": [names[of] for of in group["params"]]} for group in optimizer.param_groups
            ],
        }
        for optimizer in trainer.optimizers
    ]
    of_another = model.of_rank_zero and trainer.global_rank
    return {
        "parameters": {name: told(parameter) for name, parameter in model.named_parameters()},
        "buffers": {} if of_another else {name: told(buffer) for name, buffer in model.named_buffers()},
        "optimizers": optimizers,
        "schedulers": [told(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "counters": [trainer.current_epoch, trainer.global_step],
        "seen": model.seen,
        "losses": model.losses,
        "extra": told(model.extra()),
    }


def told(value: Any) -> Any:
    """A value as JSON would have it; of tensors what they are, and their values."""
    if isinstance(value, Tensor):
        name = type(value.data if isinstance(value, nn.Parameter) else value).__name__
        return {"type": name, "what": str(_kind(value)), "values": _values(value)}
    if isinstance(value, dict):
        return {str(key): told(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(one) for one in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


def _kind(tensor: Tensor) -> Any:
    return tensor.dtype, None if tensor.is_nested else list(tensor.shape), tensor.layout, tensor.device.type


def _values(tensor: Tensor) -> Any:
    if isinstance(tensor, DTensor):
        return [str(tensor.placements), told(tensor.to_local())]
    if tensor.is_meta:
        return None
    if tensor.is_nested:
        return [one.tolist() for one in tensor.unbind()]
    if tensor.is_quantized:
        return [tensor.q_scale(), tensor.int_repr().tolist()]
    if tensor.layout != torch.strided:
        tensor = tensor.detach().to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.tolist()


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Some of the places where two things that are told are not the same."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return [one for key in left for one in differences(left[key], right[key], f"{where}/{key}")][:_MOST]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [one for at, (a, b) in pairs for one in differences(a, b, f"{where}/{at}")][:_MOST]
    return [] if left == right else [f"{where}: {left} != {right}"[:_LONGEST]]


CASES: dict[str, type[Case]] = {}


def case(made: type[Case]) -> type[Case]:
    CASES[made.__name__] = made
    return made


class Fails(Case):
    """The others wait for the gradients of the second rank."""

    ranks: ClassVar[tuple[int, ...]] = (1,)

    def loss(self, batch: Tensor) -> Tensor:
        if self.global_rank in self.ranks and self.global_step == 1:
            raise RuntimeError("boom")
        return super().loss(batch)


class AllFail(Fails):
    ranks = (0, 1)


@case
class Plain(Case):
    differs_in_background = True


class Parts(nn.Sequential):
    """The part in the middle is not used at first."""

    skips = True

    def forward(self, batch: Tensor) -> Tensor:
        first, middle, last = self
        return last(first(batch) if self.skips else middle(first(batch)))


@case
class Untouched(Case):
    """A layer never gets a gradient."""

    def network(self) -> nn.Module:
        return Parts(Block(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))


@case
class UntouchedUnit(Untouched):
    def network(self) -> nn.Module:
        return Parts(Block(), Block(), nn.Linear(WIDTH, 2))


@case
class Late(UntouchedUnit):
    """It gets one after the save."""

    differs_in_background = True

    def loss(self, batch: Tensor) -> Tensor:
        self.net.skips = self.current_epoch == 0
        return super().loss(batch)


@case
class Frozen(Case):
    def network(self) -> nn.Module:
        net = super().network()
        for parameter in net[0].parameters():
            parameter.requires_grad_(False)
        return net


@case
class Stateless(Case):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


@case
class Momentum(Case):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


@case
class Adagrad(Case):
    """It has its state before the first step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.01)


@case
class Groups(Case):
    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(part.parameters()), "lr": lr}
            for part, lr in zip(list(self.net)[::-1], (0.1, 0.2, 0.3), strict=True)
        ]
        return torch.optim.AdamW(groups, weight_decay=0.1)


@case
class TwoOptimizers(Case):
    """One has no state."""

    without = ("fsdp",)  # which has no backward within a forward

    def __init__(self, strategy: str) -> None:
        super().__init__(strategy)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net[0].parameters(), lr=0.01),
            torch.optim.SGD([*self.net[1].parameters(), *self.net[2].parameters()], lr=0.1),
        ]

    def training_step(self, batch: Any, number: int) -> None:
        loss = super().training_step(batch, number)
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        self.step(first, second)

    def step(self, first: Any, second: Any) -> None:
        first.step()
        second.step()


@case
class Unstepped(TwoOptimizers):
    """One takes its first step after the save."""

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[0].parameters(), lr=0.1),
            torch.optim.AdamW([*self.net[1].parameters(), *self.net[2].parameters()], lr=0.1),
        ]

    def step(self, first: Any, second: Any) -> None:
        first.step()
        if self.current_epoch > 0:
            second.step()
        second.zero_grad()


@case
class Tied(Case):
    def network(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH))
        net[2].weight = net[0].weight
        return net


@case
class Average(Case):
    """An average of the parameters goes into the checkpoint beside the model."""

    differs_in_background = True
    refused: ClassVar = {
        "fsdp": "'average.of.0.net.0._fsdp_wrapped_module.0.weight' is not the same tensor on rank 1",
        "model_parallel": "'average.of.0.net.0.0.weight' is a distributed tensor",
    }

    def __init__(self, strategy: str) -> None:
        super().__init__(strategy)
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.named_parameters():
            last = self.average.get(name, parameter.detach())
            self.average[name] = last * 0.5 + parameter.detach() * 0.5

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = {"of": [{**self.average}]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.average = dict(checkpoint["average"]["of"][0])

    def extra(self) -> Any:
        return self.average


@case
class BatchNorm(Case):
    """Each rank has buffers of its own, and those of rank zero are saved, all of them."""

    differs_in_background = True
    of_rank_zero = True

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.kept = {name: buffer.clone() for name, buffer in self.named_buffers()}
            for buffer in self.kept.values():
                torch.distributed.broadcast(buffer, 0)

    def on_train_start(self) -> None:
        if self.trainer.ckpt_path is not None:
            self.kept = {name: buffer.clone() for name, buffer in self.named_buffers()}

    def extra(self) -> Any:
        return self.kept

    def network(self) -> nn.Module:
        return nn.Sequential(Block(nn.BatchNorm1d(WIDTH)), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2))


class Counting:
    """A loader that knows where it is, and has another order on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.at = 0
        self.order = torch.randperm(8, generator=torch.Generator().manual_seed(rank)).tolist()

    def __iter__(self) -> Iterator[list[Tensor]]:
        values = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))
        while self.at < 8:
            chosen = self.order[self.at : self.at + 2]
            self.at += 2
            yield [values[chosen]]
        self.at = 0

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order, "rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], list(state["order"])


@case
class Loader(Case):
    save_after = 2

    def train_dataloader(self) -> Any:
        return Counting(self.global_rank)


class Growing(nn.Module):
    """A buffer that grows, as a queue of what was seen; it loads one of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, WIDTH))

    def forward(self, batch: Tensor) -> Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, torch.ones(1, WIDTH)])
        return batch + len(self.seen)

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        if f"{prefix}seen" in state:
            self.seen = self.seen.new_empty(state[f"{prefix}seen"].shape)
        super()._load_from_state_dict(state, prefix, *arguments)


class Appearing(Growing):
    """There is no buffer at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, batch: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = torch.zeros(0, WIDTH)
        return super().forward(batch)

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        self.seen = torch.zeros(0)
        super()._load_from_state_dict(state, prefix, *arguments)


class Remembering(nn.Module):
    """Its extra state is a dictionary that gets new keys, which :class:`Listing` has as a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = {}

    def forward(self, batch: Tensor) -> Tensor:
        self.seen[f"batch.{len(self.seen)}"] = torch.ones(2) * len(self.seen)
        return batch + len(self.seen)

    def get_extra_state(self) -> Any:
        return dict(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = dict(state)


class Listing(Remembering):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def forward(self, batch: Tensor) -> Tensor:
        self.seen.append(torch.ones(2) * len(self.seen))
        return batch + len(self.seen)

    def get_extra_state(self) -> Any:
        return list(self.seen)

    def set_extra_state(self, state: Any) -> None:
        self.seen = list(state)


class Odd(Remembering):
    """Its keys are numbers, some of its parts are empty, and others are of types of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"none": {}, "ordered": OrderedDict(), 3: "old"}

    def forward(self, batch: Tensor) -> Tensor:
        self.seen.pop(3, None)
        self.seen["none"].clear()
        self.seen["ordered"][len(self.seen["ordered"])] = torch.ones(1)
        self.seen["rows"] = [torch.ones(2).to_sparse(), {4: torch.ones(1)}, (torch.ones(1), None)]
        return batch + len(self.seen["ordered"])


class WithPart(Case):
    part: ClassVar[type[nn.Module]]

    def network(self) -> nn.Module:
        return nn.Sequential(Block(), self.part(), nn.Linear(WIDTH, 2))

    def extra(self) -> Any:
        return getattr(self.net[1], "seen", None)


def _with(name: str, part: type[nn.Module], **more: Any) -> None:
    CASES[name] = type(name, (WithPart,), {"part": part, **more})


_with("Growing", Growing)
_with("Appearing", Appearing)
_with("Remembering", Remembering)
_with("Listing", Listing)
_with("Odd", Odd, differs_in_background=True)


class Measuring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import CatMetric

        self.metric = CatMetric()
        self.metric.persistent(True)

    def forward(self, batch: Tensor) -> Tensor:
        self.metric.update(torch.ones(2) * len(self.metric.value))
        return batch

    @property
    def seen(self) -> Any:
        return [one for one in self.metric.value]


_with("Metric", Measuring)


class _Own(Tensor):
    pass


def kinds() -> dict[str, Tensor]:
    """Tensors of all kinds that there are."""
    rows = torch.arange(6.0).reshape(2, 3)
    return {
        "zero": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "transposed": rows.t(),
        "expanded": torch.tensor([5.0]).expand(4),
        "sliced": rows[:, 1:],
        "bool": torch.tensor([True, False]),
        "bfloat": rows.bfloat16(),
        "complex": torch.complex(rows, rows),
        "conjugate": torch.complex(rows, rows).conj(),
        "negative": torch.complex(rows, rows).conj().imag,
        "sparse": torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse(),
        "csr": torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(rows, 0.5, 1, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "own": rows.as_subclass(_Own),
        "meta": torch.empty(2, device="meta"),
        "float8": rows.to(torch.float8_e4m3fn),
        "permuted": torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    }


class Beside(Case):
    """Tensors of some kinds go into the checkpoint beside the model."""

    differs_in_background = True

    kinds: ClassVar[tuple[str, ...]]

    def __init__(self, strategy: str) -> None:
        super().__init__(strategy)
        self.kept: Any = None

    def on_train_start(self) -> None:
        if self.trainer.ckpt_path is None:
            self.kept = {name: kinds()[name] for name in self.kinds}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = self.kept

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]

    def extra(self) -> Any:
        return self.kept


class Buffered(Case):
    """Buffers of some kinds have values that only the checkpoint has."""

    differs_in_background = True

    kinds: ClassVar[tuple[str, ...]]

    def network(self) -> nn.Module:
        net = super().network()
        for name in self.kinds:
            net.register_buffer(name, blank(kinds()[name]))
        return net

    def on_train_start(self) -> None:
        if self.trainer.ckpt_path is None:
            for name in self.kinds:
                setattr(self.net, name, kinds()[name])


def blank(tensor: Tensor) -> Tensor:
    """One of the same kind, with zeros."""
    if tensor.is_nested:
        return torch.nested.nested_tensor([torch.zeros_like(part) for part in tensor.unbind()])
    if tensor.is_quantized:
        return torch.quantize_per_tensor(torch.zeros(tensor.shape), 0.25, 0, tensor.dtype)
    if 0 in tensor.stride() if tensor.layout == torch.strided else False:
        return torch.zeros(1).expand(tensor.shape)
    return torch.zeros_like(tensor)


#: Kinds of which a copy is made as of others, so that the slow tests do for these.
ALIKE = ("Conjugate", "Negative", "Float8", "Own")
USUAL = ("zero", "empty", "transposed", "sliced", "bool", "bfloat", "permuted")
for _name, _kinds in {
    "Usual": (*USUAL, "complex", "expanded", "float8", "meta"),
    "Conjugate": ("conjugate",),
    "Negative": ("negative",),
    "Sparse": ("sparse", "csr"),
    "Quantized": ("quantized",),
    "Nested": ("nested",),
    "Own": ("own",),
}.items():
    _attributes = {"kinds": _kinds, "differs_in_background": _name not in ALIKE}
    CASES[f"Beside{_name}"] = type(f"Beside{_name}", (Beside,), _attributes)
_refused = {
    "Nested": dict.fromkeys(("fsdp", "model_parallel"), "'net.nested' is a nested tensor"),
    "Meta": {"model_parallel": "'net.meta' is on the meta device"},
}
for _name, _kinds, _without in (
    ("Usual", USUAL, ()),
    ("Float8", ("float8",), ("ddp",)),
    ("Complex", ("complex", "conjugate"), ("ddp", "fsdp")),
    ("Negative", ("negative",), ()),
    ("Expanded", ("expanded",), ("ddp",)),
    ("Sparse", ("sparse", "csr"), ("ddp",)),
    ("Quantized", ("quantized",), ("ddp",)),
    ("Nested", ("nested",), ("ddp",)),
    ("Own", ("own",), ()),
    ("Meta", ("meta",), ("ddp", "fsdp")),
):
    _attributes = {"kinds": _kinds, "without": _without, "refused": _refused.get(_name, {})}
    _attributes["differs_in_background"] = _name not in ALIKE
    CASES[f"Buffered{_name}"] = type(f"Buffered{_name}", (Buffered,), _attributes)


class OddSGD(torch.optim.SGD):
    """Has what torch's own optimizers do not have in their states."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                count = state.get("count", 0)
                state.update(
                    count=count + 1, note=f"step {count}", nothing=None, scale=torch.ones(3) * count,
                    nested={"history": [torch.ones(2) * count]}, pair=(count, 1.5),
                )  # fmt: skip
                if parameter.grad is not None and count:
                    parameter.data.add_(state["nested"]["history"][0][0] * 0.001)
        return loss


@case
class OddOptimizer(Case):
    without = ("fsdp",)  # which gathers no such state

    def configure_optimizers(self) -> Any:
        return OddSGD(self.parameters(), lr=0.01)


@case
class Tensors(Case):
    """The learning rate is a tensor."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=torch.tensor(0.01), foreach=False)


@case
class Finetuned(Case):
    """A callback adds a group of parameters to the optimizer before the save."""

    without = ("ddp",)  # which does not reduce the gradients of what is unfrozen later

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def configure_callbacks(self) -> Any:
        from lightning.pytorch.callbacks import BaseFinetuning

        class Unfreezing(BaseFinetuning):
            def freeze_before_training(self, module: Any) -> None:
                self.freeze(module.net[0])

            def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
                if epoch == 0:
                    self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.05)

        return [Unfreezing()]
