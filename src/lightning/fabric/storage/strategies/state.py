"""The parts of a state that is saved or loaded: a distributed model, its optimizers, and the rest."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.strategies import checkpoints
from lightning.fabric.utilities.types import _Stateful

Filters = Mapping[str, Callable[[str, Any], bool]]


def distributed_model(
    state: Mapping[str, Any], is_distributed: Callable[[object], bool], kind: str
) -> tuple[str, Module]:
    """Finds the one distributed model of a state.

    Args:
        state: Objects by their keys in the checkpoint.
        is_distributed: Tells whether an object is such a model.
        kind: The word for such a model, for errors.

    Returns:
        The model's key, and the model.

    Raises:
        ValueError: There is none, or more than one.
    """
    found = [(key, value) for key, value in state.items() if is_distributed(value)]
    if not found:
        raise ValueError(
            f"Could not find a {kind} model among {', '.join(map(repr, state)) or 'nothing'}. The state of a checkpoint"
            " needs the module that the strategy has set up, and its optimizers as they were set up with it."
        )
    if len(found) > 1:
        keys = ", ".join(repr(key) for key, _ in found)
        raise ValueError(f"Found multiple {kind} models: {keys}. A checkpoint holds one; give each its own path.")
    return found[0]


def optimizers_in(state: Mapping[str, Any]) -> dict[str, Optimizer]:
    """Returns the optimizers of a state."""
    return {key: value for key, value in state.items() if isinstance(value, Optimizer)}


def state_dicts(
    state: Mapping[str, Any],
    of_module: Callable[[Module], dict[str, Any]],
    of_optimizer: Callable[[Optimizer], dict[str, Any]],
    filters: Filters | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Asks each object of a state for what is saved of it.

    Args:
        state: Objects by their keys in the checkpoint.
        of_module: Returns the state of a module.
        of_optimizer: Returns the state of an optimizer.
        filters: By key, a predicate on the names and values to save.

    Returns:
        The states of modules and optimizers, and the rest.
    """
    from lightning.fabric.strategies.strategy import _apply_filter

    tensors: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Module):
            _apply_filter(key, dict(filters or {}), of_module(value), tensors)
        elif isinstance(value, Optimizer):
            _apply_filter(key, dict(filters or {}), of_optimizer(value), tensors)
        else:
            saved = value.state_dict() if isinstance(value, _Stateful) else value
            _apply_filter(key, dict(filters or {}), saved, rest)
    return tensors, rest


def restore_rest(
    saved: dict[str, Any], state: dict[str, Any], loaded: Iterable[str], strict: bool, into_objects: bool
) -> dict[str, Any]:
    """Moves from a checkpoint into a state what is neither a distributed model nor an optimizer.

    Args:
        saved: The checkpoint without model and optimizers.
        state: Objects by their keys.
        loaded: The keys of model and optimizers.
        strict: Whether it is an error if the checkpoint lacks a key.
        into_objects: Whether stateful objects load what was saved of them, rather than are replaced by it.

    Returns:
        What the state does not ask for.
    """
    from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading
    from lightning.fabric.utilities.load import _move_state_into

    keys = state.keys() - set(loaded)
    _validate_keys_for_strict_loading(keys, saved.keys(), strict=strict)
    if into_objects:
        _move_state_into(source=saved, destination=state, keys=keys)
    else:
        state.update({key: saved.pop(key) for key in keys & saved.keys()})
    return saved


def no_checkpoint(path: str | os.PathLike[str]) -> ValueError:
    """Returns the error for a path at which there is neither a sharded checkpoint nor a file."""
    return ValueError(
        f"The path {str(path)!r} does not point to a valid checkpoint: it is neither a folder of a sharded checkpoint"
        " nor a file with a full one."
    )


def refuse_folder(place: Place) -> None:
    """Raises if a folder that is no checkpoint keeps a full state from being saved as a file.

    Raises:
        IsADirectoryError: There is one.
    """
    if checkpoints.is_folder_in_the_way(place):
        raise IsADirectoryError(f"The checkpoint path exists and is a directory: {place}")


def save_of_trainer(
    strategy: Any,
    checkpoint: dict[str, Any],
    path: str | os.PathLike[str],
    storage_options: Any,
    save_full: Callable[..., None],
    model: str | None,
) -> None:
    """Saves a checkpoint of the Trainer; a collective call.

    Args:
        strategy: The Trainer's strategy.
        checkpoint: The checkpoint, of which model and optimizers are taken out if they are saved in shards.
        path: Where to.
        storage_options: As for :func:`~lightning.fabric.storage.strategies.checkpoints.locate_checkpoint`.
        save_full: Saves a full checkpoint on rank zero; the method that the strategy inherits.
        model: The key of the model in a sharded checkpoint; None saves a full one.
    """
    place = checkpoints.locate_checkpoint(strategy.broadcast(path), storage_options)
    if model is not None:
        optimizers = enumerate(checkpoint.pop("optimizer_states", []))
        state = {model: checkpoint.pop("state_dict"), **{f"optimizer_{number}": each for number, each in optimizers}}
        checkpoints.save_sharded(state, checkpoint, place, strategy.checkpoint_io)
        return
    refuse_folder(place)
    with checkpoints.saving_full(place, strategy.checkpoint_io, checkpoint):
        save_full(checkpoint=checkpoint, filepath=place.raw, storage_options=storage_options)
