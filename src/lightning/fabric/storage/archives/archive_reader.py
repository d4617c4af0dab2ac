"""Checks an archive of ``torch.save`` without loading it, and names the tensors whose bytes are damaged.

torch believes all that an archive says. Here its directory is compared with the file, and the sizes of tensors in its
pickle with the directory.
"""

import os
import pickle
import struct
import zlib
from collections.abc import Iterator
from typing import IO, NamedTuple

import torch

from lightning.fabric.storage.archives.pickle_check import check_pickle, names_of_records, tensor_in
from lightning.fabric.storage.transport.ranged_file import RangedFile

_PIECE = 2**20
_PICKLED = "data.pkl"
#: Bytes at the end of an archive, in which its directory is, unless that is very large.
_TAIL = 2**20
#: The first bytes of an archive.
ARCHIVE = b"PK\x03\x04"
_LOCAL, _ENTRY, _DESCRIPTOR = ARCHIVE, b"PK\x01\x02", b"PK\x07\x08"
_END, _LARGE_END, _LOCATOR = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_NONE = 0xFFFFFFFF
#: Flags of a record: its checksum and sizes follow on its data; its name is UTF-8.
_FOLLOWS, _UTF8 = 1 << 3, 1 << 11


class Wrong(NamedTuple):
    """Bytes of a file that are not what they should be, of the tensor or object ``name``."""

    start: int
    stop: int
    name: str
    reason: str


class BrokenArchive(Exception):
    """A file is no archive as ``torch.save`` writes it; the text says why."""


class Entry(NamedTuple):
    """A record in the directory of an archive.

    Attributes:
        name: The record's name, with the archive's own before the first slash.
        start: The byte of the file at which the record's header begins.
        size: Bytes of the data.
        crc: The CRC-32 of the data.
        flags: General-purpose flags of the zip format.
    """

    name: str
    start: int
    size: int
    crc: int
    flags: int

    @property
    def short_name(self) -> str:
        """The name without the archive's own."""
        return self.name.partition("/")[2]


class Zipped:
    """A file that is an archive of ``torch.save``, and nothing else."""

    def __init__(self, file: IO[bytes] | RangedFile) -> None:
        self._file = file
        self.size = file.seek(0, os.SEEK_END)
        #: Whether :meth:`check` found CRC-32s: ``torch.serialization.set_crc32_options`` can leave them out.
        self.has_checksums = False
        #: The type and the shape of the tensor, if :meth:`check` found one tensor and nothing else.
        self.tensor: tuple[torch.dtype, tuple[int, ...]] | None = None

    def check(self) -> list[Wrong]:
        """Reads all records.

        Raises:
            OSError: The file could not be read.
        """
        if isinstance(self._file, RangedFile):
            self._file.keep(max(0, self.size - _TAIL), self.size)
        try:
            records, directory = self._directory()
            self._pickle_of(records)
        except BrokenArchive as error:
            reason = f"are no archive of torch.save that is whole, or one of the format before PyTorch 1.6 ({error})"
            return [Wrong(0, self.size, "", reason)]
        self.has_checksums = any(record.crc for record in records)
        if isinstance(self._file, RangedFile):
            self._file.expect([(0, directory)])
        wrong: list[Wrong] = []
        names: dict[str, str] = {}
        for record, stop in zip(records, [*(record.start for record in records[1:]), directory], strict=True):
            try:
                pickled = self._check_record(record, stop)
                if pickled is not None:
                    loaded = check_pickle(pickled, {other.short_name: other.size for other in records})
                    names, self.tensor = names_of_records(loaded), tensor_in(loaded)
            except BrokenArchive as error:
                wrong.append(Wrong(record.start, stop, record.name, f"are damaged: {error}"))
            except Exception as error:  # damaged pickles raise anything
                wrong.append(Wrong(record.start, stop, record.name, f"cannot be loaded: {_short(error)}"))
        return [found._replace(name=_with_tensor(found.name, names)) for found in wrong]

    def check_before_load(self) -> None:
        """Checks that loading the archive takes no more memory than its size, and that all tensors are within it.

        Raises:
            BrokenArchive: The archive is damaged, or its sizes cannot be true.
            OSError: The file could not be read.
        """
        records, directory = self._directory()
        start, stop = self._data_of(self._pickle_of(records), directory)
        if isinstance(self._file, RangedFile):
            self._file.keep_large(start, stop)
        data = self._read(start, stop)
        try:
            check_pickle(data, {record.short_name: record.size for record in records})
        except OSError:
            raise
        except Exception as error:
            raise BrokenArchive(f"its {_PICKLED} cannot be loaded: {_short(error)}") from error

    def _pickle_of(self, records: list[Entry]) -> Entry:
        for record in records:
            if record.short_name == _PICKLED:
                return record
        raise BrokenArchive(f"it has no {_PICKLED}")

    def _read(self, start: int, stop: int) -> bytes:
        self._file.seek(start)
        data = self._file.read(stop - start)
        if len(data) != stop - start:
            raise BrokenArchive(f"it ends before byte {stop}")
        return data

    def _directory(self) -> tuple[list[Entry], int]:
        """Returns all records, in the order of the file, and the byte at which the directory begins."""
        count, start, stop = self._end()
        records = list(_entries(self._read(start, stop)))
        if len(records) != count or len({record.name.lower() for record in records}) != count:
            raise BrokenArchive("its directory has other records than it says, or some twice")
        if len({record.name.partition("/")[0] for record in records}) > 1:
            raise BrokenArchive("its records are of several archives")
        records.sort(key=lambda record: record.start)
        ends = [record.start + 30 + len(record.name) + record.size for record in records]
        if any(end > following.start for end, following in zip(ends, records[1:], strict=False)) or ends[-1] > start:
            raise BrokenArchive("records overlap, or go on beyond its end")
        return records, start

    def _end(self) -> tuple[int, int, int]:
        """Returns the number of records, and the bytes at which the directory begins and ends."""
        at = self.size - 22
        if at < 0 or (tail := self._read(at, self.size))[:4] != _END:
            raise BrokenArchive("it has no directory at its end")
        disk, first, here, count, length, start, comment = struct.unpack("<HHHHIIH", tail[4:])
        stop = at
        if at >= 76 and (locator := self._read(at - 20, at))[:4] == _LOCATOR:
            disk_of_end, stop, disks = struct.unpack("<IQI", locator[4:])
            if stop != at - 76 or (large := self._read(stop, at - 20))[:4] != _LARGE_END:
                raise BrokenArchive("it has no directory at its end")
            size, _, _, disk, first, here, count, length, start = struct.unpack("<QHHIIQQQQ", large[4:])
            if disk_of_end or disks != 1 or size != len(large) - 12:
                raise BrokenArchive("its directory is not where it should be")
        if disk or first or comment or here != count or not count or start + length != stop:
            raise BrokenArchive("its directory is not where it should be")
        return count, start, stop

    def _data_of(self, record: Entry, stop: int) -> tuple[int, int]:
        """Returns the bytes at which the data of a record, which ends before ``stop``, begin and end."""
        name = record.name.encode()
        head = self._read(record.start, record.start + 30 + len(name))
        flags, method, _, _, crc, packed, size, named, extra = struct.unpack("<HHHHIIIHH", head[6:30])
        start = record.start + 30 + named + extra
        if (
            head[:4] != _LOCAL
            or method
            or flags != record.flags
            or head[30:] != name
            or named != len(name)
            or crc not in (record.crc, *([0] if flags & _FOLLOWS else []))
            or packed != size
            or size not in (record.size, _NONE, *([0] if flags & _FOLLOWS else []))
            or start + record.size > stop
        ):
            raise BrokenArchive("their head is not as in the archive's directory")
        return start, start + record.size

    def _check_record(self, record: Entry, stop: int) -> bytes | None:
        """Reads and checks a record, and returns its data if it is the pickle."""
        start, end = self._data_of(record, stop)
        pieces = []
        crc = 0
        self._file.seek(start)
        for at in range(start, end, _PIECE):
            piece = self._file.read(min(_PIECE, end - at))
            if not piece:
                raise BrokenArchive("the file ends before them")
            crc = zlib.crc32(piece, crc)
            if record.short_name == _PICKLED:
                pieces.append(piece)
        if self.has_checksums and crc != record.crc:
            raise BrokenArchive(f"Bad CRC-32 of {record.name!r}")
        after = self._file.read(min(stop - end, 25))
        if after not in _allowed_after(record):
            raise BrokenArchive("what follows on them is not theirs")
        return b"".join(pieces) if record.short_name == _PICKLED else None


