"""Checkpoints of the model-parallel strategies (FSDP2 and tensor parallelism), whose parameters are DTensors."""

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.optim import Optimizer

from lightning.fabric.storage.paths.location import AnyPath
from lightning.fabric.storage.strategies import checkpoints, full_state, load_targets, optimizer_state
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
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
    from lightning.fabric.strategies import ModelParallelStrategy

_Path = str | os.PathLike[str]


def save(
    strategy: "ModelParallelStrategy", path: _Path, state: dict[str, Any], storage_options: Any, filters: Filters | None
) -> None:
    """Saves a checkpoint of Fabric; a collective call.

    Args:
        strategy: Fabric's strategy.
        path: Where to.
        state: One distributed model, its optimizers, and anything else, by keys.
        storage_options: As for :func:`~lightning.fabric.storage.strategies.checkpoints.locate_checkpoint`.
        filters: By key, a predicate on the names and values to save; for full checkpoints only.
    """
    sharded = strategy._save_distributed_checkpoint
    if filters is not None and sharded:
        name = type(strategy).__name__
        raise NotImplementedError(f"{name} cannot load a sharded checkpoint that was filtered: save without `filter`.")
    place = checkpoints.locate_checkpoint(strategy.broadcast(path), storage_options)
    save_state(place, state, not sharded, filters, strategy.checkpoint_io)


def save_state(
    path: AnyPath,
    state: dict[str, Any],
    full: bool,
    filters: Filters | None = None,
    checkpoint_io: "CheckpointIO | None" = None,
) -> None:
    """Saves as :func:`save`; ``full`` makes one file, and ``checkpoint_io`` is the strategy's plugin."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    from lightning.fabric.strategies.model_parallel import _has_dtensor_modules

    place = checkpoints.locate_checkpoint(path)
    if full:
        refuse_folder(place)
    _, module = distributed_model(state, _has_dtensor_modules, "distributed")
    options = StateDictOptions(full_state_dict=full)
    tensors, rest = state_dicts(
        state,
        lambda part: module_state(part, full),
        lambda optimizer: state_of_optimizer(module, optimizer, options),
        filters,
    )
    if full:
        checkpoints.save_full({**tensors, **rest}, place, checkpoint_io, state)
    else:
        checkpoints.save_sharded(tensors, rest, place, checkpoint_io)


def module_state(module: Module, full: bool) -> dict[str, Any]:
    """Returns what is saved of a module; a collective call. Shards stay on their device until the writer asks for them.

    Args:
        module: The module.
        full: Whether to gather all of it on rank zero, in host memory.

    Raises:
        ValueError: The module could not load it.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    load_targets.refuse_unloadable(module)
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=full, cpu_offload=full))


def state_of_optimizer(module: Module, optimizer: Optimizer, options: "StateDictOptions") -> dict[str, Any]:
    """Returns what is saved of an optimizer, as :func:`module_state`; ``options`` say whether to gather it."""
    options = dataclasses.replace(options, cpu_offload=options.full_state_dict)
    return optimizer_state.state_of(module, optimizer, options)


def load_state(
    path: _Path, state: dict[str, Any], strict: bool, in_list: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Loads a checkpoint of Fabric or the Trainer into the objects of ``state``; a collective call.

    Args:
        path: The checkpoint's.
        state: One distributed model, its optimizers, and anything else, by keys.
        strict: Whether it is an error if the checkpoint lacks something.
        in_list: Whether a full checkpoint has the optimizers' states in a list, as the Trainer's.
        weights_only: As for :func:`torch.load`.

    Returns:
        What ``state`` does not ask for.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from lightning.fabric.strategies.model_parallel import _has_dtensor_modules, _load_raw_module_state

    key, module = distributed_model(state, _has_dtensor_modules, "distributed")
    its_optimizers = optimizers_in(state)
    loaded = {key, *its_optimizers}
    if checkpoints.is_sharded_checkpoint(path):
        own = {key: get_model_state_dict(module)}
        checkpoints.load_shards(own, path, strict, weights_only, module)
        module.load_state_dict(own[key], strict=strict)
        for name, optimizer in its_optimizers.items():
            checkpoints.load_optimizer(module, optimizer, name, path, strict, weights_only)
        rest = checkpoints.load_metadata(path, weights_only)
        return restore_rest(rest, state, loaded, strict, into_objects=False)
    if checkpoints.is_full_checkpoint(path):
        apart = {key, "optimizer_states"} if in_list else loaded
        checkpoint = full_state.load_full(path, weights_only, apart)
        _load_raw_module_state(checkpoint.pop(key), module, strict=strict)
        for number, (name, optimizer) in enumerate(its_optimizers.items()):
            saved = checkpoint["optimizer_states"][number] if in_list else checkpoint.pop(name)
            full_state.load_optimizer(module, optimizer, optimizer_state.by_name(saved, module), strict)
        return restore_rest(checkpoint, state, loaded, strict, into_objects=True)
    raise no_checkpoint(path)


def save_trainers(
    strategy: Any, checkpoint: dict[str, Any], path: _Path, storage_options: Any, save_full: Callable[..., None]
) -> None:
    """Saves a checkpoint of the Trainer; see :func:`~lightning.fabric.storage.strategies.state.save_of_trainer`."""
    model = "state_dict" if strategy._save_distributed_checkpoint else None
    save_of_trainer(strategy, checkpoint, path, storage_options, save_full, model)
