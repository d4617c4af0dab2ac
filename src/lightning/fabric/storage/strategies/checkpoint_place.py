"""The places of checkpoints that every rank saves, each a folder of shards or one full file.

:mod:`~lightning.fabric.storage.sharded.metadata_file` says when a folder is complete. On an object store a full file
and a folder can have the same name: while both exist, the folder counts.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning.fabric.storage.archives.checkpoint_file import not_found
from lightning.fabric.storage.background.pending import drain
from lightning.fabric.storage.collectives.errors import from_rank_zero, of_rank_zero, together
from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.transport.errors import ask
from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_4

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata


def locate_checkpoint(path: AnyPath, options: Mapping[str, Any] | None = None) -> Place:
    """Resolves the path of a checkpoint that every rank saves.

    Args:
        path: A local path, a URL of any fsspec protocol, or a place.
        options: Options for the file system of a URL.

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
    """A checkpoint that was found at a path when a load began, and stands for the path until the load ends.

    Attributes:
        place: The place.
        metadata: The metadata of a complete sharded checkpoint; None if there is none.
        is_full: Whether a file was found.
        weights_only: The argument of the load, with the meaning that it has for :func:`torch.load`. Functions of
            Lightning's that are given nothing but a path find it here.
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
    """Finds the checkpoint at a path once all saves in flight have ended; a collective call, in which rank zero looks.

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
            if ask(place, place.is_file):
                return None, True
            if metadata_file.is_begun(place):
                raise
            return None, False
        own.append(metadata)
        return content, False

    # its bytes, for of a large job the metadata are a million objects
    content, is_full = from_rank_zero(look, f"loading {place}")
    metadata = own[0] if own else None if content is None else metadata_file.parse_metadata(content, place)
    return FoundCheckpoint(place, metadata, is_full, weights_only)


def find_to_load(path: AnyPath, weights_only: bool | None = None) -> FoundCheckpoint:
    """Finds a checkpoint as :func:`find_checkpoint` does, where there has to be one; a collective call.

    Args:
        path: A local path or a URL; that of rank zero counts.
        weights_only: The argument of that name of :func:`torch.load`.

    Raises:
        FileNotFoundError: There is nothing, or an incomplete sharded checkpoint. Every rank raises it.
        ValueError: There is a folder that is no checkpoint. Every rank raises it.
    """
    found = find_checkpoint(of_rank_zero(path), weights_only)
    if found.metadata is None and not found.is_full:
        if from_rank_zero(lambda: ask(found.place, found.place.kind), f"loading {found.place}") == "nothing":
            raise not_found(found.place)
        raise ValueError(
            f"The path {found} does not point to a valid checkpoint: there is a folder, but it holds no sharded"
            " checkpoint. Give the path of one, or of a file with a full checkpoint."
        )
    return found


def is_sharded_checkpoint(path: AnyPath) -> bool:
    """Returns whether there is a folder of shards: any part, or a complete one if ``path`` is a found checkpoint."""
    if isinstance(path, FoundCheckpoint):
        return path.metadata is not None
    from lightning.fabric.storage.sharded import metadata_file

    return metadata_file.is_begun(locate(path))


def is_full_checkpoint(path: AnyPath) -> bool:
    """Returns whether there is a file that could hold a full state."""
    return path.is_full if isinstance(path, FoundCheckpoint) else locate(path).is_file()


def refuse_folder(place: Place) -> None:
    """Refuses to save a full state as a file where a folder that is no checkpoint has the name.

    Raises:
        IsADirectoryError: There is such a folder.
    """
    # in this order: rank zero may be replacing shards by a file at this moment
    if not place.shares_names() and not is_sharded_checkpoint(place) and place.is_folder():
        raise IsADirectoryError(f"{place} is a folder, and no checkpoint that a file may replace: save to another path")
