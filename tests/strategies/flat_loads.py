"""Checkpoints that FSDP's modules in all modes load, and what they have then; for ranks that are forked.

Values follow from the names and shapes of what has them, so that each rank knows what every rank should have. What a
rank has after a load is asked of FSDP itself, which gathers it.
"""

import itertools
import logging
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed._tensor import DTensor, distribute_tensor  # its name in PyTorch 2.4 too
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    _runtime_utils,
    _state_dict_utils,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType as Kind
from torch.distributed.fsdp._flat_param import FlatParamHandle

from lightning.fabric import Fabric
from lightning.fabric.storage.strategies import fsdp, model_parallel
from lightning.fabric.storage.strategies.load_targets import clean_name
from lightning.fabric.strategies import FSDPStrategy
from lightning.fabric.wrappers import _FabricModule
from tests.strategies.forks import Job

MODEL = "model"


class CPUFSDPStrategy(FSDPStrategy):
    """Lightning accepts FSDP on the CPU for a subclass only."""


class Unit(nn.Module):
    """A unit of its own for FSDP, with odd shapes, buffers, and a state that is no tensor."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.batch = nn.BatchNorm1d(width)
        self.conv = nn.Conv1d(1, 3, 3, padding=1, bias=False)
        self.note = "fresh"

    def forward(self, values: Tensor) -> Tensor:
        values = self.batch(self.norm(self.linear(values)))
        return values + self.conv(values.unsqueeze(1)).mean(1)

    def get_extra_state(self) -> Any:
        return self.note  # not in a dictionary, which torch does not load if a rank has nothing of a parameter

    def set_extra_state(self, state: Any) -> None:
        self.note = state


class Network(nn.Module):
    """Units in units, tied weights, a parameter without elements, and one with less elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.units = nn.ModuleList([Unit(), nn.Sequential(Unit(), nn.Linear(7, 7))])
        self.odd = nn.Linear(0, 3)  # in no optimizer, for FSDP gathers no state of what has no elements
        self.one = nn.Parameter(torch.empty(1))
        self.last = nn.Linear(7, 7)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values) * self.one
        for unit in self.units:
            values = unit(values)
        return self.last(values)


class Mode(NamedTuple):
    """How a module is sharded.

    Attributes:
        strategy: The name of FSDP's sharding strategy.
        orig: FSDP's argument ``use_orig_params``.
        special: What else there is to a mode.
    """

    strategy: str = "FULL_SHARD"
    orig: bool = True
    special: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, [self.strategy, "orig" if self.orig else "flat", self.special]))


MODES = [
    *itertools.starmap(
        Mode, itertools.product(("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"), (True, False))
    ),
    *(Mode(special=special) for special in ("mixed", "unsharded", "wrapped", "compiled", "inner", "ignored", "frozen")),
    *(Mode(orig=orig, special="stateful") for orig in (True, False)),
    *(Mode(orig=False, special=special) for special in ("mixed", "unsharded", "wrapped")),
]


def run(job: Job) -> dict[str, Any]:
    """Writes checkpoints, or loads each in several ways and returns what is not as it should be."""
    fabric = Fabric(accelerator="cpu", devices=job["world"], strategy=CPUFSDPStrategy(state_dict_type="sharded"))
    fabric.launch()
    if job["does"] == "write":
        for writer, path in job["paths"].items():
            WRITERS[writer](fabric, path)
        return {}
    found = {}
    for way, *arguments in job["ways"]:
        for path in job["paths"]:
            try:
                told = list(WAYS[way](fabric, path, *arguments))
            except Exception as error:
                told = [f"{type(error).__name__}: {error}"]
            found[f"{'/'.join(Path(path).parts[-2:])} {way} {arguments}"] = [one[:600] for one in told[:3]]
    return {"different": {name: told for name, told in found.items() if told}, "count": len(found)}


