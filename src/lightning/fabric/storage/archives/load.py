"""Loads files that ``torch.save`` wrote."""

import io
import os
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import torch

from lightning.fabric.storage.archives.archive_reader import ARCHIVE
from lightning.fabric.storage.archives.checkpoint_file import (
    SMALL_FILE,
    TAIL,
    check_sizes,
    damage_explained,
    open_checkpoint,
    records_of,
    tensors_of,
)
from lightning.fabric.storage.archives.without_tensors import load_without_tensors
from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.save_report import timed
from lightning.fabric.storage.transport.errors import context_kept
from lightning.fabric.storage.transport.ranged_file import RangedFile

_Path = str | os.PathLike[str]


def load_file(
    path: AnyPath | IO[bytes],
    map_location: Any = None,
    weights_only: bool | None = None,
    options: Mapping[str, Any] | None = None,
    mmap: bool | None = None,
) -> Any:
    """Loads a file with :func:`torch.load`.

    Ranges of a remote file are fetched many at a time, shortly before torch reads them into the tensors' own memory.

    Args:
        path: A local path, a URL of any fsspec protocol, or an open file.
        map_location: The argument of ``torch.load``.
        weights_only: The argument of ``torch.load``, but None means False for ``http(s)`` URLs, as ever in Lightning.
        options: Options of the fsspec client, see :func:`~lightning.fabric.storage.paths.location.locate`.
        mmap: The argument of ``torch.load``, for a local path.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        IsADirectoryError: There is a folder, such as a sharded checkpoint.
        OSError: The file could not be read, or was replaced meanwhile.
        RuntimeError: It is truncated, or no checkpoint.
    """
    if not isinstance(path, (str, os.PathLike, Place)):
        return torch.load(path, map_location=map_location, weights_only=weights_only)
    place = locate(path, options)
    if weights_only is None and place.protocol in ("http", "https"):
        weights_only = False
    with timed("Loaded", place) as transfer, open_checkpoint(place) as file, damage_explained(place, file):
        transfer.size = file.seek(0, os.SEEK_END)
        if not isinstance(file, RangedFile):
            check_sizes(file, weights_only)
            return torch.load(place.raw, map_location=map_location, weights_only=weights_only, mmap=mmap)
        _expect_records(file, weights_only)
        file.seek(0)  # torch takes the position for the start of the archive
        with context_kept():
            try:
                loaded = torch.load(file, map_location=map_location, weights_only=weights_only)
            except Exception:
                if file.error is not None:
                    raise file.error from None
                raise
        file.check()
        return loaded


def load_bytes(content: io.BytesIO, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Loads the content of a file in memory with :func:`torch.load`.

    Raises:
        pickle.UnpicklingError: It holds something that ``weights_only`` forbids.
        Exception: Of any kind: it is damaged.
    """
    check_sizes(content, weights_only)
    return torch.load(content, map_location=map_location, weights_only=weights_only)


def weights_only_of(path: _Path) -> bool | None:
    """Returns the ``weights_only`` that ``path`` carries from the strategy, None if it carries none."""
    weights_only: bool | None = getattr(path, "weights_only", None)
    return weights_only


def archive(path: _Path) -> str | IO[bytes]:
    """Returns what :class:`torch.PyTorchFileReader` takes to read a checkpoint record by record.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        IsADirectoryError: There is a folder.
        RuntimeError: The file is no archive, or truncated.
        pickle.UnpicklingError: The file holds more than tensors and plain Python types, which :func:`weights_only_of`
            forbids, and who reads the records would unpickle.
    """
    place = locate(path)
    if weights_only_of(path) and load_without_tensors(place, weights_only=True) is None:
        load_file(place, "cpu", weights_only=True)
    file = open_checkpoint(place)
    source = file if isinstance(file, RangedFile) else place.raw
    if isinstance(file, RangedFile):
        file.keep(max(0, file.size - TAIL), file.size)
    with damage_explained(place, file):
        torch.PyTorchFileReader(source)
    file.seek(0)
    if source is not file:
        file.close()
    return source  # a ranged file is an IO[bytes] in all that matters


def _expect_records(file: RangedFile, weights_only: bool | None = None) -> None:
    """Announces to the file what ``torch.load`` is going to read, in order.

    torch reads small records at both ends of the archive, and then each tensor's as the pickle mentions it, which is in
    the order of their numbers. Older releases of torch wrote them in another order.
    """
    small = file.size <= SMALL_FILE
    file.keep(0 if small else file.size - TAIL, file.size)
    is_checked = check_sizes(file, weights_only)  # then the pickle has been read, and is kept
    try:
        records = records_of(file)
    except zipfile.BadZipFile as error:
        file.seek(0)
        if file.read(len(ARCHIVE)) == ARCHIVE:
            raise RuntimeError(f"it ends before its directory of records ({error})") from error
        if not small:  # torch's legacy format, which is read from the first byte to the last
            file.expect([(0, file.size)])
        return
    if small:
        return
    tensors = tensors_of(records)
    if not tensors:
        return
    first, last = min(start for start, _ in tensors.values()), max(stop for _, stop in tensors.values())
    spans = [tensors[number] for number in sorted(tensors)]
    pickled = [span for name, span in records if name.endswith("/data.pkl") and span[1] - span[0] > TAIL]
    file.expect([*([] if is_checked else pickled), *spans])
    file.keep(pickled[0][1] if pickled else 0, first)
    file.keep(last, file.size)
