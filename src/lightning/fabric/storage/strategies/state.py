"""The parts of a state that is saved or loaded: a distributed model, its optimizers, and the rest."""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.nn import Module
from torch.optim import Optimizer

from lightning.fabric.storage.collectives.errors import of_rank_zero
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.strategies.checkpoint_place import locate_checkpoint, refuse_folder
from lightning.fabric.storage.strategies.checkpoint_save import save_sharded, saving_full
from lightning.fabric.utilities.types import _Stateful

Path = str | os.PathLike[str]
Filters = Mapping[str, Callable[[str, Any], bool]]


class DistributedModel(NamedTuple):
    """The one distributed model of a state, and its optimizers.

    Attributes:
        key: The model's key in the checkpoint.
        module: The model.
        optimizers: Its optimizers by their keys.
    """

    key: str
    module: Module
    optimizers: dict[str, Optimizer]


def distributed_model(
    state: Mapping[str, Any], is_distributed: Callable[[object], bool], kind: str
) -> DistributedModel:
    """Finds the one distributed model of a state.

    Args:
        state: Objects by their keys in the checkpoint.
        is_distributed: A predicate on objects: whether one is such a model.
        kind: The word for such a model, for errors.

    Raises:
        ValueError: There is none, or more than one.
    """
    found = [(key, value) for key, value in state.items() if is_distributed(value)]
    if not found:
        raise ValueError(
            f"Could not find a {kind} model in the provided checkpoint state. It has"
            f" {', '.join(map(repr, state)) or 'nothing'}, and needs the module that the strategy has set up, and its"
            " optimizers as they were set up with it."
        )
    if len(found) > 1:
        keys = ", ".join(repr(key) for key, _ in found)
        raise ValueError(
            f"Found multiple {kind} models in the given state. A checkpoint holds one, and these are {keys}: save each"
            " at its own path."
        )
    optimizers = {key: value for key, value in state.items() if isinstance(value, Optimizer)}
    return DistributedModel(*found[0], optimizers)


def state_dicts(
    state: Mapping[str, Any],
    of_module: Callable[[Module], dict[str, Any]],
    of_optimizer: Callable[[Optimizer], dict[str, Any]],
    filters: Filters | None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the states of the objects of a state.

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
        target = tensors
        if isinstance(value, Module):
            saved: Any = of_module(value)
        elif isinstance(value, Optimizer):
            saved = of_optimizer(value)
        else:
            target, saved = rest, value.state_dict() if isinstance(value, _Stateful) else value
        _apply_filter(key, dict(filters or {}), saved, target)
    return tensors, rest


def restore_rest(
    saved: dict[str, Any], state: dict[str, Any], model: DistributedModel, strict: bool, into_objects: bool
) -> dict[str, Any]:
    """Moves the rest of a checkpoint, beside a distributed model and its optimizers, into a state.

    Args:
        saved: The checkpoint without model and optimizers.
        state: Objects by their keys.
        model: The model and optimizers of ``state``, which are loaded already.
        strict: Whether it is an error if the checkpoint lacks a key.
        into_objects: Whether stateful objects load what was saved of them, rather than are replaced by it.

    Returns:
        The part of ``saved`` that ``state`` does not ask for.
    """
    from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading
    from lightning.fabric.utilities.load import _move_state_into

    keys = state.keys() - {model.key, *model.optimizers}
    _validate_keys_for_strict_loading(keys, saved.keys(), strict=strict)
    if into_objects:
        _move_state_into(source=saved, destination=state, keys=keys)
    else:
        state.update({key: saved.pop(key) for key in keys & saved.keys()})
    return saved


def check_what_to_load(strategy: Any, state: Any) -> None:
    """Refuses what a checkpoint of Fabric cannot be loaded into.

    Raises:
        ValueError: It is nothing.
        NotImplementedError: It is an optimizer alone.
    """
    name = type(strategy).__name__
    if not state:
        raise ValueError(
            f"Got {name}.load_checkpoint(..., state={state!r}), which has nothing to load into: give it a dictionary"
            " with at least the model, state={'model': model}."
        )
    if isinstance(state, Optimizer):
        raise NotImplementedError(
            f"Loading a single optimizer object from a checkpoint is not supported by {name}: give it the model and the"
            " optimizer in a dictionary."
        )


def place_for_fabric(strategy: Any, path: Path, storage_options: Any, filters: Filters | None, is_full: bool) -> Place:
    """Returns the place of a checkpoint that Fabric is about to save, which is the same on all ranks.

    Args:
        strategy: Fabric's strategy.
        path: A local path or a URL; that of rank zero counts.
        storage_options: Options for the file system of a URL.
        filters: By key, a predicate on the names and values to save.
        is_full: Whether the checkpoint is one file.

    Raises:
        NotImplementedError: There are filters for a sharded checkpoint.
    """
    if filters is not None and not is_full:
        name = type(strategy).__name__
        raise NotImplementedError(f"{name} cannot load a sharded checkpoint that was filtered: save without `filter`.")
    return locate_checkpoint(of_rank_zero(path), storage_options)


def save_of_trainer(
    strategy: Any,
    checkpoint: dict[str, Any],
    path: Path,
    storage_options: Any,
    save_file: Callable[..., None],
    model: str | None,
) -> None:
    """Saves a checkpoint of the Trainer; a collective call.

    Args:
        strategy: The Trainer's strategy.
        checkpoint: The checkpoint, of which model and optimizers are taken out if they are saved in shards.
        path: A local path or a URL; that of rank zero counts.
        storage_options: Options for the file system of a URL.
        save_file: Saves a full checkpoint on rank zero; the method that the strategy inherits.
        model: The key of the model in a sharded checkpoint; None saves a full one.
    """
    place = locate_checkpoint(of_rank_zero(path), storage_options)
    if model is not None:
        optimizers = enumerate(checkpoint.pop("optimizer_states", []))
        state = {model: checkpoint.pop("state_dict"), **{f"optimizer_{number}": each for number, each in optimizers}}
        save_sharded(state, checkpoint, place, strategy.checkpoint_io)
        return
    refuse_folder(place)
    with saving_full(place, strategy.checkpoint_io, checkpoint):
        save_file(checkpoint=checkpoint, filepath=place.raw, storage_options=storage_options)