def _load(fabric: Fabric, path: str, *mode: Any) -> Iterator[str]:
    """Loads into a module in one of :data:`MODES`, of which nothing is gathered meanwhile."""
    how = Mode(*mode)
    if path.endswith("inner") != (how.special == "inner"):  # which has other names
        return
    module, optimizers = made(5.0, how)
    if how.special == "stateful":
        fill(module, optimizers, 5.0)
    if how.special == "unsharded":
        module.eval()
        module(torch.ones(2, 7))
        module.train()
    target: Any = module
    if how.special == "compiled":  # as Fabric sets one up
        target = _FabricModule(torch.compile(module, backend="eager"), fabric.strategy.precision)
    state = {MODEL: target, **optimizers, "epoch": 0}
    before = _addresses(module, optimizers)
    with _nothing_gathered():
        rest = fabric.load(path, state)
    after = _addresses(module, optimizers)
    if before != {name: after.get(name, at) for name, at in before.items()}:  # but for states that there are no more
        yield "there are other tensors than before"
    if (state["epoch"], rest) != (3, {"note": "rest"}):
        yield f"epoch {state['epoch']}, and {rest} besides"
    yield from _compare(full_state(module, optimizers), path)


def _addresses(module: FSDP, optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, int]:
    """Returns where the tensors of this rank are."""
    named = {f"{name} itself": parameter for name, parameter in module.named_parameters()}
    for key, optimizer in optimizers.items():
        for name, parameter in module.named_parameters():
            for part, value in optimizer.state.get(parameter, {}).items():
                if value.dim():
                    named[f"{key} {name} {part}"] = value
    return {name: tensor.data_ptr() for name, tensor in named.items()}


@contextmanager
def _nothing_gathered() -> Iterator[None]:
    with (
        patch.object(FlatParamHandle, "unshard", side_effect=AssertionError("something is gathered")),
        patch.object(fsdp, "load_module", side_effect=AssertionError("FSDP's own functions are used")),
    ):
        yield


def _load_by_stock(fabric: Fabric, path: str, *mode: Any) -> Iterator[str]:
    """Loads with torch alone."""
    module, optimizers = made(5.0, Mode(*mode))
    with FSDP.state_dict_type(module, Kind.SHARDED_STATE_DICT):
        own = module.state_dict()
        dcp.load({MODEL: own}, storage_reader=dcp.FileSystemReader(path))
        module.load_state_dict(own)
        sized = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        for key, optimizer in optimizers.items():
            state = load_sharded_optimizer_state_dict(sized, key, dcp.FileSystemReader(path))[key]
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(module, optimizer, state))
    yield from _compare(full_state(module, optimizers), path)


def _load_by_fsdp2(fabric: Fabric, path: str) -> Iterator[str]:
    net, optimizers = _made_by_fsdp2(fabric, 5.0)
    model_parallel.load_state(path, {MODEL: net, **optimizers}, True, False, None)
    states = {key: get_optimizer_state_dict(net, one) for key, one in optimizers.items()}
    yield from _compare(_whole({MODEL: get_model_state_dict(net), **states}), path)


def _whole(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _whole(value) for key, value in tree.items()}
    if isinstance(tree, DTensor):
        return tree.full_tensor() if tree.numel() else torch.empty(tree.shape)  # of which torch gathers none
    return tree


