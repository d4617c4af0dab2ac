"""States of FSDP modules in many modes, each saved from the flat shards and as FSDP's own functions give it."""

import copy
import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam, Optimizer

from lightning.fabric.plugins import AsyncCheckpointIO
from lightning.fabric.storage.background import pending
from lightning.fabric.storage.sharded.checksums import FileRecords
from lightning.fabric.storage.strategies import flat_shards, fsdp
from lightning.fabric.storage.strategies.checkpoint_save import save_sharded
from lightning.fabric.strategies import FSDPStrategy
from tests.strategies import resumes

State = dict[str, Any]


class CPUFSDPStrategy(FSDPStrategy):
    """Lightning accepts FSDP on the CPU for a subclass only."""


class Block(nn.Module):
    """Is wrapped by itself: odd sizes, so that ranks get parts of rows, and padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + 3)
        self.norm = nn.LayerNorm(width + 3)
        self.down = nn.Linear(width + 3, width, bias=False)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("cache", torch.rand(3), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(values)).relu() * self.scale.sum()) + values


class Frozen(nn.Linear):
    """Is not trained, and has an extra state."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.requires_grad_(False)

    def get_extra_state(self) -> State:
        return {"calls": 3, "of": "Frozen"}

    def set_extra_state(self, state: State) -> None:
        pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = Frozen(7)
        self.blocks = nn.Sequential(Block(7), Block(7))
        self.conv = nn.Conv2d(3, 5, (3, 2))
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(7, 1, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.frozen(self.first(self.norm(values))))
        return self.last(hidden).sum() + self.conv(values.new_ones(2, 3, 6, 6)).pow(2).sum()


def tied_net() -> nn.Module:
    net = Net()
    net.again = nn.Linear(7, 1, bias=False)
    net.again.weight = net.last.weight
    return net


def channels_last_net() -> nn.Module:
    net = Net()
    net.conv = net.conv.to(memory_format=torch.channels_last)
    net.blocks[0].up.weight = nn.Parameter(net.blocks[0].up.weight.detach().t().contiguous().t())
    return net


def empty_net() -> nn.Module:
    net = Net()
    net.nothing = nn.Parameter(torch.empty(0, 4))
    return net


