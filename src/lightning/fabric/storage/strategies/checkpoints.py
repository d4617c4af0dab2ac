"""What the FSDP and model-parallel strategies do with a checkpoint's place: a folder of shards, or one full file.

A sharded checkpoint is what torch.distributed.checkpoint makes, and
:mod:`~lightning.fabric.storage.sharded.metadata_file` says when it is complete. Folders of stock Lightning load here,
and ours load there. On an object store a full file and a folder can have the same name: while both exist, the folder
counts.
"""

import dataclasses
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightning.fabric.storage.archives.load import load_bytes, load_file, not_found
from lightning.fabric.storage.background.pending import drain
from lightning.fabric.storage.background.saver import saver_of
from lightning.fabric.storage.collectives.errors import (
    failures_of_ranks,
    from_rank_zero,
    is_rank_zero,
    together,
    unseen_explained,
)
from lightning.fabric.storage.own_plugins import saves_at_path
from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.paths.remove import remove_folder
from lightning.fabric.storage.paths.replace import remove_leftovers
from lightning.fabric.storage.save_report import reported
from lightning.fabric.storage.sharded.describable import is_sized
from lightning.fabric.storage.strategies import extra_state, load_targets, optimizer_state
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_4

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

_T = TypeVar("_T")


def locate_checkpoint(path: AnyPath, options: Mapping[str, Any] | None = None) -> Place:
    """As :func:`~lightning.fabric.storage.paths.location.locate`, for a strategy that saves with every rank.

    Raises:
        TypeError: ``options`` is not a mapping.
        NotImplementedError: ``path`` is a URL, and PyTorch is older than 2.4, with which this was never tried.
    """
    place = locate(path, options)
    if not place.is_local and not _TORCH_GREATER_EQUAL_2_4:
        raise NotImplementedError(
            f"Checkpoints of FSDP and ModelParallel on a remote file system need PyTorch 2.4 or newer, and this is"
            f" {torch.__version__}: upgrade PyTorch, or use a local path instead of {place}."
        )
    return place


@dataclasses.dataclass(frozen=True)
class FoundCheckpoint(os.PathLike[str]):
    """What was at a path when a load began, and stands for the path until the load ends.

    Attributes:
        place: The place.
        metadata: Of a complete sharded checkpoint; None if that is not what was found.
        is_full: Whether a file was found.
        weights_only: What the load was asked for, as for :func:`torch.load`. Functions of Lightning's that are given
            nothing but a path find it here.
    """

    place: Place
    metadata: "Metadata | None" = None
    is_full: bool = False
    weights_only: bool | None = None

    def __fspath__(self) -> str:
        return self.place.raw

    def __str__(self) -> str:
        return str(self.place)


def find_checkpoint(path: AnyPath, weights_only: bool | None = None) -> FoundCheckpoint:
    """Looks what there is to load when all saves on their way have ended; a collective call, in which rank zero looks.

    A checkpoint that is replaced afterwards makes the load fail, but not mix the old one and the new one.

    Raises:
        FileNotFoundError: There is a sharded checkpoint of which something is missing.
        OSError: The store did not answer, or the checkpoint's metadata is damaged. Every rank raises it.
    """
    from lightning.fabric.storage.sharded import metadata_file

    place = locate_checkpoint(path)
    with together(f"waiting for what is saved before {place} is loaded"):
        drain()
    own: list[Metadata] = []

    def look() -> tuple[bytes | None, bool]:
        try:
            metadata, content = metadata_file.read_metadata(place)
        except FileNotFoundError:
            if place.is_file():
                return None, True
            if metadata_file.is_begun(place):
                raise
            return None, False
        own.append(metadata)
        return content, False

    # its bytes, for of a large job the metadata are a million objects
    content, is_full = from_rank_zero(look, f"loading {place}")
    if content is None:
        return FoundCheckpoint(place, None, is_full, weights_only)
    metadata = own[0] if own else metadata_file.parse_metadata(content, place)
    return FoundCheckpoint(place, metadata, weights_only=weights_only)


def find_to_load(path: AnyPath, weights_only: bool | None = None) -> FoundCheckpoint:
    """As :func:`find_checkpoint`, where something has to be; a collective call.

    Raises:
        FileNotFoundError: There is nothing, or an incomplete sharded checkpoint. Every rank raises it.
    """
    found = find_checkpoint(path, weights_only)
    if found.metadata is None and not found.is_full:
        doing = f"loading {found.place}"
        if from_rank_zero(lambda: found.place.kind(), doing) == "nothing":
            raise not_found(found.place)
    return found


def is_sharded_checkpoint(path: AnyPath) -> bool:
    """Tells whether there is a folder of shards: any part, or a complete one if ``path`` is a found checkpoint."""
    if isinstance(path, FoundCheckpoint):
        return path.metadata is not None
    from lightning.fabric.storage.sharded import metadata_file

    return metadata_file.is_begun(locate(path))


def is_full_checkpoint(path: AnyPath) -> bool:
    """Tells whether there is a file that could hold a full state."""
    return path.is_full if isinstance(path, FoundCheckpoint) else locate(path).is_file()


