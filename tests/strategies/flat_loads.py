"""Checkpoints that FSDP's modules in all modes load, and what they have then; for ranks that are forked.

Values follow from the names and shapes of what has them, so that each rank knows what every rank should have. What a
rank has after a load is asked of FSDP itself, which gathers it.
"""

import itertools
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed._tensor import distribute_tensor  # its name in PyTorch 2.4 too
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType as Kind

from lightning.fabric import Fabric
from lightning.fabric.storage.strategies import model_parallel
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
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


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
    """Writes checkpoints, or loads each in many modes and returns what is not as it should be."""
    fabric = Fabric(accelerator="cpu", devices=job["world"], strategy=CPUFSDPStrategy(state_dict_type="sharded"))
    fabric.launch()
    if job["does"] == "write":
        for writer, path in job["paths"].items():
            WRITERS[writer](fabric, path)
        return {}
    found = {}
    for mode in itertools.starmap(Mode, job["modes"]):
        for path in job["paths"]:
            if path.endswith("inner") != (mode.special == "inner"):  # which has other names
                continue
            try:
                told = list(_differences(fabric, path, mode))
            except Exception as error:
                told = [f"{type(error).__name__}: {error}"]
            found[f"{Path(path).name} into {mode}"] = [one[:300] for one in told[:3]]
    return {"different": {name: told for name, told in found.items() if told}, "count": len(found)}


def _differences(fabric: Fabric, path: str, mode: Mode) -> Iterator[str]:
    module, optimizers = made(5.0, mode)
    if mode.special == "stateful":
        fill(module, optimizers, 5.0)
    if mode.special == "unsharded":
        module.eval()
        module(torch.ones(2, 7))
        module.train()
    target: Any = module
    if mode.special == "compiled":  # as Fabric sets one up
        target = _FabricModule(torch.compile(module, backend="eager"), fabric.strategy.precision)
    state = {MODEL: target, **optimizers, "epoch": 0}
    rest = fabric.load(path, state)
    if (state["epoch"], rest) != (3, {"note": "rest"}):
        yield f"epoch {state['epoch']}, and {rest} besides"
    yield from _compare(full_state(module, optimizers), path.endswith("frozen"))


def _compare(state: dict[str, Any], frozen: bool) -> Iterator[str]:
    """Yields where a state is not the one of :func:`values_of` with a scale of 1."""
    like = Network().state_dict()
    if state[MODEL].keys() != like.keys():
        yield f"names {sorted(state[MODEL].keys() ^ like.keys())}"
    for name, value in state[MODEL].items():
        expected = {"note": "scaled by 1.0"} if name.endswith("_extra_state") else values_of(name, value.shape, 1.0)
        expected = expected if isinstance(expected, dict) else expected.to(like[name].dtype)
        if not (torch.equal(value, expected) if isinstance(value, Tensor) else value == expected):
            yield f"{name} is {value}, not {expected}"
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


def _write_flat(fabric: Fabric, path: str, mode: Mode = Mode()) -> None:
    module, optimizers = made(1.0, mode)
    fill(module, optimizers, 1.0)
    fabric.save(path, {MODEL: module, **optimizers, **REST})


def _write_fsdp2(fabric: Fabric, path: str) -> None:
    mesh = init_device_mesh("cpu", (fabric.world_size,))
    net = network(1.0)
    for part in (net.odd, net.units[0], net.units[1][0], net):
        fully_shard(part, mesh=mesh)
    optimizers = optimizers_of(net, 1.0)
    for key, optimizer in optimizers.items():
        for name, parameter in net.named_parameters():
            if _group_of(name) in GROUPS[key]:
                state = states_of(key, name, 1.0)
                optimizer.state[parameter] = {
                    part: distribute_tensor(value, mesh, parameter.placements) if value.dim() else value
                    for part, value in state.items()
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
    "fsdp": _write_flat,
    "fsdp-flat": partial(_write_flat, mode=Mode(orig=False)),
    "fsdp-hybrid": partial(_write_flat, mode=Mode("HYBRID_SHARD")),
    "fsdp-inner": partial(_write_flat, mode=Mode(special="inner")),
    "fsdp2": _write_fsdp2,
}