def train(module: nn.Module, optimizers: list[Optimizer]) -> None:
    """Takes two steps."""
    torch.manual_seed(1)
    for _ in range(2):
        module(torch.randn(4, 5)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def validate(module: nn.Module) -> None:
    """Leaves the root's parameters gathered, where the strategy keeps them after a forward pass."""
    with torch.no_grad():
        module(torch.randn(4, 5))


def accumulate(module: Any) -> None:
    """Adds gradients without a step, of which one is not shared with the other ranks."""
    with module.no_sync():
        module(torch.randn(4, 5)).backward()
    module(torch.randn(4, 5)).backward()


def interrupt(module: nn.Module) -> None:
    """Leaves the root's parameters gathered, as an error or Ctrl-C in a training step does."""

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = module.last.register_forward_hook(fail)
    with suppress(KeyboardInterrupt):
        module.eval()(torch.randn(4, 5))
    hook.remove()


def forget_the_step(module: nn.Module) -> None:
    """Has FSDP's own functions work again after :func:`interrupt`."""
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        unit.training_state = TrainingState.IDLE
        if unit._handle is not None:
            unit._handle._training_state = HandleTrainingState.IDLE


def checkpointed(net: nn.Module) -> nn.Module:
    apply_activation_checkpointing(net, check_fn=lambda part: isinstance(part, (Block, nn.Conv2d)))
    return net


def compiled(net: nn.Module) -> nn.Module:
    net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
    return net


def in_halves(parameters: list[nn.Parameter]) -> list[Optimizer]:
    return [Adam(parameters[:3]), torch.optim.SGD(parameters[3:], lr=0.1, momentum=0.9)]


@dataclasses.dataclass
class Mode:
    """A way of wrapping and training.

    Attributes:
        options: Arguments of FSDP.
        net: Makes the module.
        after: Called with the wrapped module after training.
        steps: Whether it is trained at all.
        optimizers: Makes the optimizers of the parameters.
        knows_fsdp: Whether FSDP's own functions can save it. If not, the state is compared with the whole parameters.
        mesh: The shape of a device mesh, if there is one.
        cls: The class of FSDP.
        ignored: The names of modules that FSDP leaves alone.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    net: Callable[[], nn.Module] = Net
    after: Callable[[nn.Module], None] = lambda module: None
    steps: bool = True
    optimizers: Callable[[list[nn.Parameter]], list[Optimizer]] = lambda parameters: [Adam(parameters)]
    knows_fsdp: bool = True
    mesh: tuple[int, ...] | None = None
    cls: type[FullyShardedDataParallel] = FullyShardedDataParallel
    ignored: tuple[str, ...] = ()


_GRAD_OP = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
_FLAT = {"use_orig_params": False}
_HALF = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
MODES = {
    "full shard": Mode(),
    "flat parameters": Mode(_FLAT),
    "before the first step": Mode(steps=False),
    "flat parameters before the first step": Mode(_FLAT, steps=False),
    "gathered after validation": Mode(_GRAD_OP, after=validate),
    "flat parameters gathered after validation": Mode({**_GRAD_OP, **_FLAT}, after=validate),
    "between accumulation steps": Mode(after=accumulate),
    "before a backward pass": Mode(_GRAD_OP, after=lambda module: module(torch.randn(4, 5))),
    "interrupted": Mode(after=interrupt),
    "flat parameters, interrupted": Mode(_FLAT, after=interrupt),
    "no shard": Mode({"sharding_strategy": ShardingStrategy.NO_SHARD}),
    "no shard of flat parameters": Mode({"sharding_strategy": ShardingStrategy.NO_SHARD, **_FLAT}),
    "mixed precision": Mode({"mixed_precision": _HALF}),
    "no shard, mixed precision": Mode(
        {"mixed_precision": _HALF, "sharding_strategy": ShardingStrategy.NO_SHARD}, after=validate
    ),
    "mixed precision, gathered": Mode({"mixed_precision": _HALF, **_GRAD_OP}, after=validate),
    "device mesh": Mode(mesh=(-1,)),
    "activation checkpoints": Mode(net=lambda: checkpointed(Net())),
    "compiled part": Mode(net=lambda: compiled(Net()), steps=False),
    "ignored modules": Mode(ignored=("conv", "blocks.1.norm")),
    "tied": Mode(net=tied_net, knows_fsdp=False),
    "two optimizers": Mode(optimizers=in_halves, knows_fsdp=False),
    "channels last": Mode(net=channels_last_net, knows_fsdp=False),
    "no values": Mode(net=empty_net, knows_fsdp=False),
}
HYBRID_MODES = {
    "hybrid": Mode({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, mesh=(2, 2)),
    "hybrid of flat parameters": Mode(
        {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2, **_FLAT}, mesh=(2, 2)
    ),
}


def wrapped(mode: Mode) -> tuple[FullyShardedDataParallel, list[Optimizer]]:
    """The trained module of a mode, with its optimizers."""
    torch.manual_seed(0)
    net = mode.net()
    mesh = mode.mesh and (torch.distributed.get_world_size(),) if mode.mesh == (-1,) else mode.mesh
    names = ("replicate", "shard")[2 - len(mesh) :] if mesh else None
    module = mode.cls(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Block, Frozen}),
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names) if mesh else None,
        ignored_modules=[net.get_submodule(name) for name in mode.ignored] or None,
        **{"use_orig_params": True, **mode.options},
    )
    optimizers = mode.optimizers([parameter for parameter in module.parameters() if parameter.requires_grad])
    if mode.steps:
        train(module, optimizers)
    mode.after(module)
    return module, optimizers


def state_of(module: nn.Module, optimizers: list[Optimizer]) -> State:
    """The state as this Lightning saves it."""
    strategy = CPUFSDPStrategy(state_dict_type="sharded")
    state = {"model": fsdp.module_state(strategy, module)}
    return state | {
        f"optimizer_{at}": fsdp._optimizer_state(strategy, module, one) for at, one in enumerate(optimizers)
    }


def state_of_fsdp(module: nn.Module, optimizers: list[Optimizer]) -> State:
    """The same as FSDP's own functions give it."""
    configs = ShardedStateDictConfig(offload_to_cpu=False), ShardedOptimStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, *configs):
        state = {"model": module.state_dict()}
        for at, optimizer in enumerate(optimizers):
            state[f"optimizer_{at}"] = FullyShardedDataParallel.optim_state_dict(module, optimizer)
    return state


