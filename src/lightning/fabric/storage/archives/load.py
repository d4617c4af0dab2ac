"""Loads files that ``torch.save`` wrote."""

import io
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import torch

from lightning.fabric.storage.archives.archive_reader import ARCHIVE, BrokenArchive, Zipped
from lightning.fabric.storage.archives.magic_bytes import START, why_no_checkpoint
from lightning.fabric.storage.paths.layout import STOCK_META
from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.save_report import timed
from lightning.fabric.storage.transport.coalesce import coalesce
from lightning.fabric.storage.transport.errors import context_kept
from lightning.fabric.storage.transport.open import open_reader
from lightning.fabric.storage.transport.ranged_file import REPLACED, RangedFile
from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_6

_Path = str | os.PathLike[str]
#: Bytes at the end of an archive, in which its directory is, and the small records after the tensors. A small file is
#: read as a whole.
_TAIL = 2**20
_SMALL_FILE = 8 * 2**20
#: Bytes of the fixed part of a record's header, and from the first to the last of the headers that are read together.
_HEAD = 30
_NEAR = 2**18
#: Names in torch's errors about archives.
_TORCH_READERS = ("PytorchStreamReader", "inline_container")


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
    with timed("Loaded", place) as transfer, open_checkpoint(place) as file, _damage_explained(place, file):
        transfer.size = file.seek(0, os.SEEK_END)
        if not isinstance(file, RangedFile):
            _check(file, weights_only)
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
    _check(content, weights_only)
    return torch.load(content, map_location=map_location, weights_only=weights_only)


def _check(file: IO[bytes] | RangedFile, weights_only: bool | None) -> bool:
    """Checks the sizes in an archive, all of which torch believes.

    Returns:
        True if the file is an archive and was checked.

    Raises:
        RuntimeError: The archive is damaged, or takes more memory than it may.
    """
    if _is_trusted(weights_only):  # the user decides what the author may do
        return False
    is_archive = True
    try:
        Zipped(file).check_before_load()
    except BrokenArchive as error:
        file.seek(0)
        if file.read(len(ARCHIVE)) == ARCHIVE:  # else it is in torch's format of before 1.6
            raise RuntimeError(str(error)) from error
        is_archive = False
    file.seek(0)
    return is_archive


def _is_trusted(weights_only: bool | None) -> bool:
    """Returns whether :func:`torch.load` runs whatever code is in a file."""
    if weights_only is None:
        is_forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower() in ("1", "y", "yes", "true")
        return is_forced or not _TORCH_GREATER_EQUAL_2_6
    return not weights_only


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
    with _damage_explained(place, file):
        size = file.seek(0, os.SEEK_END)
        if isinstance(file, RangedFile):
            file.keep(0 if size <= _SMALL_FILE else size - _TAIL, size)
        _check(file, weights_only)
        try:
            records = _records(file)
            order = _byte_order(file)
        except (zipfile.BadZipFile, KeyError):
            return None
        tensors = _tensors(records)
        if order != sys.byteorder or not tensors:
            return None
        if isinstance(file, RangedFile) and size > _SMALL_FILE:
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


def open_checkpoint(place: Place) -> IO[bytes]:
    """Opens a file with :func:`~lightning.fabric.storage.transport.open.open_reader`; errors say what to do instead.

    Raises:
        FileNotFoundError: There is nothing at ``place``.
        IsADirectoryError: There is a folder, such as a sharded checkpoint.
    """
    with context_kept():  # the store's own error says no more
        try:
            return open_reader(place)
        except FileNotFoundError:
            raise not_found(place) from None
        except IsADirectoryError:
            what = "a folder, not a checkpoint file"
            if (place / STOCK_META).is_file():
                what = (
                    "a sharded checkpoint: load it with FSDP or ModelParallel, or make one file of it with `fabric"
                    " consolidate` (or `python -m lightning.fabric.utilities.consolidate_checkpoint`)"
                )
            raise IsADirectoryError(f"{place} is {what}") from None


def not_found(place: Place) -> FileNotFoundError:
    """Returns the error of every load from a place where nothing is."""
    return FileNotFoundError(f"Checkpoint file not found: {place}. {place.advice_if_missing()}.")


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
        file.keep(max(0, file.size - _TAIL), file.size)
    with _damage_explained(place, file):
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
    small = file.size <= _SMALL_FILE
    file.keep(0 if small else file.size - _TAIL, file.size)
    is_checked = _check(file, weights_only)  # then the pickle has been read, and is kept
    try:
        records = _records(file)
    except zipfile.BadZipFile as error:
        file.seek(0)
        if file.read(len(ARCHIVE)) == ARCHIVE:
            raise RuntimeError(f"it ends before its directory of records ({error})") from error
        if not small:  # torch's legacy format, which is read from the first byte to the last
            file.expect([(0, file.size)])
        return
    if small:
        return
    tensors = _tensors(records)
    if not tensors:
        return
    first, last = min(start for start, _ in tensors.values()), max(stop for _, stop in tensors.values())
    spans = [tensors[number] for number in sorted(tensors)]
    pickled = [span for name, span in records if name.endswith("/data.pkl") and span[1] - span[0] > _TAIL]
    file.expect([*([] if is_checked else pickled), *spans])
    file.keep(pickled[0][1] if pickled else 0, first)
    file.keep(last, file.size)


def _records(file: IO[bytes] | RangedFile) -> list[tuple[str, tuple[int, int]]]:
    with zipfile.ZipFile(file) as opened:
        infos = sorted(opened.infolist(), key=lambda info: info.header_offset)
        ends = [info.header_offset for info in infos[1:]] + [opened.start_dir]
    return [(info.filename, (info.header_offset, end)) for info, end in zip(infos, ends, strict=True)]


def _tensors(records: list[tuple[str, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    """Returns the spans of tensors by their numbers."""
    return {int(found[1]): span for name, span in records if (found := re.search("/data/([0-9]+)$", name))}


@contextmanager
def _damage_explained(place: Place, file: IO[bytes]) -> Iterator[None]:
    """Names the file in torch's errors, and corrects their advice about files of another kind."""
    with context_kept():
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            file.seek(0)
            if (why := why_no_checkpoint(file.read(START))) is not None:
                raise RuntimeError(f"{place} is no checkpoint: {why}.") from None
            if isinstance(error, pickle.UnpicklingError):
                raise pickle.UnpicklingError(f"Could not load {place}: {error}") from None
            if (
                isinstance(error, (EOFError, IndexError, zipfile.BadZipFile))
                or isinstance(error.__cause__, (zipfile.BadZipFile, BrokenArchive))
                or any(name in str(error) for name in _TORCH_READERS)
            ):
                reason = str(error) or "it ends too early"
                raise RuntimeError(f"{place} is truncated, or is no checkpoint: {reason}") from error
            raise
