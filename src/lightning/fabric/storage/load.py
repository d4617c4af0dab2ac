"""Loads one file."""

import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import torch

from lightning.fabric.storage.location import Location, display, is_file, join, locate
from lightning.fabric.storage.stats import timed
from lightning.fabric.storage.transport import open_reader
from lightning.fabric.storage.transport.reader import RangedFile

_Path = str | os.PathLike[str]
#: Where the directory of an archive is, and the small records after the tensors; of a small file it is all.
_TAIL = 2**20
_SMALL_FILE = 8 * 2**20
#: What an archive starts with.
_ARCHIVE = b"PK\x03\x04"
#: What torch's errors about archives start with.
_TORCHS = "PytorchStreamReader"


def load_file(
    path: _Path | IO[bytes],
    map_location: Any = None,
    weights_only: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Loads with :func:`torch.load`.

    Ranges of a remote file are fetched many at a time, shortly before torch reads them into the tensors' own memory.

    Args:
        path: A local path, a URL of any fsspec protocol, or a file that is open.
        map_location: As for ``torch.load``.
        weights_only: As for ``torch.load``, but None means False for ``http(s)`` URLs, as ever in Lightning.
        options: As for :func:`~lightning.fabric.storage.location.locate`.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        IsADirectoryError: There is a folder, such as a sharded checkpoint.
        OSError: The file could not be read, or was replaced meanwhile.
        RuntimeError: It is truncated, or no checkpoint.
    """
    if not isinstance(path, (str, os.PathLike)):
        return torch.load(path, map_location=map_location, weights_only=weights_only)
    location = locate(path, options)
    if weights_only is None and str(location).startswith(("http://", "https://")):
        weights_only = False
    with timed("Loaded", location) as transfer, open_checkpoint(location) as file, _damage_explained(location):
        transfer.size = file.seek(0, os.SEEK_END)
        if not isinstance(file, RangedFile):
            return torch.load(location, map_location=map_location, weights_only=weights_only)
        _expect_records(file)
        file.seek(0)  # torch takes the position for the start of the archive
        try:
            loaded = torch.load(file, map_location=map_location, weights_only=weights_only)
        except Exception:
            if file.error is not None:
                raise file.error from None
            raise
        file.check()
        return loaded


def open_checkpoint(location: Location) -> IO[bytes]:
    """The file at ``location``, as by :func:`~lightning.fabric.storage.transport.open_reader`, whose errors say more.

    Raises:
        FileNotFoundError: There is nothing.
        IsADirectoryError: There is a folder, such as a sharded checkpoint.
    """
    try:
        return open_reader(location)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"Checkpoint file not found: {display(location)}") from error
    except IsADirectoryError as error:
        what = "a folder, not a checkpoint file"
        if is_file(join(location, "meta.pt")):
            what = "a sharded checkpoint: load it with FSDP or ModelParallel, or consolidate a local copy of it first"
        raise IsADirectoryError(f"{display(location)} is {what}") from error


def archive(path: _Path) -> str | IO[bytes]:
    """What :class:`torch.PyTorchFileReader` reads the checkpoint at ``path`` from, record by record.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        IsADirectoryError: There is a folder.
    """
    location = locate(path)
    file = open_checkpoint(location)
    if isinstance(file, RangedFile):
        file.keep(max(0, file.size - _TAIL), file.size)
        return file  # it is an IO[bytes] in all that matters
    file.close()
    return str(location)


def _expect_records(file: RangedFile) -> None:
    """Tells the file what ``torch.load`` is going to read, in order.

    It reads small records at both ends of the archive, and then each tensor's as the pickle mentions it, which is in
    the order of their numbers. Older releases of torch wrote them in another order.
    """
    small = file.size <= _SMALL_FILE
    file.keep(0 if small else file.size - _TAIL, file.size)
    try:
        records = _records(file)
    except zipfile.BadZipFile as error:
        file.seek(0)
        if file.read(len(_ARCHIVE)) == _ARCHIVE:
            raise RuntimeError(f"it ends before its directory of records ({error})") from error
        if not small:  # torch's legacy format, which is read from the first byte to the last
            file.expect([(0, file.size)])
        return
    if small:
        return
    tensors = {number: span for name, span in records if (number := _tensor_number(name)) is not None}
    if not tensors:
        return
    first, last = min(start for start, _ in tensors.values()), max(stop for _, stop in tensors.values())
    spans = [tensors[number] for number in sorted(tensors)]
    pickled = [span for name, span in records if name.endswith("/data.pkl") and span[1] - span[0] > _TAIL]
    file.expect([*pickled, *spans])
    file.keep(pickled[0][1] if pickled else 0, first)
    file.keep(last, file.size)


def _records(file: RangedFile) -> list[tuple[str, tuple[int, int]]]:
    with zipfile.ZipFile(file) as opened:
        infos = sorted(opened.infolist(), key=lambda info: info.header_offset)
        ends = [info.header_offset for info in infos[1:]] + [opened.start_dir]
    return [(info.filename, (info.header_offset, end)) for info, end in zip(infos, ends, strict=True)]


def _tensor_number(name: str) -> int | None:
    folder, _, number = name.rpartition("/")
    return int(number) if folder.endswith("/data") and number.isdigit() else None


@contextmanager
def _damage_explained(location: Location) -> Iterator[None]:
    """Torch's own errors about a damaged file do not name it."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(f"Could not load {display(location)}: {error}") from error
    except (RuntimeError, EOFError) as error:
        if isinstance(error, EOFError) or isinstance(error.__cause__, zipfile.BadZipFile) or _TORCHS in str(error):
            raise RuntimeError(f"{display(location)} is truncated, or is no checkpoint: {error}") from error
        raise
