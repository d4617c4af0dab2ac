"""Checkpoints of the FSDP strategies: of Fabric, whose users name what is saved, and of the Trainer."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.optim import Optimizer

from lightning.fabric.storage.collectives.errors import together_in
from lightning.fabric.storage.strategies import flat_load, flat_shards, full_state, load_targets, optimizer_state
from lightning.fabric.storage.strategies.checkpoint_load import load_flat_optimizer, load_metadata, load_module
from lightning.fabric.storage.strategies.checkpoint_place import FoundCheckpoint, find_to_load, refuse_folder
from lightning.fabric.storage.strategies.checkpoint_save import save_full, save_sharded
from lightning.fabric.storage.strategies.state import (
    DistributedModel,
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
    from lightning.fabric.strategies import FSDPStrategy


def save(
    strategy: "FSDPStrategy", path: Path, state: dict[str, Any], storage_options: Any, filters: Filters | None
) -> None:
    """Saves a checkpoint of Fabric; a collective call.

    Args:
        strategy: Fabric's strategy.
        path: A local path or a URL.
        state: One FSDP model, its optimizers, and anything else, by keys.
        storage_options: Options for the file system of a URL.
        filters: By key, a predicate on the names and values to save; for full checkpoints only.
    """
    from lightning.fabric.strategies.fsdp import _has_fsdp_modules

    is_full = not _is_sharded(strategy)
    place = place_for_fabric(strategy, path, storage_options, filters, is_full)
    if is_full:
        refuse_folder(place)
    module = distributed_model(state, _has_fsdp_modules, "FSDP").module
    tensors, rest = state_dicts(
        state,
        lambda part: module_state(strategy, part) if part is module else part.state_dict(),
        lambda optimizer: _optimizer_state(strategy, module, optimizer),
        filters,
    )
    (save_full if is_full else save_sharded)(tensors, rest, place, strategy.checkpoint_io)


def module_state(strategy: Any, module: Module) -> dict[str, Any]:
    """Returns the state of a strategy's module, in shards or gathered on rank zero; a collective call.

    Shards stay where they are, on their device, until the writer asks for them.

    Raises:
        ValueError: The module could not load it.
        RuntimeError: A full state is asked for in a training step of some rank. Every rank raises it.
    """
    from lightning.fabric.strategies import fsdp

    load_targets.refuse_unloadable(module)
    if not _is_sharded(strategy):
        with together_in(strategy, "gathering the model's state"):
            _refuse_step(module)
        with _gathered(strategy, module):
            return module.state_dict()
    state = flat_shards.module_state(module)
    if state is not None:
        return state
    context: Any = fsdp._get_sharded_state_dict_context(module)
    with context:
        return module.state_dict()


def _refuse_step(module: Module) -> None:
    """Refuses to gather in a training step: collective calls may be in flight, on each rank others."""
    if flat_shards.is_in_step(module):
        raise RuntimeError(
            "FSDP cannot gather a full state in the midst of a training step, also if an error or Ctrl-C has ended the"
            ' step. With `FSDPStrategy(state_dict_type="sharded")` there is a checkpoint after those, too; `fabric'
            " consolidate` makes one file of it."
        )


def sharded_optimizer_state(module: Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the state of an optimizer of a module in shards, as :func:`module_state`; a collective call."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    from lightning.fabric.strategies import fsdp

    state = flat_shards.optimizer_state(module, optimizer)
    if state is not None:
        return state
    context: Any = fsdp._get_sharded_state_dict_context(module)
    with context:
        return FSDP.optim_state_dict(module, optimizer)


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    """Returns what is saved of an optimizer's state: on a rank that has nothing of its parameters, not an empty one.

    That would be an entry of its own, beside those of the other ranks that are within it.
    """
    return {key: value for key, value in state.items() if key != "state" or value}


def _optimizer_state(strategy: "FSDPStrategy", module: Module, optimizer: Optimizer) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    if _is_sharded(strategy):
        return _saved(sharded_optimizer_state(module, optimizer))
    with _gathered(strategy, module):
        return FSDP.optim_state_dict(module, optimizer)


def _gathered(strategy: Any, module: Module) -> Any:
    from lightning.fabric.strategies import fsdp

    return fsdp._get_full_state_dict_context(module, world_size=strategy.world_size)


def load(
    strategy: "FSDPStrategy",
    path: Path,
    state: Module | dict[str, Any],
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Loads a checkpoint of Fabric into the objects of ``state``; a collective call.

    Args:
        strategy: Fabric's strategy.
        path: A local path or a URL.
        state: One FSDP model, its optimizers, and anything else, by keys; or the model alone.
        strict: Whether it is an error if the checkpoint lacks something.
        weights_only: The argument of that name of :func:`torch.load`.

    Returns:
        The part of the checkpoint that ``state`` does not ask for.
    """
    from lightning.fabric.strategies.fsdp import _has_fsdp_modules
    from lightning.fabric.strategies.model_parallel import _load_raw_module_state_from_path

    check_what_to_load(strategy, state)
    if isinstance(state, Module):
        found = find_to_load(path, weights_only)
        _load_raw_module_state_from_path(found, module=state, world_size=strategy.world_size, strict=strict)  # type: ignore[arg-type]
        return {}
    model = distributed_model(state, _has_fsdp_modules, "FSDP")
    found = find_to_load(path, weights_only)
    if not found.is_full:
        return restore_rest(_load_sharded(model, found, strict), state, model, strict, into_objects=False)
    checkpoint = _load_full(model.module, model.key, found, strategy.world_size, strict)
    states = ((optimizer, checkpoint.pop(key)) for key, optimizer in model.optimizers.items())
    _load_optimizers(model.module, states, strategy.world_size)
    return restore_rest(checkpoint, state, model, strict, into_objects=True)