def flattened(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else None
    if parts is None:
        yield path, tree
    for name, value in parts or ():
        yield from flattened(value, f"{path}/{name}")


def differing(left: Any, right: Any) -> list[str]:
    """The paths in two trees at which they are not the same bit for bit."""
    ours, theirs = dict(flattened(left)), dict(flattened(right))
    wrong = sorted(ours.keys() ^ theirs.keys())
    for path in ours.keys() & theirs.keys():
        own, other = ours[path], theirs[path]
        if isinstance(own, torch.Tensor) and isinstance(other, torch.Tensor):
            is_same = own.dtype == other.dtype and own.shape == other.shape and torch.equal(own, other)
        else:
            is_same = type(own) is type(other) and own == other
        wrong += [] if is_same else [path]
    return wrong


def read_by_stock(folder: str) -> Any:
    """The whole content of a checkpoint, read by torch alone."""
    dcp_to_torch_save(folder, f"{folder}.pt")
    return torch.load(f"{folder}.pt", weights_only=False)


def compare(name: str, mode: Mode, folder: Path) -> list[str]:
    """What is not the same in a save of our own and in one of FSDP's, on rank zero."""
    module, optimizers = wrapped(mode)
    before = [(name, id(parameter)) for name, parameter in module.named_parameters()]
    own, wrong = state_of(module, optimizers), []
    assert before == [(name, id(parameter)) for name, parameter in module.named_parameters()]
    if torch.distributed.get_rank() == 0:
        assert flat_shards.parts_of(module), "without the others: what is agreed needs no collective call"
        state_of(module, optimizers)
    place = str(folder / name.replace(" ", "-"))
    save_sharded(own, {"name": name}, f"{place}-own")
    if mode.knows_fsdp:
        forget_the_step(module)
        theirs = state_of_fsdp(module, optimizers)
        dcp.save(theirs, checkpoint_id=f"{place}-fsdp")
        wrong = [] if list(own["model"]) == list(theirs["model"]) else ["the order of names"]
        wrong += [f"{key} on this rank" for key, part in own.items() if _names(part) != _names(theirs[key])]
    if torch.distributed.get_rank() == 0:
        read = read_by_stock(f"{place}-own")
        wrong += differing(read, read_by_stock(f"{place}-fsdp")) if mode.knows_fsdp else far(read, unsharded(mode))
        wrong += [] if _writes_nothing_twice(f"{place}-own") else ["the number of records"]
    torch.distributed.barrier()
    return wrong


def save_replicas(name: str, mode: Mode, folder: Path) -> State:
    """What this rank copies of a state that two ranks have, and how saves in the background of it end."""
    module, optimizers = wrapped(mode)
    plugin, place = AsyncCheckpointIO(max_in_flight=2), str(folder / name.replace(" ", "-"))
    staging, copied = plugin.saver._staging, []
    stage = staging.stage_tensors

    def observed(tensors: list[torch.Tensor], meta: Any) -> Any:
        staged = stage(tensors, meta)
        copied.append(staged.size)
        return staged

    staging.stage_tensors = observed  # type: ignore[method-assign]
    for number in range(3):
        save_sharded(state_of(module, optimizers), {}, f"{place}-{number}")
        save_sharded(state_of(module, optimizers), {"step": 1}, f"{place}-{number}-background", plugin)
        train(module, optimizers)
    pending.drain()
    found: State = {"copied": copied, "whole": 0, "differs": []}
    if torch.distributed.get_rank() == 0:
        for number in range(3):
            read = read_by_stock(f"{place}-{number}"), read_by_stock(f"{place}-{number}-background")
            found["differs"] += differing(*read)
        found["whole"] = sum(value.nbytes for _, value in flattened(read[0]) if isinstance(value, torch.Tensor))
    state = state_of(module, optimizers)
    if torch.distributed.get_rank() == 1:
        state["bad"] = {1: next(iter(state["model"].values()))}
    save_sharded(state, {}, f"{place}-bad", plugin)
    try:
        pending.drain()
    except (RuntimeError, ValueError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _names(part: State) -> Any:
    return part.keys() | {"state"}, {name: sorted(state) for name, state in part.get("state", {}).items()}


def _writes_nothing_twice(folder: str) -> bool:
    """Whether the files have a record for each place that the metadata name, and one for the rest of the checkpoint."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    places = {(info.relative_path, info.offset) for info in metadata.storage_data.values()}
    return len(places) + 1 == sum(len(FileRecords(**file).places) for file in metadata.lightning["files"].values())


def unsharded(mode: Mode) -> State:
    """The state of the same training without FSDP."""
    torch.manual_seed(0)
    net = mode.net()
    optimizers = mode.optimizers([parameter for parameter in net.parameters() if parameter.requires_grad])
    train(net, optimizers)
    names = {parameter: name for name, parameter in net.named_parameters()}
    state: State = {"model": net.state_dict()}
    for at, optimizer in enumerate(optimizers):
        states = {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}
        groups = [{**group, "params": [names[one] for one in group["params"]]} for group in optimizer.param_groups]
        state[f"optimizer_{at}"] = {"state": states, "param_groups": groups}
    return state


def far(left: Any, right: Any) -> list[str]:
    """As :func:`differing`, but for what is only rounded in another way."""
    ours, theirs = dict(flattened(left)), dict(flattened(right))
    return [
        path
        for path in differing(left, right)
        if path not in ours
        or path not in theirs
        or not torch.is_tensor(ours[path])
        or ours[path].shape != theirs[path].shape
        or not torch.allclose(ours[path], theirs[path], atol=1e-6)
    ]


class Hidden(FullyShardedDataParallel):
    """Does nothing of its own, but could."""


def hooked() -> nn.Module:
    net = Net()
    net.blocks[1].register_state_dict_post_hook(lambda module, state, prefix, _: None)
    return net


class Computing(Net):
    """Needs the values of whole parameters for its state."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        assert state[f"{options['prefix']}first.weight"].sum().isfinite()
        return state


class Filtering(Net):
    """Saves what is trained only, under other names."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        state = super().state_dict(*args, **options)
        prefix = options["prefix"]
        for name in [name for name in state if name.startswith(f"{prefix}frozen")]:
            del state[name]
        state[f"{prefix}output"] = state.pop(f"{prefix}last.weight")
        return state


def without_attribute(module: nn.Module) -> None:
    """As a release of torch might have it, on one rank only."""
    if torch.distributed.get_rank() == 1:
        del module._handle.flat_param._strides


def with_older_torch(_: nn.Module) -> None:
    flat_shards._TORCH_GREATER_EQUAL_2_5 = False  # for the rest of the process


FALLBACKS = {
    "no attribute": Mode(after=without_attribute),
    "hook": Mode(net=hooked),
    "computes": Mode(net=Computing),
    "subclass": Mode(cls=Hidden),
    "older torch": Mode(after=with_older_torch),
}


def fall_back(mode: Mode, folder: Path) -> State:
    """How a module is saved that cannot be described: twice, as FSDP has it."""
    module, optimizers = wrapped(mode)
    with lines_of(flat_shards.log) as lines:
        states = [state_of(module, optimizers) for _ in range(2)]
    for at, state in enumerate([*states, state_of_fsdp(module, optimizers)]):
        dcp.save(state, checkpoint_id=str(folder / f"{at}"))
    read = [read_by_stock(str(folder / f"{at}")) for at in range(3)] if torch.distributed.get_rank() == 0 else []
    torch.distributed.barrier()
    return {"lines": lines, "differs": [path for one in read for path in differing(one, read[-1])]}


@contextmanager
def lines_of(log: logging.Logger) -> Iterator[list[str]]:
    lines: list[str] = []
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def other_cases(folder: Path) -> State:
    """What becomes of parameters in other memory, of a state dict that filters, and of an odd optimizer's state."""
    module, optimizers = wrapped(Mode(net=Filtering))
    filtered = fsdp.module_state(CPUFSDPStrategy(state_dict_type="sharded"), module)
    found: State = {"filtered": sorted(filtered.keys() ^ Net().state_dict().keys())}

    module, optimizers = wrapped(Mode())
    for parameter in module.parameters():
        parameter.data = torch.full_like(parameter.data, 7.0)
    replaced = {part.name: part.local.unique().tolist() for part in flat_shards.parts_of(module) if len(part.local)}
    found["replaced"] = [name for name, values in replaced.items() if values != [7.0]]

    module, optimizers = wrapped(Mode())
    for part in flat_shards.parts_of(module):
        if not len(part.local) and part.parameter.requires_grad:
            nothing = {"exp_avg": torch.empty(0), "exp_avg_sq": torch.empty(0)}
            optimizers[0].state[part.parameter] = {"step": torch.tensor(99.0), **nothing}
    save_sharded(state_of(module, optimizers), {}, str(folder / "nothing"))
    states = read_by_stock(str(folder / "nothing"))["optimizer_0"]["state"] if not torch.distributed.get_rank() else {}
    found["steps"] = sorted({float(state["step"]) for state in states.values()})

    module, optimizers = wrapped(Mode())
    if torch.distributed.get_rank() == 0:
        next(iter(optimizers[0].state.values()))["exp_avg"] = torch.zeros(3)
    try:
        save_sharded(state_of(module, optimizers), {}, str(folder / "odd"))
    except RuntimeError as error:
        found["odd"] = str(error)

    module, optimizers = wrapped(Mode())
    with FullyShardedDataParallel.summon_full_params(module):
        for parameter in module.parameters():
            parameter.data.fill_(3.0)
        state = fsdp.module_state(CPUFSDPStrategy(state_dict_type="sharded"), module)
    shards = [shard.tensor for name, _ in Net().named_parameters() for shard in state[name].local_shards()]
    found["gathered"] = sorted({number for shard in shards for number in shard.unique().tolist()})
    return found


class Hooked(resumes.Case):
    """Changes what is saved of it."""

    def on_save_checkpoint(self, checkpoint: State) -> None:
        state = checkpoint["state_dict"]
        del state["net.1.0.weight"]
        state["renamed"] = state.pop("net.2.weight")
        state["halved"] = state["net.0.0.weight"].half()
        state["copied"] = copy.deepcopy(state["net.0.0.bias"])
        state["added"] = torch.arange(3.0)
        state["shapes"] = {name: list(value.shape) for name, value in state.items() if name.startswith("net")}
        states = checkpoint["optimizer_states"][0]["state"]
        states["net.0.0.bias"] = {"step": states["net.0.0.bias"]["step"]}  # for FSDP2 has the optimizer's own there
        checkpoint["mine"] = [1, 2]


def save_hooked(strategy: str, folder: Path) -> Any:
    """What torch reads of a checkpoint that a hook has changed, in memory of rank zero."""
    job = {"strategy": strategy, "kind": "sharded", "root": str(folder)}
    trained = resumes._trained(Hooked, job, "sync", save=str(folder / strategy))
    assert not isinstance(trained, str), trained
    if torch.distributed.get_rank():
        return {}
    state = read_by_stock(str(folder / strategy / "saved.ckpt"))
    return {"model": state.pop("state_dict", None) or state["model"], "optimizer": state["optimizer_0"]}


def run(job: State) -> State:
    """What the job asks for, as this rank finds it."""
    warnings.simplefilter("ignore")
    folder = Path(job["folder"])
    modes = {**MODES, **HYBRID_MODES}
    if "modes" in job:
        found: State = {name: compare(name, modes[name], folder) for name in job["modes"]}
    elif "replicas" in job:
        found = {name: save_replicas(name, mode, folder) for name, mode in HYBRID_MODES.items()}
    elif "fallbacks" in job:
        found = {name: fall_back(mode, folder / name) for name, mode in FALLBACKS.items()}
    elif "hooks" in job:
        os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
        ours, fsdp2 = [save_hooked(strategy, folder) for strategy in ("fsdp", "model_parallel")]
        found = {"differs": far(ours, fsdp2), "names": sorted(ours.get("model", ()))}
    else:
        found = other_cases(folder)
    return {"found": found, "error": None}