def _allowed_after(record: Entry) -> list[bytes]:
    if not record.flags & _FOLLOWS:
        return [b""]
    checked = struct.pack("<I", record.crc)
    sizes = [struct.pack("<QQ", record.size, record.size)]
    if record.size < _NONE:
        sizes.append(struct.pack("<II", record.size, record.size))
    return [head + checked + size for head in (b"", _DESCRIPTOR) for size in sizes]


def _entries(directory: bytes) -> Iterator[Entry]:
    at = 0
    while at < len(directory):
        if len(directory) - at < 46 or directory[at : at + 4] != _ENTRY:
            raise BrokenArchive("its directory is damaged")
        fields = struct.unpack("<HHHHHHIIIHHHHHII", directory[at + 4 : at + 46])
        _, _, flags, method, _, _, crc, packed, size, named, extra, comment, disk, _, _, start = fields
        name = directory[at + 46 : at + 46 + named]
        large = directory[at + 46 + named : at + 46 + named + extra]
        at += 46 + named + extra + comment
        if at > len(directory) or comment or disk or flags & ~(_FOLLOWS | _UTF8):
            raise BrokenArchive("its directory is damaged")
        if _NONE in (packed, size, start):
            size, packed, start = _large_numbers(large, size, packed, start)
            if min(size, start) < 0:
                raise BrokenArchive("its directory is damaged")
        if method or packed != size:
            raise BrokenArchive(f"it has a record that is compressed, as torch.save has none: {name!r:.200}")
        try:
            yield Entry(name.decode(), start, size, crc, flags)
        except UnicodeDecodeError as error:
            raise BrokenArchive(f"it has a record with a damaged name: {name!r:.200}") from error


def _large_numbers(extra: bytes, *numbers: int) -> Iterator[int]:
    """Returns the numbers, those that have no room in an entry from its extra field; -1 for a missing one."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and length % 8 == 0 and at + 4 + length <= len(extra):
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            return iter([next(values, -1) if number == _NONE else number for number in numbers])
        at += 4 + length
    raise BrokenArchive("its directory is damaged")


def _short(error: Exception) -> str:
    """Returns the text of an error, with its type where that is needed to understand it, as of ``KeyError(0)``."""
    is_clear = isinstance(error, pickle.UnpicklingError) and str(error)
    return f"{error if is_clear else f'{type(error).__name__}: {error}'!s:.300}"


def _with_tensor(name: str, names: dict[str, str]) -> str:
    """Returns the name of a record, with that of the tensor in it if that is known."""
    whose = names.get(name.partition("/")[2])
    return f"{whose} ({name})" if whose else name
