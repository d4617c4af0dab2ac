"""What the FSDP and model-parallel strategies do with a checkpoint's place: a folder of shards, or one full file.

A sharded checkpoint is what torch.distributed.checkpoint makes, ``.metadata`` and the ranks' ``*.distcp`` files, with
``meta.pt`` beside them for all that is neither model nor optimizer. Folders of stock Lightning load here, and ours load
there. On an object store a full file and a folder can have the same name: while both exist, the folder counts.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning.fabric.storage.load import load_file
from lightning.fabric.storage.location import (
    Location,
    display,
    is_file,
    join,
    locate,
    make_folder,
    remove_file,
    remove_folder,
    rename_folder,
    shares_names,
)
from lightning.fabric.storage.location import is_folder as is_folder
from lightning.fabric.storage.save import save_file
from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_4

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader

_METADATA_FILENAME = "meta.pt"


def locate_checkpoint(path: str | os.PathLike[str]) -> Location:
    """As :func:`~lightning.fabric.storage.location.locate`, for a strategy that saves with every rank.

    Raises:
        NotImplementedError: ``path`` is a URL, and PyTorch is older than 2.4, whose torch.distributed.checkpoint
            cannot reach it.
    """
    location = locate(path)
    if not isinstance(location, Path) and not _TORCH_GREATER_EQUAL_2_4:
        raise NotImplementedError(
            f"Checkpoints of FSDP on a remote file system need PyTorch 2.4 or newer, and this is {torch.__version__}:"
            f" upgrade PyTorch, or use a local path instead of {display(location)}."
        )
    return location


def is_sharded_checkpoint(location: Location) -> bool:
    """Whether there is a complete folder of shards."""
    return is_file(join(locate(location), _METADATA_FILENAME))


def is_full_checkpoint(location: Location) -> bool:
    """Whether there is a file that could hold a full state."""
    return is_file(locate(location))


def make_shard_folder(location: Location) -> None:
    """Prepares for shards; every rank calls it. A file of that name makes room, where it has to."""
    if not shares_names(location) and is_file(location):
        try:
            remove_file(location)
        except OSError:
            if is_file(location):  # else another rank was quicker
                raise
    make_folder(location)


def save_shards(state: dict[str, Any], location: Location) -> None:
    """Saves the model and optimizer state of this rank; a collective call.

    Raises:
        OSError: A rank could not write. Every rank raises it, with the reasons of all.
    """
    from torch.distributed.checkpoint import CheckpointException, save

    if isinstance(location, Path):
        save(state, checkpoint_id=location)
        return
    from lightning.fabric.storage.sharded import ShardWriter

    try:
        save(state, storage_writer=ShardWriter(location))
    except CheckpointException as error:  # a BaseException, which user code does not expect
        raise _failure("save", location, error) from error


def load_shards(state: dict[str, Any], location: Location) -> None:
    """Loads into the tensors of ``state`` what this rank keeps of it; a collective call.

    Raises:
        OSError: A rank could not read. Every rank raises it, with the reasons of all.
    """
    from torch.distributed.checkpoint import CheckpointException, load

    if isinstance(location, Path):
        load(state, checkpoint_id=location)
        return
    try:
        load(state, storage_reader=shard_reader(location))
    except CheckpointException as error:
        raise _failure("load", location, error) from error


def shard_reader(location: Location) -> "StorageReader":
    """What torch.distributed.checkpoint reads the shards with."""
    if isinstance(location, Path):
        from torch.distributed.checkpoint import FileSystemReader

        return FileSystemReader(location)
    from lightning.fabric.storage.sharded import ShardReader

    return ShardReader(location)


def save_metadata(metadata: dict[str, Any], location: Location) -> None:
    """Saves what belongs to a sharded checkpoint beside its shards, as the last of it; for one rank."""
    save_file(metadata, join(location, _METADATA_FILENAME))
    if shares_names(location):  # a full file that the folder replaces; elsewhere it had to go before
        remove_file(location)


def load_metadata(location: Location, weights_only: bool | None = None) -> Any:
    """Loads what :func:`save_metadata` saved."""
    return load_file(join(location, _METADATA_FILENAME), weights_only=weights_only)


def save_full(state: dict[str, Any], location: Location) -> None:
    """Saves a full state as one file; for one rank."""
    with replacing_shards(location):
        save_file(state, location)


def load_full(location: Location, weights_only: bool | None = None) -> Any:
    """Loads a full state into host memory; a local file is mapped rather than read."""
    if isinstance(location, Path):
        return torch.load(location, mmap=True, map_location="cpu", weights_only=weights_only)
    return load_file(location, map_location="cpu", weights_only=weights_only)


@contextmanager
def replacing_shards(location: Location, on_this_rank: bool = True) -> Iterator[None]:
    """Saves a file in the place of a sharded checkpoint, which goes when the body has succeeded.

    Args:
        location: Of the checkpoint. Where there is no folder of shards, nothing happens.
        on_this_rank: Whether this is the rank that saves.
    """
    if not on_this_rank or not is_sharded_checkpoint(location):
        yield
    elif shares_names(location):
        yield
        remove_folder(location)
    else:
        aside = locate(f"{os.fspath(location).rstrip('/')}.{secrets.token_hex(6)}.old")
        rename_folder(location, aside)
        try:
            yield
        except BaseException:
            rename_folder(aside, location)
            raise
        remove_folder(aside)


def _failure(verb: str, location: Location, error: BaseException) -> OSError:
    reasons = {rank: failure[0] for rank, failure in sorted(getattr(error, "failures", {}).items())}
    told = "; ".join(
        f"rank {rank}: {type(reason).__name__}: {display(str(reason))}" for rank, reason in reasons.items()
    )
    return OSError(f"Could not {verb} the sharded checkpoint {display(location)}: {told or error}")
