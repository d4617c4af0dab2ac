"""The states of modules and optimizers of FSDP's first version, described from its flat parameters in place.

FSDP's own functions gather every parameter and copy it. What they know is in private attributes of each FSDP module:
which flat range this rank has of each parameter, and where it is. Only this module and ``flat_hooks`` use what is
private to FSDP. This one checks that it describes a model completely, on all ranks; where it does not, FSDP's own
functions are for all ranks to call.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning.fabric.storage.collectives.errors import is_rank_zero
from lightning.fabric.storage.strategies import flat_hooks
from lightning.fabric.storage.strategies.flat_parts import Description, FlatPart, agree
from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_5

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

log = logging.getLogger(__name__)

#: The attributes in which wrappers keep a module, and which FSDP leaves out of names.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class _Undescribed(Exception):
    """A reason why the flat parameters do not describe a module."""


def parts_of(module: nn.Module, to_load: bool = False) -> list[FlatPart] | None:
    """Returns this rank's parts of all parameters that FSDP shards in a module, without copying any.

    A collective call when it is the first for the module, or if what it found has changed: all ranks together check
    that they have every value once. If they do not, there is one line in the log.

    Returns:
        The parts, or None on all ranks if a state can be had from FSDP alone.
    """
    parts: list[FlatPart] = []
    reason = None
    try:
        if not _TORCH_GREATER_EQUAL_2_5:
            raise _Undescribed("before PyTorch 2.5 a planner takes no shards but its own")
        parts = list(_parts_of(module))
        _refuse_hooks(module)
        if to_load:
            _prepare_load(module)
    except (_Undescribed, ImportError, AttributeError, TypeError, ValueError) as error:
        reason = str(error)
    own = Description.of(parts, reason)
    if module not in _agreed or _agreed[module][0] != own:
        agreed = agree(lambda: own if reason else Description.of(parts, _reason_to_need_whole(module, parts)), parts)
        _agreed[module] = own, agreed
        if agreed is not None and is_rank_zero():
            log.info(f"FSDP gathers and copies the state of {type(module).__name__} for sharded checkpoints: {agreed}")
    return parts if _agreed[module][1] is None else None


#: What the ranks found of a module, and why FSDP alone has its state, if they agreed on that.
_agreed: WeakKeyDictionary[nn.Module, tuple[Description, str | None]] = WeakKeyDictionary()


def _units(module: nn.Module) -> "list[FullyShardedDataParallel]":
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    return FSDP.fsdp_modules(module)


def _parts_of(module: nn.Module) -> Iterator[FlatPart]:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    for path, unit in module.named_modules():
        if not isinstance(unit, FSDP):
            continue
        if type(unit) is not FSDP:
            raise _Undescribed(f"{type(unit).__name__} is a class of its own")
        if unit._handle is not None:
            yield from _parts_of_unit(f"{path}." if path else "", unit)


def _parts_of_unit(prefix: str, unit: "FullyShardedDataParallel") -> Iterator[FlatPart]:
    handle: Any = unit._handle
    flat = handle.flat_param
    if handle._training_state.name == "SUMMON_FULL_PARAMS":  # and perhaps changed; in a step they are not
        raise _Undescribed("its parameters are gathered at the moment")
    if handle._use_orig_params and not handle._skip_writeback_check and not handle._skipped_use_sharded_views:
        handle._writeback_orig_params()  # parameters that have been given other memory
    shard = getattr(flat, "_local_shard", flat).detach()  # the flat parameter is the shard until its first use
    others: dict[tuple[nn.Module, str], list[tuple[nn.Module, str]]] = {}
    for tied in flat._shared_param_infos:
        others.setdefault((tied.prim_module, tied.prim_param_name), []).append((tied.module, tied.param_name))
    columns = flat._fqns, flat._shapes, _orders_of(flat), flat._param_infos, flat._shard_param_infos
    for at, (fqn, shape, dims, owner, info) in enumerate(zip(*columns, strict=True)):
        if flat._param_extensions[at] is not None:
            raise _Undescribed(f"{fqn!r} is sharded in another way, too")
        size = info.numel_in_shard if info.in_shard and math.prod(shape) else 0
        start = info.intra_param_start_idx if size else 0
        own = (owner.module, owner.param_name)
        yield FlatPart(
            name=clean_name(prefix + fqn),
            parameter=flat._params[at] if flat._params is not None else flat,
            owners=[own, *others.get(own, ())],
            shape=torch.Size(shape),
            dims=dims,
            range=(start, start + size),
            offset=info.offset_in_shard if size and flat._params is None else 0,
            held=size if flat._params is not None else len(shard),
            is_replicated=not handle.uses_sharded_strategy,
            local=shard.narrow(0, info.offset_in_shard if size else 0, size),
        )


def _orders_of(flat: Any) -> list[tuple[int, ...]]:
    """Returns the order of dimensions in which each parameter is flattened."""
    row_major = [tuple(range(len(shape))) for shape in flat._shapes]
    if not hasattr(flat, "_contiguities"):  # older releases flatten everything so
        return row_major
    columns = flat._contiguities, row_major, flat._shapes, flat._strides
    return [dims if is_own else _dims_of(shape, by) for is_own, dims, shape, by in zip(*columns, strict=True)]


def _dims_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Returns the dimensions of a tensor without gaps in memory, from the largest stride to the smallest."""
    dims = sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1))
    values = 1
    for dim in reversed(dims):
        if shape[dim] != 1 and strides[dim] != values:
            raise _Undescribed(f"a parameter of shape {tuple(shape)} has gaps in memory")
        values *= shape[dim]
    return tuple(dims)


