"""Unpickles ``.metadata``, which may be a stranger's: no code of it runs, and memory is bounded by its size.

A pickle calls functions and classes of any module. Here it gets stand-ins for those that torch and this library write
into ``.metadata``, and nothing else. They check arguments, make no more objects than a file of that size has use for,
and cannot be changed by the pickle.

For a million objects it takes the unpickler in C, which a few bytes can make allocate gigabytes: the opcodes are
checked before.
"""

import dataclasses
import io
import itertools
import operator
import pickle
import re
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from typing_extensions import override

from lightning.fabric.storage.gc_pause import collection_paused
from lightning.fabric.storage.transport.threads import in_thread

#: Opcodes with their arguments, except for :data:`_COUNTED`. Those that no pickler of Python's has written since
#: protocol 4, that run code, or that take memory beyond the size of the file are not among them.
_OPCODES = re.compile(
    rb"(?:[().Nabetsu\]}R\x81\x85-\x89\x92-\x94]+|[Khq].|M..|[Jj].{4}|G.{8}|\x80.|\x95.{8}){1,4000}", re.DOTALL
)
#: Opcodes with a count of the bytes that follow, and the bytes of that count.
_COUNTED = dict(zip(b"\x8cX\x8dCB\x8e\x96\x8a\x8b", (1, 4, 8, 1, 4, 8, 8, 1, 4), strict=True))
_STOP = b"."
#: Bytes of the stack for each tuple in a tuple, which are hashed in a recursion that only the stack limits.
_STACK = 256
#: The objects that columns of numbers of :mod:`~lightning.fabric.storage.sharded.packing` may become, for each byte of
#: the file and beside that. A part of a tensor has three bytes at least, and becomes ten objects at most.
_OBJECTS_PER_BYTE = 8
_OBJECTS = 10_000
_DIMS = 1000
_NESTED = 16
_NUMBERS = re.compile(r"<([0-9]{0,12})([BHIQ])")


