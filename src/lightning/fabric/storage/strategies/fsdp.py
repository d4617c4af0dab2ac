"""Checkpoints of the FSDP strategies: of Fabric, whose users name what is saved, and of the Trainer."""

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.optim import Optimizer

from lightning.fabric.storage.strategies import checkpoints, full_state, optimizer_state
from lightning.fabric.storage.strategies.state import (
    Filters,
    distributed_model,
    no_checkpoint,
    optimizers_in,
    refuse_folder,
    restore_rest,
    save_of_trainer,
    state_dicts,
)

if TYPE_CHECKING:
    from lightning.fabric.strategies import FSDPStrategy

_Path = str | os.PathLike[str]


def save(
    strategy: "FSDPStrategy", path: _Path, state: dict[str, Any], storage_options: Any, filters: Filters | None
) -> None:
    """Saves a checkpoint of Fabric; a collective call.

    Args:
        strategy: Fabric's strategy.
        path: Where to.
        state: One FSDP model, its optimizers, and anything else, by keys.
        storage_options: As for :func:`~lightning.fabric.storage.strategies.checkpoints.locate_checkpoint`.
        filters: By key, a predicate on the names and values to save; for full checkpoints only.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    from lightning.fabric.strategies import fsdp

    sharded = _is_sharded(strategy)
    if filters is not None and sharded:
        raise NotImplementedError("FSDP cannot load a sharded checkpoint that was filtered: save without `filter`.")
    place = checkpoints.locate_checkpoint(strategy.broadcast(path), storage_options)
    if not sharded:
        refuse_folder(place)
    _, module = distributed_model(state, fsdp._has_fsdp_modules, "FSDP")
    context: Any = (
        fsdp._get_sharded_state_dict_context(module)
        if sharded
        else fsdp._get_full_state_dict_context(module, world_size=strategy.world_size)
    )
    with context:
        tensors, rest = state_dicts(
            state, lambda part: part.state_dict(), lambda optimizer: FSDP.optim_state_dict(module, optimizer), filters
        )
    if sharded:
        checkpoints.save_sharded(tensors, rest, place, strategy.checkpoint_io)
    else:
        checkpoints.save_full({**tensors, **rest}, place, strategy.checkpoint_io, state)


def load(
    strategy: "FSDPStrategy",
    path: _Path,
    state: Module | Optimizer | dict[str, Any] | None,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Loads a checkpoint of Fabric into the objects of ``state``; a collective call.

    Args:
        strategy: Fabric's strategy.
        path: The checkpoint's.
        state: As for :func:`save`, or the model alone.
        strict: Whether it is an error if the checkpoint lacks something.
        weights_only: As for :func:`torch.load`.

    Returns:
        What ``state`` does not ask for.
    """
    from lightning.fabric.strategies.fsdp import _has_fsdp_modules
    from lightning.fabric.strategies.model_parallel import _load_raw_module_state_from_path

    if not state:
        raise ValueError(
            f"FSDPStrategy.load_checkpoint(..., state={state!r}) has nothing to load into: give it a dictionary with at"
            " least the model, state={'model': model}."
        )
    found = checkpoints.find_to_load(strategy.broadcast(path), weights_only)
    if isinstance(state, Module):
        _load_raw_module_state_from_path(found, module=state, world_size=strategy.world_size, strict=strict)  # type: ignore[arg-type]
        return {}
    if isinstance(state, Optimizer):
        raise NotImplementedError(
            "FSDP cannot load an optimizer alone: give the model and the optimizer in a dictionary."
        )
    key, module = distributed_model(state, _has_fsdp_modules, "FSDP")
    its_optimizers = optimizers_in(state)
    loaded = {key, *its_optimizers}
    if checkpoints.is_sharded_checkpoint(found):
        rest = _load_sharded(module, key, its_optimizers, found, strict, weights_only)
        return restore_rest(rest, state, loaded, strict, into_objects=False)
    if checkpoints.is_full_checkpoint(found):
        checkpoint = _load_full(module, key, found, strategy.world_size, strict, weights_only)
        states = ((optimizer, checkpoint.pop(name)) for name, optimizer in its_optimizers.items())
        _place_optimizers(module, states, strategy.world_size)
        return restore_rest(checkpoint, state, loaded, strict, into_objects=True)
    raise no_checkpoint(found)