def clean_name(name: str) -> str:
    """Returns the name that FSDP gives a parameter or buffer: without what wrappers, but for torch.compile, add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _prepare_load(module: nn.Module) -> None:
    for path, name in flat_hooks.loading_hooks(module):
        raise _Undescribed(f"{clean_name(path) or 'it'} has {name}, which may need it to load a state")
    if is_in_step(module):
        raise _Undescribed("it is in the midst of a step")
    with flat_hooks.without_cutting(module):  # fails before anything is read, if a release lacks what it replaces
        flat_hooks.free_gathered(module)


def is_in_step(module: nn.Module) -> bool:
    """Returns whether a training step uses parameters of a module at the moment, or was ended by an error within it."""
    handles: list[Any] = [unit._handle for unit in _units(module)]
    return any(handle is not None and handle._training_state.name != "IDLE" for handle in handles)


def _refuse_hooks(module: nn.Module) -> None:
    for path, part in module.named_modules():
        for hook in chain(part._state_dict_pre_hooks.values(), part._state_dict_hooks.values()):
            if not hook.__module__.startswith("torch.distributed."):
                name = getattr(hook, "__qualname__", hook)
                raise _Undescribed(f"{clean_name(path) or 'it'} has a state-dict hook that may need it, {name}")


def _reason_to_need_whole(module: nn.Module, parts: list[FlatPart]) -> str | None:
    """Returns why a module cannot make its state of shards, if its own methods for that use them as whole tensors."""
    try:
        state_of(module, parts)
    except Exception as error:  # raised once more, if it is an error, when FSDP makes the state
        return f"{type(error).__name__}: {error}"
    return None


def module_state(module: nn.Module) -> dict[str, Any] | None:
    """Returns a module's state by the names that ``FSDP.state_dict`` gives, with shards in place.

    A collective call as :func:`parts_of`, for which None is returned likewise.
    """
    parts = parts_of(module)
    return None if parts is None else state_of(module, parts)


def state_of(module: nn.Module, parts: list[FlatPart], keep_vars: bool = False) -> dict[str, Any]:
    """Returns a module's state; ``keep_vars`` is the argument of that name of its own method."""
    with _shards_in_place(module, parts), _without_gathering(module):
        return module.state_dict(keep_vars=keep_vars)


def load_state(module: nn.Module, parts: list[FlatPart], state: dict[str, Any], strict: bool) -> None:
    """Has a module load a state with the same parts, whose values are in their place already."""
    with _shards_in_place(module, parts), flat_hooks.without_cutting(module):
        module.load_state_dict(state, strict=strict)


def names_of(module: nn.Module, parts: list[FlatPart]) -> dict[Tensor, list[str]]:
    """Returns the names of all parameters that each one of a module is made of, as an optimizer has it."""
    names: dict[Tensor, list[str]] = {}
    for part in parts:
        names.setdefault(part.parameter, []).append(part.name)
    return names | {of: [clean_name(name)] for name, of in module.named_parameters() if of not in names}


