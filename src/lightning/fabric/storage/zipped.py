"""Checks an archive of ``torch.save`` without loading it, and tells whose bytes are damaged."""

import collections
import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple, cast

from typing_extensions import override

from lightning.fabric.storage.transport.reader import RangedFile

_PIECE = 2**20
_PICKLED = "/data.pkl"
#: Where an archive has its directory, unless that is very large.
_TAIL = 2**20


class Wrong(NamedTuple):
    """Bytes of a file that are not what they should be."""

    start: int
    stop: int
    #: Whose they are.
    name: str
    reason: str


class Zipped:
    """An archive.

    Args:
        file: Where it is; as a whole, the archive and nothing else.
    """

    def __init__(self, file: io.BytesIO | RangedFile) -> None:
        self._file = file
        self._size = file.seek(0, os.SEEK_END)
        #: Whether its records have CRC-32s: ``torch.serialization.set_crc32_options`` can leave them out. Known at the
        #: end of :meth:`check`.
        self.has_checksums = False

    def check(self) -> list[Wrong]:
        """Reads all records.

        Raises:
            OSError: The file could not be read.
        """
        if isinstance(self._file, RangedFile):
            self._file.keep(max(0, self._size - _TAIL), self._size)
        try:
            opened = zipfile.ZipFile(cast(IO[bytes], self._file))
        except zipfile.BadZipFile as error:
            reason = f"are no archive of torch.save that is whole, or one of the format before PyTorch 1.6 ({error})"
            return [Wrong(0, self._size, "", reason)]
        with opened:
            infos = sorted(opened.infolist(), key=lambda info: info.header_offset)
            self.has_checksums = any(info.CRC for info in infos)
            if not self.has_checksums:
                return []
            if isinstance(self._file, RangedFile):
                self._file.expect([(0, opened.start_dir)])
            stops = [info.header_offset for info in infos[1:]] + [opened.start_dir]
            wrong = []
            for info, stop in zip(infos, stops, strict=True):
                reason = _why_unreadable(opened, info)
                if reason:
                    wrong.append(Wrong(info.header_offset, stop, info.filename, reason))
            names = _names_of_records(opened) if wrong else {}
        return [found._replace(name=names.get(found.name, found.name)) for found in wrong]


def _why_unreadable(opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    try:
        with opened.open(info) as record:
            while record.read(_PIECE):
                pass
    except (zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeDecodeError, zlib.error) as error:
        return f"are damaged: {error}"
    return ""


def _names_of_records(opened: zipfile.ZipFile) -> dict[str, str]:
    """What the tensors in the records are called, as far as that can be told."""
    pickled = next((name for name in opened.namelist() if name.endswith(_PICKLED)), None)
    if pickled is None:
        return {}
    try:
        loaded = _Unpickler(io.BytesIO(opened.read(pickled))).load()
    except Exception:  # it is damaged itself, and damaged pickles raise anything
        return {}
    folder = pickled.removesuffix(_PICKLED)
    return {f"{folder}/data/{key}": f"{name} ({folder}/data/{key})" for key, name in _names_of_storages(loaded)}


def _names_of_storages(loaded: Any) -> Iterator[tuple[str, str]]:
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", loaded)]
    while stack:
        name, value = stack.pop()
        if id(value) in seen:
            continue
        if isinstance(value, _Storage):
            yield value.key, name
            continue
        seen.add(id(value))
        before = f"{name}." if name else ""
        if isinstance(value, dict):
            stack += [(f"{before}{key}", item) for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            stack += [(f"{before}{number}", item) for number, item in enumerate(value)]
        elif isinstance(value, _Inert):
            stack += [(name, list(part) if isinstance(part, tuple) else part) for part in value.parts]


class _Storage:
    """Stands for a tensor's storage."""

    def __init__(self, key: str) -> None:
        self.key = key


class _Inert:
    """Takes the place of every function and class of a pickle, and of what these make, so that no code of it runs."""

    parts: list[Any]

    def __new__(cls, *parts: Any) -> "_Inert":
        made = super().__new__(cls)
        made.parts = list(parts)
        return made

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append({key: value})

    def append(self, value: Any) -> None:
        self.parts.append(value)

    def extend(self, values: Any) -> None:
        self.parts += values


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        return collections.OrderedDict if (module, name) == ("collections", "OrderedDict") else _Inert

    @override
    def persistent_load(self, pid: Any) -> Any:
        return _Storage(pid[2])