def is_folder_in_the_way(place: Place) -> bool:
    """Tells whether a folder that is no checkpoint keeps a full state from being saved as a file."""
    # in this order: rank zero may be replacing shards by a file at this moment
    return not place.shares_names() and not is_sharded_checkpoint(place) and place.is_folder()


def set_up(checkpoint_io: "CheckpointIO") -> None:
    """Prepares a strategy's plugin for sharded saves; a collective call, when the process group has been made."""
    if (saver := saver_of(checkpoint_io)) is not None:
        saver.set_up()


def save_sharded(
    state: dict[str, Any], meta: dict[str, Any] | None, path: AnyPath, checkpoint_io: "CheckpointIO | None" = None
) -> None:
    """Saves a sharded checkpoint, whole or not at all; a collective call.

    Args:
        state: The model and optimizer state of this rank. Tensors of an accelerator are copied piece by piece.
        meta: What belongs to the checkpoint beside that; that of rank zero is saved.
        path: The checkpoint's folder. What is there, be it a folder or a file, is replaced when all ranks have
            succeeded.
        checkpoint_io: The strategy's plugin. If it saves in the background, so does this, and returns when the state
            has been copied to host memory.

    Raises:
        OSError: A rank could not write. Every rank raises the same, with the reasons of all.
        RuntimeError: A rank could not save for another reason, likewise.
        ValueError: ``meta`` has what cannot be saved of rank zero alone, likewise.
    """
    from lightning.fabric.storage.collectives.rank_group import RankGroup
    from lightning.fabric.storage.sharded.save_planner import PlanCache, Shard
    from lightning.fabric.storage.sharded.writer import ShardWriter

    place = locate_checkpoint(path)
    extra_state.refuse_parts(_users(meta or {}), place)
    if (saver := saver_of(checkpoint_io)) is not None:
        saver.save_sharded(state, meta, place)
        return
    group = RankGroup()
    with reported(place), failures_of_ranks("save", place, group):
        ShardWriter(place, group).save(lambda: Shard.of(state, meta, group), PlanCache())


def load_shards(
    state: dict[str, Any],
    path: AnyPath,
    strict: bool = True,
    weights_only: bool | None = None,
    module: "torch.nn.Module | None" = None,
) -> None:
    """Loads into the tensors of ``state`` what this rank keeps of it; a collective call.

    Args:
        state: What to load, by the names that it has in the checkpoint.
        path: The checkpoint's folder.
        strict: Whether it is an error if the checkpoint lacks something.
        weights_only: As for :func:`torch.load`, of what is no tensor.
        module: If ``state`` is that of a module, the module. What the checkpoint has of it in another shape replaces
            what is in ``state``.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        OSError: A rank could not read, or what it read is damaged. Every rank raises the same, with all reasons.
        RuntimeError: The checkpoint is not one of ``state``, likewise.
    """
    from torch.distributed import checkpoint as dcp

    planner = dcp.DefaultLoadPlanner() if strict else dcp.DefaultLoadPlanner(allow_partial_load=True)
    place, reader = _reader(path, weights_only)
    with failures_of_ranks("load", place, reader):
        if module is not None:
            for key, values in state.items():
                load_targets.fit_module_state(values, load_targets.entries_of(reader.read_metadata(), key), module)
        getattr(dcp, "load", dcp.load_state_dict)(state, storage_reader=reader, planner=planner)
    if module is not None:
        for values in state.values():
            load_targets.replace_buffers(module, values)


def load_optimizer(
    module: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
    key: str,
    path: AnyPath,
    strict: bool = True,
    weights_only: bool | None = None,
) -> None:
    """Loads an optimizer's state, which is called ``key`` in the checkpoint, into the optimizer; a collective call.

    Args:
        module: What is optimized. Its parameters are DTensors.
        optimizer: The optimizer.
        key: What it is called.
        path: The checkpoint's folder.
        strict: Whether it is an error if the checkpoint does not know a parameter of the optimizer.
        weights_only: As for :func:`load_shards`.

    Raises:
        KeyError: It is, or the checkpoint knows nothing of this optimizer.
        OSError: As for :func:`load_shards`.
    """
    _, metadata = _sharded(path)
    state = {key: optimizer_state.room_for(module, optimizer, metadata, key)}
    load_shards(state, path, weights_only=weights_only)
    optimizer_state.place(module, optimizer, state[key], strict)


def load_flat_optimizer(
    module: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
    model_state: dict[str, Any],
    key: str,
    path: AnyPath,
    weights_only: bool | None = None,
) -> None:
    """As :func:`load_optimizer`, for the parameters of FSDP; in the context of its sharded state.

    Args:
        module: What is optimized.
        optimizer: The optimizer.
        model_state: Of the module, which says how the parameters are sharded.
        key: What the optimizer is called in the checkpoint.
        path: The checkpoint's folder.
        weights_only: As for :func:`load_shards`.
    """
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

    place, reader = _reader(path, weights_only)
    sized = {name: value for name, value in model_state.items() if isinstance(value, torch.Tensor) and is_sized(value)}
    with failures_of_ranks("load", place, reader):
        state = dict(load_sharded_optimizer_state_dict(sized, key, reader))
    if key not in state:
        raise KeyError(optimizer_state.unknown(key))
    # of an optimizer without a state, stock Lightning and older releases of this saved nothing but the groups
    optimizer_state.place_flat(module, optimizer, {"state": {}, **state[key]})


