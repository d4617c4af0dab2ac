"""Writes archives for ``torch.load`` without holding whole tensors in host memory, as ``torch.save`` does.

An archive is made in steps: first the pickle, then each tensor's bytes in as many pieces as suit the writer, then the
directory.
"""

import dataclasses
import io
import math
import pickle
import struct
import sys
import zlib
from typing import Any

import torch
from torch.storage import TypedStorage
from typing_extensions import override

#: Tensors start at multiples of so many bytes, as in files of ``torch.save``, which can be mapped into memory.
_ALIGNMENT = 64
_FOLDER = "archive"
#: torch's version of the file format.
_VERSION = b"3\n"
_LARGE = 0xFFFFFFFF
#: A general-purpose flag of zip: the CRC follows the data.
_CRC_FOLLOWS = 1 << 3
_ZIP_VERSION = 45  # the first one that has large files
_DOS_EPOCH = 0x0021  # 1 January 1980, so that an archive depends on its content only


@dataclasses.dataclass(frozen=True, eq=False)
class TensorStub:
    """Stand-in, in a pickled object, for a contiguous tensor whose bytes are written later."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class Archive:
    """The bytes of an archive, step by step.

    These are what :meth:`start` returns, then for each of :attr:`contents` what :meth:`tensor_starts` returns, its own
    bytes and what :meth:`tensor_ends` returns, and at last what :meth:`end` returns.
    """

    def __init__(self) -> None:
        #: Stubs and storages in the order of their bytes in the archive, which is that of the pickled object.
        self.contents: list[TensorStub | torch.UntypedStorage] = []
        self._started = 0
        self._position = 0
        self._entries: list[tuple[bytes, int, int, int, int]] = []

    def start(self, obj: Any) -> bytes:
        """Returns the first bytes.

        Args:
            obj: The object to save. A :class:`TensorStub` may stand for a tensor; the storages of other tensors are
                part of :attr:`contents`, those that several tensors share once.
        """
        pickled = io.BytesIO()
        _Pickler(pickled, self.contents).dump(obj)
        parts = [("data.pkl", pickled.getvalue()), ("byteorder", sys.byteorder.encode()), ("version", _VERSION)]
        return b"".join(self._begin(name, len(data), zlib.crc32(data), 0) + data for name, data in parts)

    def tensor_starts(self) -> bytes:
        """Returns the header of the next of :attr:`contents`."""
        key, content = self._started, self.contents[self._started]
        self._started += 1
        nbytes = content.nbytes if isinstance(content, TensorStub) else content.nbytes()
        return self._begin(f"data/{key}", nbytes, 0, _CRC_FOLLOWS)

    def tensor_ends(self, crc: int) -> bytes:
        """Returns the bytes that follow on a tensor's own, whose CRC-32 is ``crc``."""
        name, offset, size, _, flags = self._entries[-1]
        self._entries[-1] = (name, offset, size, crc, flags)
        sizes = "QQ" if size >= _LARGE else "II"
        return self._advance(struct.pack(f"<II{sizes}", 0x08074B50, crc, size, size))

    def end(self) -> bytes:
        """Returns the last bytes."""
        start = self._position
        for entry in self._entries:
            self._advance(b"\0" * len(_directory_entry(*entry)))
        directory = b"".join(_directory_entry(*entry) for entry in self._entries)
        count, end = len(self._entries), self._position
        large = struct.pack(
            "<IQHHIIQQQQIIQI",
            *(0x06064B50, 44, _ZIP_VERSION, _ZIP_VERSION, 0, 0, count, count, len(directory), start),
            *(0x07064B50, 0, end, 1),
        )
        if start < _LARGE and count < 0xFFFF:
            large = b""
        few, short, near = min(count, 0xFFFF), min(len(directory), _LARGE), min(start, _LARGE)
        return directory + large + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, short, near, 0)

    def _begin(self, name: str, size: int, crc: int, flags: int) -> bytes:
        path = f"{_FOLDER}/{name}".encode()
        self._entries.append((path, self._position, size, crc, flags))
        extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LARGE else b""
        # a field without a meaning, which aligns the data
        padding = -(self._position + 30 + len(path) + len(extra) + 4) % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        short = min(size, _LARGE)
        header = struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, _ZIP_VERSION, flags, 0, 0, _DOS_EPOCH, crc, short, short, len(path), len(extra)
        )
        self._advance(header + path + extra)
        self._position += size
        return header + path + extra

    def _advance(self, data: bytes) -> bytes:
        self._position += len(data)
        return data


def _directory_entry(path: bytes, offset: int, size: int, crc: int, flags: int) -> bytes:
    large = [size, size] if size >= _LARGE else []
    large += [offset] if offset >= _LARGE else []
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    short, near = min(size, _LARGE), min(offset, _LARGE)
    fields = (0x02014B50, _ZIP_VERSION, _ZIP_VERSION, flags, 0, 0, _DOS_EPOCH, crc, short, short)
    return struct.pack("<IHHHHHHIIIHHHHHII", *fields, len(path), len(extra), 0, 0, 0, 0, near) + path + extra


class _Pickler(pickle.Pickler):
    """Pickles a stub as torch pickles the tensor, and a storage as torch does.

    Args:
        file: The file to write to.
        contents: Filled with stubs and storages. The index of one is its key in the archive.
    """

    def __init__(self, file: io.BytesIO, contents: list[TensorStub | torch.UntypedStorage]) -> None:
        super().__init__(file, protocol=2)  # the one that torch.load(weights_only=True) knows
        self._contents = contents
        self._keys: dict[int, int] = {}

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, TensorStub):
            return NotImplemented
        # torch rebuilds a tensor in a way that depends on the type
        rebuild, arguments, *_ = torch.empty(1, dtype=obj.dtype, device="cpu").__reduce_ex__(2)  # type: ignore[no-untyped-call]
        storage, offset, _, _, *rest = arguments
        strides = tuple(math.prod(obj.shape[axis + 1 :]) for axis in range(len(obj.shape)))
        return rebuild, (_StorageStub(storage, obj), offset, tuple(obj.shape), strides, *rest)

    @override
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _StorageStub):
            return self._entry(obj.kind, obj.stub, id(obj.stub), obj.stub.nbytes)
        if not isinstance(obj, (TypedStorage, torch.UntypedStorage)):
            return None
        untyped = obj._untyped_storage if isinstance(obj, TypedStorage) else obj
        return self._entry(obj, untyped, untyped._cdata, untyped.nbytes())

    def _entry(self, kind: Any, content: TensorStub | torch.UntypedStorage, identity: int, nbytes: int) -> Any:
        key = self._keys.setdefault(identity, len(self._contents))
        if key == len(self._contents):
            self._contents.append(content)
        typed = isinstance(kind, TypedStorage)
        stored = getattr(torch, kind._pickle_storage_type()) if typed else torch.UntypedStorage
        return "storage", stored, str(key), "cpu", nbytes // kind.dtype.itemsize if typed else nbytes


@dataclasses.dataclass
class _StorageStub:
    """Stand-in for a storage of the type of ``kind``, another one, and with the size of a stub."""

    kind: Any
    stub: TensorStub
