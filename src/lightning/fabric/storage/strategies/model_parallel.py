"""Checkpoints of the model-parallel strategies (FSDP2 and tensor parallelism), whose parameters are DTensors."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from lightning.fabric.storage.paths.location import AnyPath
from lightning.fabric.storage.strategies import full_state, load_targets, optimizer_state
from lightning.fabric.storage.strategies.checkpoint_load import load_metadata, load_module, load_optimizer
from lightning.fabric.storage.strategies.checkpoint_place import (
    FoundCheckpoint,
    find_to_load,
    locate_checkpoint,
    refuse_folder,
)
from lightning.fabric.storage.strategies.checkpoint_save import save_full, save_sharded
from lightning.fabric.storage.strategies.state import (
    Filters,
    Path,
    check_what_to_load,
    distributed_model,
    place_for_fabric,
    restore_rest,
    save_of_trainer,
    state_dicts,
)

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
    from lightning.fabric.strategies import ModelParallelStrategy


def save(
    strategy: "ModelParallelStrategy", path: Path, state: dict[str, Any], storage_options: Any, filters: Filters | None
) -> None:
    """Saves a checkpoint of Fabric; a collective call.

    Args:
        strategy: Fabric's strategy.
        path: A local path or a URL.
        state: One distributed model, its optimizers, and anything else, by keys.
        storage_options: Options for the file system of a URL.
        filters: By key, a predicate on the names and values to save; for full checkpoints only.
    """
    is_full = not strategy._save_distributed_checkpoint
    place = place_for_fabric(strategy, path, storage_options, filters, is_full)
    save_state(place, state, is_full, filters, strategy.checkpoint_io)


def save_state(
    path: AnyPath,
    state: dict[str, Any],
    full: bool,
    filters: Filters | None = None,
    checkpoint_io: "CheckpointIO | None" = None,
) -> None:
    """Saves as :func:`save`; ``full`` makes one file, and ``checkpoint_io`` is the strategy's plugin."""
    from lightning.fabric.strategies.model_parallel import _has_dtensor_modules

    place = locate_checkpoint(path)
    if full:
        refuse_folder(place)
    module = distributed_model(state, _has_dtensor_modules, "distributed").module
    tensors, rest = state_dicts(
        state,
        lambda part: module_state(part, full),
        lambda optimizer: optimizer_state.state_of(module, optimizer, full),
        filters,
    )
    (save_full if full else save_sharded)(tensors, rest, place, checkpoint_io)


def module_state(module: Module, full: bool) -> dict[str, Any]:
    """Returns the state of a module; a collective call. Shards stay on their device until the writer asks for them.

    Args:
        module: The module.
        full: Whether to gather all of it on rank zero, in host memory.

    Raises:
        ValueError: The module could not load it.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    load_targets.refuse_unloadable(module)
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=full, cpu_offload=full))


def load(
    strategy: "ModelParallelStrategy",
    path: Path,
    state: Module | dict[str, Any],
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Loads a checkpoint of Fabric, as :func:`load_state`, or into the model alone; a collective call."""
    from lightning.fabric.strategies.model_parallel import _load_raw_module_state_from_path

    check_what_to_load(strategy, state)
    if isinstance(state, Module):
        found = find_to_load(path, weights_only)
        _load_raw_module_state_from_path(found, module=state, world_size=strategy.world_size, strict=strict)  # type: ignore[arg-type]
        return {}
    return load_state(path, state, strict, in_list=False, weights_only=weights_only)


def load_state(
    path: AnyPath, state: dict[str, Any], strict: bool, in_list: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Loads a checkpoint of Fabric or the Trainer into the objects of ``state``; a collective call.

    Args:
        path: A local path or a URL, or the checkpoint that was found there.
        state: One distributed model, its optimizers, and anything else, by keys.
        strict: Whether it is an error if the checkpoint lacks something.
        in_list: Whether a full checkpoint has the optimizers' states in a list, as the Trainer's.
        weights_only: The argument of that name of :func:`torch.load`.

    Returns:
        The part of the checkpoint that ``state`` does not ask for.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from lightning.fabric.strategies.model_parallel import _has_dtensor_modules, _load_raw_module_state

    model = distributed_model(state, _has_dtensor_modules, "distributed")
    module, key = model.module, model.key
    found = path if isinstance(path, FoundCheckpoint) else find_to_load(path, weights_only)
    if found.metadata is not None:
        saved_as = load_targets.key_of_trainers_model(found.metadata) if in_list else key
        load_module(module, saved_as, get_model_state_dict(module), found, strict)
        for name, optimizer in model.optimizers.items():
            load_optimizer(module, optimizer, name, found, strict)
        return restore_rest(load_metadata(found), state, model, strict, into_objects=False)
    apart = {key, "optimizer_states"} if in_list else {key, *model.optimizers}
    checkpoint = full_state.load_full(found, apart)
    _load_raw_module_state(checkpoint.pop(key), module, strict=strict)
    for number, (name, optimizer) in enumerate(model.optimizers.items()):
        saved = checkpoint["optimizer_states"][number] if in_list else checkpoint.pop(name)
        full_state.load_optimizer(module, optimizer, optimizer_state.by_name(saved, module), strict)
    return restore_rest(checkpoint, state, model, strict, into_objects=True)


def save_trainers(
    strategy: Any, checkpoint: dict[str, Any], path: Path, storage_options: Any, save_file: Callable[..., None]
) -> None:
    """Saves a checkpoint of the Trainer; see :func:`~lightning.fabric.storage.strategies.state.save_of_trainer`."""
    model = "state_dict" if strategy._save_distributed_checkpoint else None
    save_of_trainer(strategy, checkpoint, path, storage_options, save_file, model)