def unpickle(content: bytes) -> Any:
    """Unpickles metadata.

    Raises:
        Exception: Of any kind; ``content`` is no pickle of metadata, or has something else in it.
    """
    _check_opcodes(content)
    levels = min(content.count(b"("), content.count(b"t")) + sum(map(content.count, (b"\x85", b"\x86", b"\x87")))
    # memory of the stack is taken as far as it is used
    before = threading.stack_size(2**20 + -(-levels * _STACK // 2**16) * 2**16)
    try:
        unpickled = in_thread("checkpoint-unpickle", _unpickle, content)
    finally:
        threading.stack_size(before)
    return unpickled.result()


def _unpickle(content: bytes) -> Any:
    with collection_paused():
        return _Unpickler(content).load()


def _check_opcodes(content: bytes) -> None:
    at, end = 0, len(content)
    while at < end:
        found = _OPCODES.match(content, at)
        if found is not None:
            at = found.end()
        elif (width := _COUNTED.get(content[at])) is not None:
            start = at + 1 + width
            at = start + int.from_bytes(content[at + 1 : start], "little")
        else:
            raise pickle.UnpicklingError(f"there is an opcode {content[at]:#04x} at byte {at}")
    if at != end or not content.endswith(_STOP):
        raise pickle.UnpicklingError("it is cut off")


class _Sealed(type):
    """The type of classes whose attributes a pickle cannot set."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets {name!r} of a class")


def _class(made: type) -> type:
    """Returns a stand-in for a dataclass. Its objects have no attributes until the pickle sets them."""
    return _Sealed(made.__name__, (), {"__slots__": (), "__new__": partial(object.__new__, made), "made": made})


def _function(call: Callable[..., Any]) -> Any:
    """Returns a stand-in for a function, an object without attributes."""
    return type("function", (), {"__slots__": (), "__call__": staticmethod(call)})()


class _Properties(metadata.TensorProperties):
    @override
    def __setstate__(self, state: Any) -> None:
        self.dtype, self.layout, self.requires_grad, memory_format, self.pin_memory, *strides = state
        if not isinstance(self.dtype, torch.dtype) or not isinstance(self.layout, torch.layout):
            raise pickle.UnpicklingError("there is no such type of tensors")
        if strides:  # since torch 2.15
            (self.strides,) = map(_strides, strides)
        self.memory_format = (torch.contiguous_format, torch.channels_last, torch.preserve_format)[memory_format]
        self.__class__ = metadata.TensorProperties  # type: ignore[assignment]


def _strides(values: Any) -> tuple[int, ...] | None:
    if values is not None and (type(values) is not tuple or len(values) > _DIMS or {*map(type, values)} - {int}):
        raise pickle.UnpicklingError("the strides of a tensor are no short tuple of numbers")
    return values


def _size(values: Any) -> torch.Size:
    if type(values) is not tuple or len(values) > _DIMS:
        raise pickle.UnpicklingError("the size of a tensor is no short tuple")
    return torch.Size(values)


def _layout(name: Any) -> torch.layout:
    layout: Any = getattr(torch, str(name).removeprefix("torch."))
    if not isinstance(layout, torch.layout):
        raise pickle.UnpicklingError(f"there is no layout {name!r}")
    return layout


def _path(*parts: Any) -> str:
    """Returns the path where torch saved the checkpoint, of which no use is made."""
    return str(parts[-1]) if parts and type(parts[-1]) is str else ""


@dataclasses.dataclass(frozen=True)
class _Lazy:
    """Stand-in for an iterator, which becomes a list or a dictionary only if that is not too large.

    Args:
        count: The number of items.
        cost: The number of objects that are made beside them.
        nested: The number of iterators in each other.
        iterate: Returns the iterator.
    """

    __slots__ = ("cost", "count", "iterate", "nested")  # and no dictionary, which a pickle could change
    count: int
    cost: int
    nested: int
    iterate: Callable[[], Iterator[Any]]

    def __post_init__(self) -> None:
        if self.nested > _NESTED:
            raise pickle.UnpicklingError("iterators are nested too deep")

    @classmethod
    def of(cls, values: Any) -> "_Lazy":
        if type(values) is cls:
            return values
        if type(values) not in (list, tuple):
            raise pickle.UnpicklingError(f"it iterates over a {type(values).__name__}")
        return cls(len(values), 0, 0, partial(iter, values))

    @classmethod
    def joined(cls, combine: Callable[..., Any], values: Any, count: Callable[..., int] = min) -> "_Lazy":
        """Returns the stand-in for what ``combine`` makes of several iterators."""
        parts = [cls.of(one) for one in values]
        total = count([part.count for part in parts])
        return cls(
            total,
            total + sum(part.cost for part in parts),
            1 + max(part.nested for part in parts),
            lambda: iter(combine(*(part.iterate() for part in parts))),
        )


def _range(start: int, stop: int, step: int) -> _Lazy:
    numbers = range(start, stop, step)
    return _Lazy(len(numbers), 0, 0, partial(iter, numbers))


def _repeat(value: Any, count: int = sys.maxsize) -> _Lazy:
    return _Lazy(count, 0, 0, partial(itertools.repeat, value, count))


def _numbers(code: Any, data: Any) -> int:
    """Returns the number of numbers in a column."""
    found = _NUMBERS.fullmatch(code)
    if found is None or type(data) is not bytes:
        raise pickle.UnpicklingError("there is a column of something else than numbers")
    return len(data) // struct.calcsize(f"<{found[2]}")


def _iter_unpack(code: Any, data: Any) -> _Lazy:
    return _Lazy(len(data) // struct.calcsize(code), _numbers(code, data), 0, partial(struct.iter_unpack, code, data))


_INDEX = _class(metadata.MetadataIndex)
_CHUNK = _class(metadata.ChunkStorageMetadata)
_INFO = _class(filesystem._StorageInfo)
_SIZE = _function(_size)
_GETITEM = _function(operator.getitem)
#: Functions that :func:`map` may call, by their stand-ins.
_CALLABLES: dict[Any, Callable[..., Any]] = {
    _INDEX: metadata.MetadataIndex,
    _CHUNK: metadata.ChunkStorageMetadata,
    _INFO: filesystem._StorageInfo,
    _SIZE: _size,
    _GETITEM: operator.getitem,
}
_METADATA = metadata.__name__
#: Where torch had the properties of tensors in its first releases with this format.
_FORMER = "torch.distributed._shard.sharded_tensor.metadata"
_PROPERTIES = _class(_Properties)
_ENCODING = _function(int)


def _member(encoding: Any, name: Any) -> int:
    """Returns the value of a memory format, for which Python 3.11 before 3.11.4 pickles a call of ``getattr``."""
    if encoding is not _ENCODING or type(name) is not str:
        raise pickle.UnpicklingError("it asks for an attribute, of which metadata have none")
    return int(metadata._MEM_FORMAT_ENCODING[name].value)


_STAND_INS: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _class(metadata.Metadata),
    (_METADATA, "MetadataIndex"): _INDEX,
    (_METADATA, "ChunkStorageMetadata"): _CHUNK,
    (_METADATA, "TensorStorageMetadata"): _class(metadata.TensorStorageMetadata),
    (_METADATA, "BytesStorageMetadata"): _class(metadata.BytesStorageMetadata),
    (_METADATA, "TensorProperties"): _PROPERTIES,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _ENCODING,
    (_FORMER, "TensorProperties"): _PROPERTIES,
    (_FORMER, "MEM_FORMAT_ENCODING"): _ENCODING,
    (filesystem.__name__, "_StorageInfo"): _INFO,
    ("torch", "Size"): _SIZE,
    ("torch.serialization", "_get_layout"): _function(_layout),
    ("collections", "OrderedDict"): _function(lambda: OrderedDict()),
    ("_operator", "getitem"): _GETITEM,
    ("builtins", "getattr"): _function(_member),
    ("builtins", "range"): _function(_range),
    ("builtins", "map"): _function(lambda function, *values: _Lazy.joined(partial(map, _CALLABLES[function]), values)),
    ("builtins", "zip"): _function(lambda *values: _Lazy.joined(zip, values)),
    ("itertools", "chain"): _function(lambda *values: _Lazy.joined(itertools.chain, values, sum)),
    ("itertools", "repeat"): _function(_repeat),
    ("_struct", "iter_unpack"): _function(_iter_unpack),
    **{
        ("pathlib", name): _function(_path) for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
    **{("pathlib._local", name): _function(_path) for name in ("PosixPath", "WindowsPath")},
}
if hasattr(metadata, "StorageMeta"):  # since torch 2.3
    _STAND_INS[_METADATA, "StorageMeta"] = _class(metadata.StorageMeta)


class _Unpickler(pickle.Unpickler):
    """Gives a pickle the stand-ins, and limits the number of objects that some of them make."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        left = _OBJECTS + _OBJECTS_PER_BYTE * len(content)

        def spend(count: int) -> None:
            nonlocal left
            left -= count
            if left < 0:
                raise pickle.UnpicklingError("it would make more objects than a file of its size has use for")

        def make(kind: Callable[..., Any], values: Any) -> Any:
            lazy = _Lazy.of(values)
            spend(lazy.count + lazy.cost)
            return kind(lazy.iterate())

        def unpack(code: Any, data: Any) -> Any:
            spend(_numbers(code, data))
            return struct.unpack(code, data)

        self._counting = {
            ("builtins", "list"): _function(partial(make, list)),
            ("builtins", "dict"): _function(partial(make, dict)),
            ("_struct", "unpack"): _function(unpack),
        }

    @override
    def find_class(self, module: str, name: str) -> Any:
        found = self._counting.get((module, name)) or _STAND_INS.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no metadata have")
        return found
