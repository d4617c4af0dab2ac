"""The targets of a load: the model's own tensors where the checkpoint fits into them, else new ones.

torch.distributed.checkpoint loads into the tensors that there are. A module may have others than when it was saved: a
buffer that has grown, a list of tensors, an optimizer's state that does not exist yet.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning.fabric.storage.sharded.describable import is_distributed

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

#: The attributes in which wrappers keep a module.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def clean_name(name: str) -> str:
    """Returns the name of a parameter, buffer or module without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def entries_of(metadata: "Metadata", key: str) -> dict[tuple[Any, ...], Any]:
    """Returns the entries of a checkpoint below a key, by the names and numbers that lead to each."""
    described = metadata.state_dict_metadata
    paths = metadata.planner_data or {}
    return {paths[name][1:]: thing for name, thing in described.items() if name in paths and paths[name][0] == key}


def key_of_trainers_model(metadata: "Metadata") -> str:
    """Returns the model's key in a sharded checkpoint of the Trainer: FSDP has another one than ModelParallel."""
    keys = {path[0] for path in (metadata.planner_data or {}).values()}
    return "model" if "model" in keys else "state_dict"


def fit_module_state(state: dict[str, Any], entries: Mapping[tuple[Any, ...], Any], module: nn.Module) -> None:
    """Adapts a module's state to its entries in a checkpoint.

    Args:
        state: The module's state by names; an entry that the checkpoint does not fit into is replaced.
        entries: The module's entries in the checkpoint, from :func:`entries_of`.
        module: The module. Entries that it lacks are added where it loads them itself.
    """
    by_name: dict[str, dict[tuple[Any, ...], Any]] = {}
    for path, thing in entries.items():
        by_name.setdefault(path[0], {})[path] = thing
    parts = parts_of(module)
    for name, things in by_name.items():
        if name in state:
            if not _fits(state[name], name, things):
                state[name] = _room(things, state[name])
        elif loads_itself(parts, name):
            state[name] = _room(things, None)


def _fits(own: Any, name: str, things: Mapping[tuple[Any, ...], Any]) -> bool:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, paths = flatten_state_dict({name: own})
    return {paths[key]: None for key in flat}.keys() == things.keys() and all(
        _takes(value, things[paths[key]]) for key, value in flat.items()
    )


def _takes(own: Any, thing: Any) -> bool:
    """Returns whether a value can take an entry. A distributed one of another size can: torch explains the error."""
    size = getattr(thing, "size", None)
    if size is None or not isinstance(own, Tensor):
        return size is None and not isinstance(own, Tensor)
    if is_distributed(own):
        return True
    return is_writable(own) and own.size() == size


def _room(things: Mapping[tuple[Any, ...], Any], own: Any) -> Any:
    from torch.distributed.checkpoint._nested_dict import set_element

    device = own.device if isinstance(own, Tensor) and not own.is_meta else torch.device("cpu")
    holder: dict[str, Any] = {}
    for path, thing in things.items():
        is_tensor = hasattr(thing, "size")
        room = torch.empty(thing.size, dtype=thing.properties.dtype, device=device) if is_tensor else None
        set_element(holder, ("value", *path[1:]), room)
    return holder["value"]


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """Returns all modules in a module, by the names that they have in checkpoints."""
    return {clean_name(path): part for path, part in module.named_modules()}


def loads_itself(parts: Mapping[str, nn.Module], name: str) -> bool:
    """Returns whether a part of a module may load a tensor that it lacks now, such as a buffer that comes later."""
    owner, _, own = name.rpartition(".")
    part = parts.get(owner)
    if part is None:
        return False
    return own in part._buffers or type(part)._load_from_state_dict is not nn.Module._load_from_state_dict


def is_strided(tensor: Tensor) -> bool:
    """Returns whether a tensor has a size, and an address for each value."""
    return not tensor.is_nested and tensor.layout == torch.strided and not tensor.is_quantized


def is_writable(tensor: Tensor) -> bool:
    """Returns whether values can be written into a tensor: it has memory, and no two values share it."""
    is_addressed = not is_lazy(tensor) and not tensor.is_nested and tensor.layout == torch.strided
    return is_addressed and torch._debug_has_internal_overlap(tensor) != 1


def replace_buffers(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Replaces the buffers of a module into which nothing can be copied, before it loads its state.

    Args:
        module: The module.
        state: The state that it is about to load, by names.
    """
    for name, part, own in _buffers_of(module):
        value, buffer = state.get(name), part._buffers[own]
        if isinstance(value, Tensor) and buffer is not None and not _is_copied(buffer):
            part._buffers[own] = value.detach().clone().to(buffer.device)


def _buffers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields for each buffer its name in checkpoints, the module that has it, and its name there."""
    for path, part in parts_of(module).items():
        for own in part._buffers:
            yield f"{path}.{own}" if path else own, part, own


def _is_copied(buffer: Tensor) -> bool:
    return is_distributed(buffer) or buffer.layout == torch.sparse_coo or is_writable(buffer)


def refuse_unloadable(module: nn.Module) -> None:
    """Refuses to save a module with a buffer that could not be loaded.

    Raises:
        ValueError: There is such a buffer; the message names it.
    """
    for name, part, own in _buffers_of(module):
        buffer = part._buffers[own]
        if buffer is None or own in part._non_persistent_buffers_set:
            continue
        if buffer.is_nested:
            raise ValueError(
                f"The buffer {name!r} is a nested tensor, which a module cannot load. Register its `values()` and"
                " `offsets()`, or make it non-persistent."
            )
        if buffer.is_meta:
            raise ValueError(
                f"The buffer {name!r} is on the meta device, so that there is nothing to save of it. Give it"
                " values, or make it non-persistent."
            )
