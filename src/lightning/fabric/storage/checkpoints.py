"""What the FSDP and model-parallel strategies do with a checkpoint's place: a folder of shards, or one full file.

A sharded checkpoint is what torch.distributed.checkpoint makes, ``.metadata`` and the ranks' ``*.distcp`` files, with
``meta.pt`` beside them for all that is neither model nor optimizer. Folders of stock Lightning load here, and ours load
there. On an object store a full file and a folder can have the same name: while both exist, the folder counts.
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning.fabric.storage.load import load_file
from lightning.fabric.storage.location import Location, beside, display, is_file, is_folder, join, locate, shares_names
from lightning.fabric.storage.namespace import make_folder, remove_file, remove_folder, rename_folder
from lightning.fabric.storage.save import save_file
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_4

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader

log = logging.getLogger(__name__)

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
            f"Checkpoints of FSDP and ModelParallel on a remote file system need PyTorch 2.4 or newer, and this is"
            f" {torch.__version__}: upgrade PyTorch, or use a local path instead of {display(location)}."
        )
    return location


def is_sharded_checkpoint(location: Location) -> bool:
    """Whether there is a complete folder of shards."""
    return is_file(join(locate(location), _METADATA_FILENAME))


def is_full_checkpoint(location: Location) -> bool:
    """Whether there is a file that could hold a full state."""
    return is_file(locate(location))


def is_folder_in_the_way(location: Location) -> bool:
    """Whether there is a folder that is no checkpoint, and keeps a full state from being saved as a file."""
    # in this order: rank zero may be replacing shards by a file at this moment
    return not shares_names(location) and not is_sharded_checkpoint(location) and is_folder(location)


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
        OSError: A rank could not write to the store. Every rank raises it, with the reasons of all.
    """
    from torch.distributed.checkpoint import save

    if isinstance(location, Path):
        save(state, checkpoint_id=location)
        return
    from lightning.fabric.storage.sharded import ShardWriter

    with _failures_of_ranks("save", location):
        save(state, storage_writer=ShardWriter(location))


def load_shards(state: dict[str, Any], location: Location) -> None:
    """Loads into the tensors of ``state`` what this rank keeps of it; a collective call.

    Raises:
        OSError: A rank could not read from the store. Every rank raises it, with the reasons of all.
    """
    from torch.distributed.checkpoint import load

    with _failures_of_ranks("load", location):
        load(state, storage_reader=_shard_reader(location))


def load_optimizer_shards(model_state: dict[str, Any], key: str, location: Location) -> dict[str, Any]:
    """Loads what this rank keeps of an optimizer's state, which is called ``key`` in the checkpoint; a collective call.

    Raises:
        OSError: As for :func:`load_shards`.
    """
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

    with _failures_of_ranks("load", location):
        return dict(load_sharded_optimizer_state_dict(model_state, key, _shard_reader(location)))


def _shard_reader(location: Location) -> "StorageReader":
    if isinstance(location, Path):
        from torch.distributed.checkpoint import FileSystemReader

        return FileSystemReader(location)
    from lightning.fabric.storage.sharded import ShardReader

    return ShardReader(location)


@contextmanager
def _failures_of_ranks(verb: str, location: Location) -> Iterator[None]:
    """Turns what torch.distributed.checkpoint raises about a store, a BaseException, into what user code expects."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        if isinstance(location, Path):  # as ever
            raise
        reasons = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
        told = (f"rank {rank}: {type(reason).__name__}: {display(str(reason))}" for rank, reason in reasons.items())
        raise OSError(f"Could not {verb} the sharded checkpoint {display(location)}: {'; '.join(told)}") from error


def save_metadata(metadata: dict[str, Any], location: Location) -> None:
    """Saves what belongs to a sharded checkpoint beside its shards, as the last of it; a collective call.

    Args:
        metadata: What rank zero has is saved.
        location: The checkpoint's folder.

    Raises:
        OSError: Rank zero could not write. Every rank raises it.
    """
    with _outcome_of_rank_zero():
        if _is_rank_zero():
            save_file(metadata, join(location, _METADATA_FILENAME))
            if shares_names(location):  # a full file that the folder replaces; elsewhere it had to go before
                _clean_up(location, remove_file)


def load_metadata(location: Location, weights_only: bool | None = None) -> Any:
    """Loads what :func:`save_metadata` saved."""
    return load_file(join(location, _METADATA_FILENAME), weights_only=weights_only)


def save_full(state: dict[str, Any], location: Location) -> None:
    """Saves a full state, which rank zero has, as one file; a collective call.

    Raises:
        OSError: Rank zero could not write. Every rank raises it.
    """
    with saving_full(location):
        if _is_rank_zero():
            save_file(state, location)


def load_full(location: Location, weights_only: bool | None = None) -> Any:
    """Loads a full state into host memory; a local file is mapped rather than read."""
    if isinstance(location, Path):
        return torch.load(location, mmap=True, map_location="cpu", weights_only=weights_only)
    return load_file(location, map_location="cpu", weights_only=weights_only)


@contextmanager
def saving_full(location: Location) -> Iterator[None]:
    """For a body that saves a full state as one file on rank zero; a collective call.

    A sharded checkpoint in its place goes when the body has succeeded, and every rank learns if it has not.

    Raises:
        OSError: On the other ranks, if the body failed on rank zero; of the same type where it is a built-in one.
    """
    with _outcome_of_rank_zero():
        if not _is_rank_zero() or not _has_shards_to_replace(location):
            yield
        elif shares_names(location):
            yield
            try:
                remove_folder(location)
            except Exception as error:
                raise OSError(
                    f"{display(location)} is saved, but the sharded checkpoint of that name could not be removed, and"
                    f" is still what would be loaded: {display(str(error))}"
                ) from error
        else:
            aside = beside(location, f".{secrets.token_hex(6)}.old")
            rename_folder(location, aside)
            try:
                yield
            except BaseException:
                rename_folder(aside, location)
                raise
            _clean_up(aside, remove_folder)


def _has_shards_to_replace(location: Location) -> bool:
    try:
        return is_sharded_checkpoint(location)
    except PermissionError:  # what S3 answers about a missing object to those who may write, but not list
        return False


def _is_rank_zero() -> bool:
    return not _distributed_is_initialized() or torch.distributed.get_rank() == 0


@contextmanager
def _outcome_of_rank_zero() -> Iterator[None]:
    """Raises on every rank if the body failed on rank zero; else the others would wait for it in the next barrier."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    if _distributed_is_initialized():
        told: list[OSError | None] = [None]
        if failed is not None:  # a built-in type, for any other may not be picklable
            kind = type(failed) if isinstance(failed, OSError) and type(failed).__module__ == "builtins" else OSError
            told = [kind(f"rank 0: {type(failed).__name__}: {failed}")]
        torch.distributed.broadcast_object_list(told, src=0)
        if failed is None and told[0] is not None:
            raise told[0]
    if failed is not None:
        raise failed


def _clean_up(location: Location, remove: Callable[[Location], None]) -> None:
    """Removes what a save has replaced. The save is complete, so that a failure here is no failure of it."""
    try:
        remove(location)
    except Exception as error:
        log.warning(
            f"Could not remove {display(location)}, which is replaced ({type(error).__name__}: {display(str(error))})"
        )