class Hooked(Unit):
    """Has a method of its own to load a state, which takes whole tensors."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        self.total = sum(float(value.sum()) for name, value in state_dict.items() if name == f"{prefix}linear.weight")
        super()._load_from_state_dict(state_dict, prefix, *others)


class OwnFSDP(FSDP):
    """Does perhaps something of its own."""


def _load_by_fsdps_own(fabric: Fabric, path: str, why: str) -> Iterator[str]:
    """Loads modules of which FSDP alone has the state."""
    net = network(5.0)
    unit = net.units[0]
    if why == "method":
        unit.__class__ = Hooked
    if why == "hook":
        unit._register_load_state_dict_pre_hook(lambda state, prefix, *_: state[f"{prefix}linear.weight"].sum().item())
    for parent, name in ((net, "odd"), (net.units[1], "0"), (net.units, "1"), (net.units, "0")):
        setattr(parent, name, FSDP(getattr(parent, name), device_id=torch.device("cpu"), use_orig_params=True))
    module = (OwnFSDP if why == "class" else FSDP)(net, device_id=torch.device("cpu"), use_orig_params=True)
    optimizers = optimizers_of(module, 5.0)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.fabric.storage.strategies.flat_shards")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    owner, name = ABSENT.get(why, (None, ""))
    with nullcontext() if owner is None else patch.object(owner, name):  # which puts back what is deleted
        if owner is not None:
            delattr(owner, name)
        for _ in range(2):
            fabric.load(path, {MODEL: module, **optimizers})
    logger.removeHandler(handler)
    if [WHY[why] in line for line in lines] != [True] * (fabric.global_rank == 0):
        yield f"the log has {lines}"
    yield from _compare(full_state(module, optimizers), path)
    if why == "method" and unit.total != values_of("units.0.linear.weight", (7, 7), 1.0).sum():
        yield f"the module saw {unit.total}"


#: What a release of PyTorch may not have, by the reason: where it is, and its name.
ABSENT = {"no hook": (_state_dict_utils, "_post_load_state_dict_hook"), "no function": (_runtime_utils, "_reshard")}
#: The end of a line in the log, by the reason.
WHY = {"method": "units.0 has Hooked._load_from_state_dict", "hook": "units.0 has", "class": "OwnFSDP is a class"} | {
    why: name for why, (_, name) in ABSENT.items()
}


def _refuse(fabric: Fabric, path: str, what: str, orig: bool, strict: bool = True) -> Iterator[str]:
    """Loads what does not fit, and yields the error; after one, the parameters are as they were."""
    net = network(5.0)
    if what == "shape":
        net.units[0].norm = nn.LayerNorm((7, 2))
    if what == "type":
        net.units[0].to(torch.bfloat16)
    if what == "missing":
        net.units[0].more = nn.Linear(2, 2)
    for parent, name in ((net.units[1], "0"), (net.units, "0")):
        setattr(parent, name, FSDP(getattr(parent, name), device_id=torch.device("cpu"), use_orig_params=orig))
    module = FSDP(net, device_id=torch.device("cpu"), use_orig_params=orig)
    state: dict[str, Any] = {MODEL: module}
    if what == "optimizer":
        state["other"] = torch.optim.SGD(module.parameters(), lr=1.0)
    if what == "parameter":
        state["adam"] = torch.optim.SGD(module.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    try:
        with catch_warnings(record=True) as warned:
            simplefilter("always")
            fabric.load(path, state, strict=strict)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        yield str(all(map(torch.equal, before, module.parameters())))
    else:
        with FSDP.state_dict_type(module, Kind.FULL_STATE_DICT, *_FULL):
            weight = module.state_dict()["units.0.linear.weight"]
        yield from (str(one.message) for one in warned if "is converted" in str(one.message))
        yield str(torch.equal(weight, values_of("units.0.linear.weight", (7, 7), 1.0).to(weight.dtype)))


def _compare(state: dict[str, Any], path: str) -> Iterator[str]:
    """Yields where a state is not the one of :func:`values_of` with a scale of 1."""
    frozen = path.endswith("frozen")
    like = Network().state_dict()
    if state[MODEL].keys() != like.keys():
        yield f"names {sorted(state[MODEL].keys() ^ like.keys())}"
    for name, value in state[MODEL].items():
        if isinstance(value, Tensor):
            is_right = torch.equal(value, values_of(name, value.shape, 1.0).to(like[name].dtype))
        else:
            is_right = value == "scaled by 1.0"
        if not is_right:
            yield f"{name} is {value}"
    for key, groups in GROUPS.items():
        told = state[key]
        if [sorted(group["params"]) for group in told["param_groups"]] != [sorted(names) for names in named(groups)]:
            yield f"{key} has the groups {told['param_groups']}"
        rates = [group["lr"] for group in told["param_groups"]]
        if rates != [1.0 + at for at in range(len(groups))]:
            yield f"{key} has the rates {rates}"
        names = {name for part in named(groups) for name in part if not (frozen and name.startswith("units.0."))}
        if told["state"].keys() != names:
            yield f"{key} has states of {sorted(told['state'].keys() ^ names)}"
        for name in names & told["state"].keys():
            expected = states_of(key, name, 1.0)
            for part, value in told["state"][name].items():
                if value.dtype != expected[part].dtype or not torch.equal(value, expected[part]):
                    yield f"{key}.{name}.{part} is {value}, not {expected[part]}"


def network(scale: float) -> nn.Module:
    """Returns a model whose parameters and buffers have the values of :func:`values_of`."""
    net: nn.Module = Network()
    with torch.no_grad():
        for name, tensor in net.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                tensor.copy_(values_of("first.weight" if name == "last.weight" else name, tensor.shape, scale))
    for unit in net.modules():
        if isinstance(unit, Unit):
            unit.note = f"scaled by {scale}"
    return net


def values_of(name: str, shape: Any, scale: float) -> Tensor:
    """Returns the values of a tensor, no two of which are alike."""
    name = name.replace("last.weight", "first.weight")  # which are tied
    values = torch.arange(1.0, torch.Size(shape).numel() + 1) + zlib.crc32(name.encode()) % 1000
    return (values * scale).reshape(shape)


def states_of(key: str, name: str, scale: float) -> dict[str, Tensor]:
    """Returns an optimizer's state of a parameter."""
    if key == "sgd":
        return {"momentum_buffer": values_of(f"momentum of {name}", SHAPES[name], scale)}
    moments = {part: values_of(f"{part} of {name}", SHAPES[name], scale) for part in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(scale), **moments}