@contextmanager
def _shards_in_place(module: nn.Module, parts: list[FlatPart]) -> Iterator[None]:
    """Makes the shards the parameters of the modules that own them, for what these do to make a state."""
    handles: list[Any] = [unit._handle for unit in _units(module) if unit._handle is not None]
    flat = {id(handle.flat_param) for handle in handles}
    before = [(part._parameters, dict(part._parameters)) for part in module.modules()]
    try:
        for parameters, had in before:
            for name in [name for name, parameter in had.items() if id(parameter) in flat]:
                del parameters[name]
        for part in parts:
            value = part.value
            for owner, name in part.owners:
                owner._parameters[name] = value  # type: ignore[assignment]
        yield
    finally:
        for parameters, had in before:
            parameters.clear()
            parameters.update(had)


@contextmanager
def _without_gathering(module: nn.Module) -> Iterator[None]:
    """Puts others in the place of the functions that FSDP has called before and after a state is made."""
    from torch.distributed.fsdp import _state_dict_utils as functions

    units = [(unit, unit._state_dict_pre_hooks, unit._state_dict_hooks) for unit in _units(module)]
    try:
        for unit, before, after in units:
            unit._state_dict_pre_hooks = type(before)(
                (key, hook) for key, hook in before.items() if hook is not functions._pre_state_dict_hook
            )
            unit._state_dict_hooks = type(after)(
                (key, _after_state_dict if hook is functions._post_state_dict_hook else hook)
                for key, hook in after.items()
            )
        yield
    finally:
        for unit, before, after in units:
            unit._state_dict_pre_hooks, unit._state_dict_hooks = before, after


def _after_state_dict(unit: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Gives the entries of an FSDP module their names without it, and buffers the type that they were wrapped with."""
    wrapped = f"{prefix}{_WRAPPERS[0]}."
    for name in [name for name in state if name.startswith(wrapped)]:
        state[prefix + name.removeprefix(wrapped)] = state.pop(name)
    if unit.mixed_precision.buffer_dtype is not None:
        for name in unit._buffer_names - unit._ignored_buffer_names:
            if prefix + name in state:
                state[prefix + name] = state[prefix + name].to(unit._buffer_name_to_orig_dtype[name])


def optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
    """Returns an optimizer's state by the names that ``FSDP.optim_state_dict`` gives, with shards in place.

    Of a parameter of which this rank has no values, there are shards without values like the state of another one of
    the group, if there is one: hooks find it there, and the planner does not. A collective call as :func:`parts_of`,
    for which None is returned likewise.

    Raises:
        ValueError: The optimizer has a parameter that the module has not.
    """
    parts = parts_of(module)
    if parts is None:
        return None
    flat: dict[int, list[FlatPart]] = {}
    for part in parts:
        flat.setdefault(id(part.parameter), []).append(part)
    others = {id(parameter): clean_name(name) for name, parameter in module.named_parameters()}
    packed = optimizer.state_dict()
    states, groups = dict(packed["state"]), []
    found: dict[str, Any] = {}
    for group, own in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        names: list[str] = []
        absent: list[FlatPart] = []
        for key, parameter in zip(group["params"], own["params"], strict=True):
            if id(parameter) not in flat and id(parameter) not in others:
                raise ValueError(
                    "The optimizer has a parameter that is not one of the model, so that it cannot be saved"
                )
            own_parts, state = flat.get(id(parameter), ()), states.pop(key, None)
            absent += [part for part in own_parts if not part.held and part.shape.numel() and parameter.requires_grad]
            names += [part.name for part in own_parts] or [others[id(parameter)]]
            if state is not None and own_parts:
                found |= {part.name: _part_of(state, part) for part in own_parts}
            elif state is not None:
                found[names[-1]] = dict(state)
        like: dict[str, Any] = next((found[name] for name in names if name in found), {})
        found |= {part.name: part.nothing_of(like) for part in absent if like}
        groups.append({**group, "params": names})
    return {"state": {**found, **states}, "param_groups": groups}


def _part_of(state: dict[str, Any], part: FlatPart) -> dict[str, Any]:
    return {key: part.state(one) if isinstance(one, Tensor) and one.dim() else one for key, one in state.items()}
