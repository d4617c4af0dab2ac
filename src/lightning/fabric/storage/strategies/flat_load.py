"""Loads of sharded checkpoints straight into the flat shards of FSDP's first version, and its optimizers' local states.

A module loads the rest of its state by its own methods, which find the shards in the place of parameters. An optimizer
gets the states that the checkpoint has of its parameters, each in the layout that the parameter has on this rank.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lightning.fabric.storage.strategies import flat_shards, load_targets, optimizer_state
from lightning.fabric.storage.strategies.checkpoint_load import load_shards
from lightning.fabric.storage.strategies.flat_parts import FlatPart
from lightning.fabric.storage.strategies.flat_states import Entries, LocalStates, add_whole
from lightning.fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from lightning.fabric.storage.strategies.checkpoint_place import FoundCheckpoint


def load(
    module: nn.Module, key: str, optimizers: Mapping[str, Optimizer], found: "FoundCheckpoint", strict: bool
) -> bool:
    """Loads this rank's part of a module and its optimizers; a collective call.

    Args:
        module: The module, with FSDP modules.
        key: The module's key in the checkpoint.
        optimizers: Its optimizers by their keys there.
        found: The checkpoint, which is sharded.
        strict: Whether it is an error if the checkpoint lacks something.

    Returns:
        False on all ranks if nothing was done, for FSDP's own functions are needed.

    Raises:
        KeyError: The checkpoint does not know an optimizer, or a parameter of one.
        OSError: A rank could not read, or what it read is damaged. Every rank raises the same, with all reasons.
        RuntimeError: The checkpoint lacks something, likewise.
        ValueError: The checkpoint has a parameter, or a state of one, in another shape or type.
    """
    parts = flat_shards.parts_of(module, to_load=True)
    if parts is None:
        return False
    assert found.metadata is not None, "it is sharded"
    entries = load_targets.entries_of(found.metadata, key)
    _check(parts, entries)
    own = flat_shards.state_of(module, parts, keep_vars=True)
    load_targets.fit_module_state(own, entries, module)
    names = flat_shards.names_of(module, parts)
    saved = {name: load_targets.entries_of(found.metadata, name) for name in optimizers}
    groups = _load_groups(saved, found)
    states = {}
    for name, optimizer in optimizers.items():
        optimizer_state.add_groups(module, optimizer, groups[name], names)
        numbered = optimizer_state.Numbered.of(optimizer, groups[name], names, strict)
        states[name] = LocalStates(optimizer, numbered, parts, names, saved[name])
    load_shards({key: own, **{name: {"state": state.targets} for name, state in states.items()}}, found, strict)
    load_targets.replace_buffers(module, own)
    flat_shards.load_state(module, parts, own, strict)
    for state in states.values():
        state.put_in()
    return True


def _check(parts: Iterable[FlatPart], entries: Entries) -> None:
    """Refuses parameters that a checkpoint has in another shape, or in a type from which none is converted."""
    converted: list[str] = []
    for part in parts:
        entry = entries.get((part.name,))
        if entry is None:  # which the planner refuses, if that is not allowed
            continue
        if getattr(entry, "size", None) != part.shape:
            raise ValueError(
                f"The parameter {part.name!r} has the shape {list(part.shape)}, and in the checkpoint"
                f" {list(getattr(entry, 'size', ())) or 'none'}: is it a checkpoint of this model?"
            )
        own, saved = part.local.dtype, entry.properties.dtype
        if own == saved:
            continue
        types = f"The parameter {part.name!r} is of {own}, and in the checkpoint of {saved}"
        if not saved.is_floating_point:  # FSDP has no others
            raise ValueError(f"{types}: load it into a model of the type that it was saved with.")
        converted.append(types)
    if converted:
        others = f", as {len(converted) - 1} others" if len(converted) > 1 else ""
        rank_zero_warn(f"{converted[0]}: it is converted{others}. Is the precision the one that you want?")


def _load_groups(saved: Mapping[str, Entries], found: "FoundCheckpoint") -> dict[str, list[dict[str, Any]]]:
    """Loads the groups of all optimizers, before anything is overwritten; a collective call if there are any."""
    targets: dict[str, Any] = {}
    for key, entries in saved.items():
        if not entries:
            raise optimizer_state.unknown_optimizer(key)
        add_whole(targets.setdefault(key, {}), {path: it for path, it in entries.items() if path[0] == "param_groups"})
    if targets:
        load_shards(targets, found)
    return {key: target["param_groups"] for key, target in targets.items()}