def made(scale: float, mode: Mode) -> tuple[FSDP, dict[str, torch.optim.Optimizer]]:
    """Returns a model that is sharded as ``mode`` says, and its optimizers, which have no state yet."""
    net = network(scale)
    if mode.special == "frozen":
        net.units[0].requires_grad_(False)
    arguments: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": mode.orig}
    arguments["sharding_strategy"] = getattr(ShardingStrategy, mode.strategy)
    if mode.strategy == "HYBRID_SHARD":
        names = ("replicate", "shard")
        arguments["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    if mode.special == "mixed":
        arguments["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.bfloat16)
    if mode.special == "wrapped":
        net.units[0] = checkpoint_wrapper(net.units[0])
    if mode.special == "ignored":
        arguments["ignored_states"] = [net.units[1][0].linear.weight, net.one]
    if mode.special == "inner":
        net.units[0] = torch.compile(net.units[0], backend="eager")
    for parent, name in ((net, "odd"), (net.units[1], "0"), (net.units, "1"), (net.units, "0")):
        setattr(parent, name, FSDP(getattr(parent, name), **arguments))
    module = FSDP(net, **arguments)
    return module, optimizers_of(module, scale)


def optimizers_of(module: nn.Module, scale: float) -> dict[str, torch.optim.Optimizer]:
    """Returns an optimizer for each of :data:`GROUPS`."""
    named_parameters = [(clean_name(name), parameter) for name, parameter in module.named_parameters()]
    made = {}
    for key, groups in GROUPS.items():
        parts = [[p for name, p in named_parameters if _group_of(name) == group] for group in groups]
        settings = [{"params": part, "lr": scale * (1.0 + at)} for at, part in enumerate(parts)]
        made[key] = torch.optim.Adam(settings) if key == "adam" else torch.optim.SGD(settings, momentum=0.5)
    return made


def _group_of(name: str) -> str:
    return next(group for group in ("odd.", "units.0.", "units.1.0.", "") if name.startswith(group))


def named(groups: tuple[str, ...]) -> list[list[str]]:
    """Returns the names of the parameters of each group."""
    return [[name for name in SHAPES if _group_of(name) == group] for group in groups]


def full_optimizer_state(key: str, scale: float, frozen: bool = False) -> dict[str, Any]:
    """Returns the whole state of an optimizer by the names of parameters."""
    parts = named(GROUPS[key])
    like = torch.optim.Adam([torch.ones(1)]) if key == "adam" else torch.optim.SGD([torch.ones(1)], momentum=0.5)
    groups = [{**like.param_groups[0], "lr": scale * (1.0 + at), "params": part} for at, part in enumerate(parts)]
    names = [name for part in parts for name in part if not (frozen and name.startswith("units.0."))]
    return {"state": {name: states_of(key, name, scale) for name in names}, "param_groups": groups}


def fill(module: FSDP, optimizers: dict[str, torch.optim.Optimizer], scale: float, frozen: bool = False) -> None:
    """Gives the optimizers a state."""
    with FSDP.state_dict_type(module, Kind.FULL_STATE_DICT, *_FULL):
        for key, optimizer in optimizers.items():
            state = full_optimizer_state(key, scale, frozen)
            if any("_orig_mod" in name for name, _ in module.named_parameters()):
                state = renamed(state, "units.0.", "units.0._orig_mod.")
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(module, optimizer, state))


def full_state(module: FSDP, optimizers: dict[str, torch.optim.Optimizer]) -> dict[str, Any]:
    """Returns the whole state, as FSDP gathers it."""
    with FSDP.state_dict_type(module, Kind.FULL_STATE_DICT, *_FULL):
        states = {key: FSDP.optim_state_dict(module, optimizer) for key, optimizer in optimizers.items()}
        return renamed({MODEL: dict(module.state_dict()), **states}, "_orig_mod.", "")


def renamed(tree: Any, old: str, new: str) -> Any:
    """Returns a tree with another text in the place of one in all its names."""
    if isinstance(tree, dict):
        return {renamed(key, old, new): renamed(value, old, new) for key, value in tree.items()}
    if isinstance(tree, list):
        return [renamed(value, old, new) for value in tree]
    return tree.replace(old, new) if isinstance(tree, str) else tree


def _write_stock(fabric: Fabric, path: str, frozen: bool = False) -> None:
    """Saves with torch alone, in the layout of stock Lightning."""
    module, optimizers = made(1.0, Mode(special="frozen" if frozen else ""))
    fill(module, optimizers, 1.0, frozen)
    with FSDP.state_dict_type(module, Kind.SHARDED_STATE_DICT):
        states = {key: FSDP.optim_state_dict(module, optimizer) for key, optimizer in optimizers.items()}
        dcp.save({MODEL: module.state_dict(), **states}, storage_writer=dcp.FileSystemWriter(path))
    if fabric.global_rank == 0:
        torch.save(REST, Path(path, "meta.pt"))
    fabric.barrier()


def _write_flat(fabric: Fabric, path: str, mode: Mode) -> None:
    module, optimizers = made(1.0, mode)
    fill(module, optimizers, 1.0)
    fabric.save(path, {MODEL: module, **optimizers, **REST})


def _made_by_fsdp2(fabric: Fabric, scale: float) -> tuple[nn.Module, dict[str, torch.optim.Optimizer]]:
    mesh = init_device_mesh("cpu", (fabric.world_size,))
    net = network(scale)
    for part in (net.odd, net.units[0], net.units[1][0], net):
        fully_shard(part, mesh=mesh)
    return net, optimizers_of(net, scale)


def _write_fsdp2(fabric: Fabric, path: str) -> None:
    net, optimizers = _made_by_fsdp2(fabric, 1.0)
    for key, optimizer in optimizers.items():
        for name, parameter in net.named_parameters():
            if _group_of(name) in GROUPS[key]:
                like = parameter.device_mesh, parameter.placements
                optimizer.state[parameter] = {
                    part: distribute_tensor(value, *like) if value.dim() else value
                    for part, value in states_of(key, name, 1.0).items()
                }
    model_parallel.save_state(path, {MODEL: net, **optimizers, **REST}, full=False)


SHAPES = {name: parameter.shape for name, parameter in Network().named_parameters()}
#: By the key of each optimizer, the beginnings of the names of the parameters in its groups.
GROUPS = {"adam": ("units.0.", "units.1.0."), "sgd": ("",)}
REST = {"epoch": 3, "note": "rest"}
_FULL = (FullStateDictConfig(False, False), FullOptimStateDictConfig(False, False))
WRITERS = {
    "stock": _write_stock,
    "stock-frozen": partial(_write_stock, frozen=True),
    "fsdp": partial(_write_flat, mode=Mode()),
    "fsdp-flat": partial(_write_flat, mode=Mode(orig=False)),
    "fsdp-hybrid": partial(_write_flat, mode=Mode("HYBRID_SHARD")),
    "fsdp-inner": partial(_write_flat, mode=Mode(special="inner")),
    "fsdp2": _write_fsdp2,
}
WAYS = {
    "load": _load,
    "load_by_stock": _load_by_stock,
    "load_by_fsdp2": _load_by_fsdp2,
    "load_by_fsdps_own": _load_by_fsdps_own,
    "refuse": _refuse,
}