def save_trainers(
    strategy: Any, checkpoint: dict[str, Any], path: _Path, storage_options: Any, save_full: Callable[..., None]
) -> None:
    """Saves a checkpoint of the Trainer; see :func:`~lightning.fabric.storage.strategies.state.save_of_trainer`."""
    model = "model" if _is_sharded(strategy) else None
    save_of_trainer(strategy, checkpoint, path, storage_options, save_full, model)


def load_trainers(strategy: Any, path: _Path, weights_only: bool | None) -> dict[str, Any]:
    """Loads a checkpoint of the Trainer into the strategy's model and, to go on training, its optimizers.

    Args:
        strategy: The Trainer's strategy.
        path: The checkpoint's.
        weights_only: As for :func:`torch.load`.

    Returns:
        The checkpoint without the model and, if it is sharded, without the optimizers.
    """
    found = checkpoints.find_to_load(strategy.broadcast(path), weights_only)
    module, strict = strategy.model, strategy.lightning_module.strict_loading
    is_fitting = strategy.lightning_module.trainer.state.fn == "fit"
    if checkpoints.is_sharded_checkpoint(found):
        own = {f"optimizer_{number}": each for number, each in enumerate(strategy.optimizers)} if is_fitting else {}
        return _load_sharded(module, "model", own, found, strict, weights_only)
    if not checkpoints.is_full_checkpoint(found):
        raise no_checkpoint(found)
    checkpoint = _load_full(module, "state_dict", found, strategy.world_size, strict, weights_only)
    states = checkpoint.get("optimizer_states")
    if states is not None and is_fitting:
        if len(states) != len(strategy.optimizers):
            raise RuntimeError(
                f"The checkpoint has the states of {len(states)} optimizers, and you have configured"
                f" {len(strategy.optimizers)} optimizers. Configure as many, or take the states out of the checkpoint."
            )
        _place_optimizers(module, zip(strategy.optimizers, states, strict=True), strategy.world_size)
    return checkpoint


def _is_sharded(strategy: Any) -> bool:
    if strategy._state_dict_type not in ("sharded", "full"):
        raise ValueError(f"Unknown state_dict_type: {strategy._state_dict_type}")
    return bool(strategy._state_dict_type == "sharded")


def _load_sharded(
    module: Module,
    key: str,
    its_optimizers: dict[str, Optimizer],
    path: _Path,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Loads model and optimizers, by their keys, from a sharded checkpoint; returns the rest of it."""
    from lightning.fabric.strategies import fsdp

    context: Any = fsdp._get_sharded_state_dict_context(module)
    with context:
        state = {key: module.state_dict()}
        checkpoints.load_shards(state, path, strict, weights_only, module)
        module.load_state_dict(state[key], strict=strict)
        for name, optimizer in its_optimizers.items():
            checkpoints.load_flat_optimizer(module, optimizer, state[key], name, path, weights_only)
    rest: dict[str, Any] = checkpoints.load_metadata(path, weights_only)
    return rest


def _load_full(
    module: Module, key: str, path: _Path, world_size: int, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Loads the model from a full checkpoint; returns the rest of it, in host memory."""
    from lightning.fabric.strategies.model_parallel import _load_raw_module_state

    checkpoint = full_state.load_full(path, weights_only)
    _load_raw_module_state(checkpoint.pop(key), module=module, world_size=world_size, strict=strict)
    filled: dict[str, Any] = checkpoints.read_together(path, lambda: full_state.filled(checkpoint))
    return filled


def _place_optimizers(module: Module, states: Iterable[tuple[Optimizer, Any]], world_size: int) -> None:
    """Gives each optimizer its full state, which every rank has."""
    from lightning.fabric.strategies import fsdp

    context: Any = fsdp._get_full_state_dict_context(module, world_size=world_size, rank0_only=False)
    with context:
        for optimizer, state in states:
            optimizer_state.place_flat(module, optimizer, optimizer_state.by_name(state, module))
