"""Loads of full states, each in one file, of which every rank of a distributed model reads no more than what it keeps.

Torch reads all but the tensors' bytes. Those are read straight into the parts of the model's parameters and of the
optimizer's state that the rank has.
"""

import logging
import os
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from lightning.fabric.storage.archives.load import load_file, weights_only_of
from lightning.fabric.storage.archives.without_tensors import load_without_tensors
from lightning.fabric.storage.collectives.errors import together, unseen_explained
from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.strategies import load_targets, optimizer_state
from lightning.fabric.storage.strategies.lazy_tensors import filled, mark_unread, read_parts
from lightning.fabric.utilities.distributed import _distributed_is_initialized

log = logging.getLogger(__name__)

_Path = str | os.PathLike[str]


def load_whole(path: _Path) -> Any:
    """Loads all of a full state into host memory; a local file is mapped rather than read."""
    return load_file(path, map_location="cpu", weights_only=weights_only_of(path), mmap=True)


def load_full(path: _Path, apart: Collection[str] | None = None) -> Any:
    """Loads a full state into host memory, but not all of it; a collective call.

    Args:
        path: The file's local path or URL, or the checkpoint that was found there.
        apart: The keys whose tensors are left to :func:`load_module` and :func:`load_optimizer`, which read what this
            rank needs of them. Until then they are on the meta device. None stands for all keys.

    Returns:
        The object in the file. If there are no other ranks, or this release of torch does not give the offsets,
        all of it is loaded.

    Raises:
        OSError: A rank could not read the file. Every rank raises it.
    """
    place = locate(path)
    if not _distributed_is_initialized() or torch.distributed.get_world_size() == 1:
        return load_whole(path)
    with together(f"loading {place}"):
        try:
            with unseen_explained(place):
                loaded = load_without_tensors(place, weights_only_of(path))
        except NotImplementedError as error:  # as of quantized tensors, which there are not without values
            log.info(f"{place} is loaded as a whole ({error})")
            loaded = None
        if loaded is None or mark_unread(loaded.obj, loaded.file) != loaded.storages:
            return load_whole(path)
    if apart is None:
        return loaded.obj
    rest = {key: value for key, value in loaded.obj.items() if key not in apart}
    return {**loaded.obj, **filled(rest)}


def load_module(state: dict[str, Any], module: torch.nn.Module, strict: bool) -> bool:
    """Loads this rank's part of a distributed module; a collective call.

    Args:
        state: The state of the module, from :func:`load_full`.
        module: The module, whose parameters are DTensors.
        strict: Whether it is an error if the module has something that ``state`` has not.

    Returns:
        False if nothing was done, for the module's own parameters do not exist yet.

    Raises:
        KeyError: ``state`` lacks something.
        OSError: A rank could not read the file. Every rank raises it.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    own = get_model_state_dict(module)
    if any(isinstance(value, Tensor) and value.is_meta for value in module.parameters()):
        state.update(filled(dict(state)))
        return False
    missing = sorted(name for name, value in own.items() if isinstance(value, Tensor) and name not in state)
    if missing and strict:
        raise KeyError(
            f"The checkpoint has no {missing[0]!r}, and lacks {len(missing)} of the model's tensors in all. Is it one"
            " of this model? To load what there is, set `strict=False`."
        )
    parts = load_targets.parts_of(module)
    wanted = {name: value for name, value in state.items() if name in own or load_targets.loads_itself(parts, name)}
    own.update(read_parts(wanted, own))
    load_targets.replace_buffers(module, own)
    module.load_state_dict(own, strict=False)  # which calls hooks; what has been read is in its place
    return True


def load_own(state: dict[str, Any], module: torch.nn.Module, strict: bool) -> dict[str, Any] | None:
    """Loads this rank's part of a module, if its parameters are DTensors; a collective call.

    Args:
        state: The state of the module, from :func:`load_full`.
        module: The module.
        strict: Whether it is an error if the module has something that ``state`` has not.

    Returns:
        The whole state, to be loaded in another way; None if all is done.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        return None if load_module(state, module, strict) else state
    if isinstance(module, FullyShardedDataParallel):
        state = filled(state)
        load_targets.replace_buffers(module, state)
    return state


def load_optimizer(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], strict: bool
) -> None:
    """Loads this rank's part of an optimizer's state; a collective call.

    Args:
        module: The module that is optimized, whose parameters are DTensors.
        optimizer: The optimizer.
        state: The state of the optimizer, from :func:`load_full`, by the names of the module's parameters.
        strict: Whether it is an error if the checkpoint does not know a parameter of the optimizer.

    Raises:
        KeyError: It is.
        OSError: A rank could not read the file. Every rank raises it.
    """
    flat = {(name, part): value for name, values in state["state"].items() for part, value in values.items()}
    target = optimizer_state.target_factory(module, optimizer)
    own = {
        path: target(*path, value.size(), value.dtype)
        for path, value in flat.items()
        if isinstance(value, Tensor) and load_targets.is_strided(value)
    }
    read: dict[str, dict[str, Any]] = {name: {} for name in state["state"]}
    for (name, part), value in read_parts(flat, own).items():
        read[name][part] = value
    groups = filled(state["param_groups"])
    optimizer_state.load_by_name(module, optimizer, {"state": read, "param_groups": groups}, strict)


def filled_together(tree: Any, path: AnyPath) -> Any:
    """Fills a collection as :func:`filled` does, from the file at ``path``; a collective call.

    Raises:
        OSError: A rank could not read. Every rank raises it.
    """
    place = locate(path)
    with together(f"loading {place}"), unseen_explained(place):
        return filled(tree)