def save_trainers(
    strategy: Any, checkpoint: dict[str, Any], path: Path, storage_options: Any, save_file: Callable[..., None]
) -> None:
    """Saves a checkpoint of the Trainer; see :func:`~lightning.fabric.storage.strategies.state.save_of_trainer`."""
    model = "model" if _is_sharded(strategy) else None
    if model is not None and "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [_saved(state) for state in checkpoint["optimizer_states"]]
    save_of_trainer(strategy, checkpoint, path, storage_options, save_file, model)


def load_trainers(strategy: Any, path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Loads a checkpoint of the Trainer into the strategy's model and, to go on training, its optimizers.

    Args:
        strategy: The Trainer's strategy.
        path: A local path or a URL.
        weights_only: The argument of that name of :func:`torch.load`.

    Returns:
        The checkpoint without the model and, if it is sharded, without the optimizers.
    """
    found = find_to_load(path, weights_only)
    module, strict = strategy.model, strategy.lightning_module.strict_loading
    is_fitting = strategy.lightning_module.trainer.state.fn == "fit"
    if found.metadata is not None:
        own = {f"optimizer_{number}": each for number, each in enumerate(strategy.optimizers)} if is_fitting else {}
        key = load_targets.key_of_trainers_model(found.metadata)
        return _load_sharded(DistributedModel(key, module, own), found, strict)
    checkpoint = _load_full(module, "state_dict", found, strategy.world_size, strict)
    states = checkpoint.get("optimizer_states")
    if states is not None and is_fitting:
        if len(states) != len(strategy.optimizers):
            raise RuntimeError(
                f"The checkpoint has the states of {len(states)} optimizers, and you have configured"
                f" {len(strategy.optimizers)} optimizers. Configure as many, or take the states out of the checkpoint."
            )
        _load_optimizers(module, zip(strategy.optimizers, states, strict=True), strategy.world_size)
    return checkpoint


def _is_sharded(strategy: Any) -> bool:
    if strategy._state_dict_type not in ("sharded", "full"):
        raise ValueError(f"Unknown state_dict_type: it is 'sharded' or 'full', and not {strategy._state_dict_type!r}")
    return bool(strategy._state_dict_type == "sharded")


def _load_sharded(model: DistributedModel, found: FoundCheckpoint, strict: bool) -> dict[str, Any]:
    """Loads model and optimizers from a sharded checkpoint; returns the rest of it."""
    from lightning.fabric.strategies import fsdp

    module = model.module
    if not flat_load.load(module, model.key, model.optimizers, found, strict):
        context: Any = fsdp._get_sharded_state_dict_context(module)
        with context:
            own = module.state_dict()
            load_module(module, model.key, own, found, strict)
            for key, optimizer in model.optimizers.items():
                load_flat_optimizer(module, optimizer, own, key, found)
    rest: dict[str, Any] = load_metadata(found)
    return rest


def _load_full(module: Module, key: str, found: FoundCheckpoint, world_size: int, strict: bool) -> dict[str, Any]:
    """Loads the model from a full checkpoint; returns the rest of it, in host memory."""
    from lightning.fabric.strategies.model_parallel import _load_raw_module_state

    checkpoint = full_state.load_full(found)
    _load_raw_module_state(checkpoint.pop(key), module=module, world_size=world_size, strict=strict)
    rest: dict[str, Any] = full_state.filled_together(checkpoint, found)
    return rest


def _load_optimizers(module: Module, states: Iterable[tuple[Optimizer, Any]], world_size: int) -> None:
    """Loads into each optimizer its full state, which every rank has."""
    from lightning.fabric.strategies import fsdp

    context: Any = fsdp._get_full_state_dict_context(module, world_size=world_size, rank0_only=False)
    with context:
        for optimizer, state in states:
            optimizer_state.load_flat(module, optimizer, optimizer_state.by_name(state, module))
