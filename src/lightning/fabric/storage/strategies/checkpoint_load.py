"""Loads of sharded checkpoints, of this or of stock Lightning, by the FSDP and model-parallel strategies."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning.fabric.storage.archives.load import load_bytes
from lightning.fabric.storage.collectives.errors import failures_of_ranks, from_rank_zero
from lightning.fabric.storage.paths.location import AnyPath
from lightning.fabric.storage.sharded.describable import is_sized
from lightning.fabric.storage.strategies import load_targets, optimizer_state
from lightning.fabric.storage.strategies.checkpoint_place import FoundCheckpoint, find_checkpoint

if TYPE_CHECKING:
    from torch.distributed.checkpoint import LoadPlanner, Metadata
    from torch.nn import Module
    from torch.optim import Optimizer

    from lightning.fabric.storage.sharded.reader import ShardReader


def load_shards(state: dict[str, Any], path: AnyPath, strict: bool = True) -> None:
    """Loads this rank's part of a sharded checkpoint into the tensors of ``state``; a collective call.

    Args:
        state: The objects to load, by their keys in the checkpoint.
        path: The checkpoint's folder.
        strict: Whether it is an error if the checkpoint lacks something.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        OSError: A rank could not read, or what it read is damaged. Every rank raises the same, with all reasons.
        RuntimeError: The checkpoint is not one of ``state``, likewise.
    """
    with _reading(path) as reader:
        reader.load(state, _planner(strict))


def load_module(module: "Module", key: str, state: dict[str, Any], path: AnyPath, strict: bool) -> None:
    """Loads this rank's part of a module from a sharded checkpoint; a collective call.

    Args:
        module: The module.
        key: The module's key in the checkpoint.
        state: The module's own state. An entry that the checkpoint has in another shape is replaced.
        path: The checkpoint's folder.
        strict: Whether it is an error if the checkpoint lacks something.

    Raises:
        OSError: A rank could not read, or what it read is damaged. Every rank raises the same, with all reasons.
        RuntimeError: The checkpoint is not one of ``module``, likewise.
    """
    with _reading(path) as reader:
        load_targets.fit_module_state(state, load_targets.entries_of(reader.read_metadata(), key), module)
        reader.load({key: state}, _planner(strict))
    load_targets.replace_buffers(module, state)
    module.load_state_dict(state, strict=strict)


def load_optimizer(module: "Module", optimizer: "Optimizer", key: str, path: AnyPath, strict: bool = True) -> None:
    """Loads an optimizer's state from a sharded checkpoint into the optimizer; a collective call.

    Args:
        module: The module that is optimized, whose parameters are DTensors.
        optimizer: The optimizer.
        key: The optimizer's key in the checkpoint.
        path: The checkpoint's folder.
        strict: Whether it is an error if the checkpoint does not know a parameter of the optimizer.

    Raises:
        KeyError: It is, or the checkpoint knows nothing of this optimizer.
        OSError: A rank could not read, or what it read is damaged. Every rank raises the same, with all reasons.
    """
    found, metadata = _sharded(path)
    state = {key: optimizer_state.empty_state(module, optimizer, metadata, key)}
    load_shards(state, found)
    optimizer_state.load_by_name(module, optimizer, state[key], strict)


def load_flat_optimizer(
    module: "Module", optimizer: "Optimizer", model_state: dict[str, Any], key: str, path: AnyPath
) -> None:
    """Loads an optimizer's state for the parameters of FSDP, within the context of its sharded state.

    Args:
        module: The module that is optimized.
        optimizer: The optimizer.
        model_state: The module's state, which says how the parameters are sharded.
        key: The optimizer's key in the checkpoint.
        path: The checkpoint's folder.

    Raises:
        KeyError: The checkpoint knows nothing of this optimizer.
        OSError: A rank could not read, or what it read is damaged. Every rank raises the same, with all reasons.
    """
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

    sized = {name: value for name, value in model_state.items() if isinstance(value, torch.Tensor) and is_sized(value)}
    with _reading(path) as reader:
        state = dict(load_sharded_optimizer_state_dict(sized, key, reader))
    if key not in state:
        raise optimizer_state.unknown_optimizer(key)
    # of an optimizer without a state, stock Lightning and older releases of this saved nothing but the groups
    optimizer_state.load_flat(module, optimizer, {"state": {}, **state[key]})


def load_metadata(path: AnyPath) -> Any:
    """Loads the rest of a sharded checkpoint, beside model and optimizers, into host memory; a collective call.

    Raises:
        OSError: Rank zero could not read it, or it is damaged. Every rank raises it.
    """
    from lightning.fabric.storage.sharded import metadata_file

    found, metadata = _sharded(path)
    content = from_rank_zero(lambda: metadata_file.read_meta(found.place, metadata), f"loading {found}")
    if content is None:
        return {}
    # of what the file's author had on an accelerator, nothing belongs on that of this rank
    return load_bytes(io.BytesIO(content), "cpu", found.weights_only)


def _planner(strict: bool) -> "LoadPlanner":
    from torch.distributed.checkpoint import DefaultLoadPlanner

    return DefaultLoadPlanner(allow_partial_load=not strict)


@contextmanager
def _reading(path: AnyPath) -> "Iterator[ShardReader]":
    from lightning.fabric.storage.sharded.reader import ShardReader

    found, metadata = _sharded(path)
    reader = ShardReader(found.place, metadata, found.weights_only)
    with failures_of_ranks("load", found.place, reader):
        yield reader


def _sharded(path: AnyPath) -> "tuple[FoundCheckpoint, Metadata]":
    found = path if isinstance(path, FoundCheckpoint) else find_checkpoint(path)
    if found.metadata is None:
        raise FileNotFoundError(f"There is no sharded checkpoint at {found}")
    return found, found.metadata
