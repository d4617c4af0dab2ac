"""Loads all of a file but the data of its tensors, which can be read later on."""

import os
import sys
import zipfile
from typing import IO, Any, NamedTuple

import torch

from lightning.fabric.storage.archives.checkpoint_file import (
    SMALL_FILE,
    TAIL,
    check_sizes,
    damage_explained,
    open_checkpoint,
    records_of,
    tensors_of,
)
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.transport.coalesce import coalesce
from lightning.fabric.storage.transport.ranged_file import REPLACED, RangedFile

#: Bytes of the fixed part of a record's header, and from the first to the last of the headers that are read together.
_HEAD = 30
_NEAR = 2**18


class WithoutTensors(NamedTuple):
    """An object without the data of its tensors.

    Attributes:
        obj: The object, with tensors on the meta device. Their storages have an attribute ``_checkpoint_offset``: the
            byte of the file at which they begin.
        storages: The number of storages in the file.
        file: The file, to read more of it.
    """

    obj: Any
    storages: int
    file: "OpenedFile"


class OpenedFile:
    """A file of which more is going to be read under its name.

    Args:
        place: The place of the file.
        file: The open file. A remote one stays open as long as this object lives.
        size: Bytes of the file.
    """

    def __init__(self, place: Place, file: IO[bytes], size: int) -> None:
        self.place = place
        self.size = size
        self._file = file if isinstance(file, RangedFile) else None
        self._version = None if isinstance(file, RangedFile) else _version(os.fstat(file.fileno()))

    def check(self) -> None:
        """Checks that the place still has this file.

        Raises:
            OSError: It has another one, or none.
        """
        if self._file is not None:
            self._file.keep(0, 1)  # some stores refuse a range of a version that is no longer the newest
            self._file.check()
        elif _version(os.stat(self.place.raw)) != self._version:
            raise OSError(f"Could not read {self.place}: {REPLACED}")


def _version(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def load_without_tensors(place: Place, weights_only: bool | None = None) -> WithoutTensors | None:
    """Loads a file without the data of its tensors.

    Returns:
        None if the file is no archive of a machine with this byte order, or has no tensors.
    """
    if weights_only is None and place.protocol in ("http", "https"):
        weights_only = False
    file = open_checkpoint(place)
    with damage_explained(place, file):
        size = file.seek(0, os.SEEK_END)
        if isinstance(file, RangedFile):
            file.keep(0 if size <= SMALL_FILE else size - TAIL, size)
        check_sizes(file, weights_only)
        try:
            records = records_of(file)
            order = _byte_order(file)
        except (zipfile.BadZipFile, KeyError):
            return None
        tensors = tensors_of(records)
        if order != sys.byteorder or not tensors:
            return None
        if isinstance(file, RangedFile) and size > SMALL_FILE:
            _expect_heads(file, [tensors[number][0] for number in sorted(tensors)])
            file.keep(0, min(start for start, _ in tensors.values()))
        file.seek(0)
        loaded = torch.load(file, map_location="meta", weights_only=weights_only)
        opened = OpenedFile(place, file, size)
        if not isinstance(file, RangedFile):
            file.close()
        return WithoutTensors(loaded, len(tensors), opened)


def _byte_order(file: IO[bytes]) -> str:
    with zipfile.ZipFile(file) as opened:
        name = next((name for name in opened.namelist() if name.endswith("/byteorder")), "byteorder")
        return opened.read(name).decode()


def _expect_heads(file: RangedFile, starts: list[int]) -> None:
    """Announces the headers of records, from which torch learns where in the record the tensor begins."""
    heads = coalesce((range(start, start + _HEAD) for start in starts), _NEAR, _NEAR)
    file.expect((group[0].start, group[-1].stop) for group in heads)