def _reader(path: AnyPath, weights_only: bool | None) -> tuple[Place, Any]:
    from lightning.fabric.storage.sharded.reader import ShardReader

    place, metadata = _sharded(path)
    return place, ShardReader(place, metadata, weights_only)


def _sharded(path: AnyPath) -> tuple[Place, "Metadata"]:
    found = path if isinstance(path, FoundCheckpoint) else find_checkpoint(path)
    if found.metadata is None:
        raise FileNotFoundError(f"There is no sharded checkpoint at {found}")
    return found.place, found.metadata


def load_metadata(path: AnyPath, weights_only: bool | None = None) -> Any:
    """Loads what belongs to a sharded checkpoint beside model and optimizer, into host memory; a collective call.

    Raises:
        OSError: Rank zero could not read it, or it is damaged. Every rank raises it.
    """
    from lightning.fabric.storage.sharded import metadata_file

    place, metadata = _sharded(path)
    content = from_rank_zero(lambda: metadata_file.read_meta(place, metadata), f"loading {place}")
    if content is None:
        return {}
    # of what the file's author had on an accelerator, nothing belongs on that of this rank
    return load_bytes(io.BytesIO(content), "cpu", weights_only)


def save_full(
    state: dict[str, Any],
    place: Place,
    checkpoint_io: "CheckpointIO | None" = None,
    objects: Mapping[str, Any] | None = None,
) -> None:
    """Saves a full state, which rank zero has, as one file with the strategy's plugin; a collective call.

    Args:
        state: The state.
        place: Where to.
        checkpoint_io: As for :func:`save_sharded`.
        objects: What ``state`` is of, by the same names.

    Raises:
        OSError: Rank zero could not write. Every rank raises it.
        ValueError: As for :func:`save_sharded`.
    """
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    plugin = checkpoint_io or TorchCheckpointIO()
    gathered = (torch.nn.Module, torch.optim.Optimizer)
    names = {name for name, value in (objects or {}).items() if not isinstance(value, gathered)}
    with saving_full(place, plugin, {name: value for name, value in state.items() if name in names}):
        if is_rank_zero():
            plugin.save_checkpoint(state, place.raw, storage_options=place.options or None)


def load_full(path: AnyPath, weights_only: bool | None = None) -> Any:
    """Loads a full state into host memory; a local file is mapped rather than read."""
    return load_file(path, map_location="cpu", weights_only=weights_only, mmap=True)


def read_together(path: AnyPath, read: Callable[[], _T]) -> _T:
    """Returns what ``read`` reads from a full file on each rank; a collective call that all leave together.

    Raises:
        OSError: A rank could not read. Every rank raises it.
    """
    place = locate(path)
    with together(f"loading {place}"), unseen_explained(place):
        return read()


@contextmanager
def saving_full(place: Place, checkpoint_io: "CheckpointIO", checkpoint: Mapping[str, Any]) -> Iterator[None]:
    """For a body that saves a full state as one file on rank zero, with ``checkpoint_io``; a collective call.

    A sharded checkpoint in its place goes when the body has succeeded, and every rank learns if it has not. If the
    plugin saves in the background, the shards go when it has done so.

    Args:
        place: Where it saves.
        checkpoint_io: What it saves with.
        checkpoint: What belongs to it beside model and optimizers, and the Trainer's states of these.

    Raises:
        ValueError: As for :func:`save_sharded`.
        OSError: On the other ranks, if the body failed on rank zero; of the same type where it is a built-in one.
    """
    extra_state.refuse_parts(_users(checkpoint), place)
    with together(f"saving {place}"):
        yield
        if is_rank_zero():
            saver = saver_of(checkpoint_io)
            if saver is None:
                _remove_what_a_file_replaces(place, checkpoint_io)
            else:
                saver.remove(place, lambda: _remove_what_a_file_replaces(place, checkpoint_io), is_partial=True)


def _users(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Of a Trainer's checkpoint what others than itself may have put there."""
    return {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states", "loops")}


def _remove_what_a_file_replaces(place: Place, checkpoint_io: "CheckpointIO") -> None:
    if not saves_at_path(checkpoint_io) and not place.is_file():
        return  # the folder may be what the plugin has saved
    if place.shares_names() and _has_shards_to_replace(place):  # elsewhere the file took the place of the shards
        try:
            with questions_named(place, "remove"):
                remove_folder(place)
        except Exception as error:
            raise OSError(
                f"{place} is saved, but the sharded checkpoint of that name could not be removed, and is"
                f" still what would be loaded: {redact(str(error))}"
            ) from error
    remove_leftovers(place)


def _has_shards_to_replace(place: Place) -> bool:
    try:
        return is_sharded_checkpoint(place)
    except PermissionError:  # what S3 answers about a missing object to those who may write, but not list
        return False
