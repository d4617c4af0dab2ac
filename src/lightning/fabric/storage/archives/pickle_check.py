"""Sees what the pickle in an archive of ``torch.save`` says of tensors, without running code of it.

With ``weights_only=True`` torch runs none either, but it believes what it is told: a tensor can be said to be larger
than its record, beyond which torch then reads, and a few bytes can ask for any memory.
"""

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from typing_extensions import override

#: Tuples in each other, which are hashed in a recursion that nothing limits but the stack.
_NESTED = 500
#: What may be made of data that are given more than once: for each byte of the pickle and of the tensors, and beside.
_PER_BYTE = 16
_BESIDE = 2**24
#: How long the names of tensors may be that are told.
_NAME = 500
#: Of the elements of storages, by what these are called.
_DTYPES: dict[str, torch.dtype] = torch.storage._storage_type_to_dtype_map()


class Contents:
    """What a pickle says of tensors.

    Args:
        loaded: What was made of the pickle, without its code.
    """

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def names(self) -> dict[str, str]:
        """What the tensors are called whose data are in the records, as far as that can be told."""
        names: dict[str, str] = {}
        for key, name in _names_of_storages(self._loaded):
            names.setdefault(f"data/{key}", name)
        return names

    def tensor(self) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """If the pickle is of a tensor and nothing else, the type of its elements and its shape."""
        if isinstance(self._loaded, _Inert) and self._loaded.dtype is not None:
            return self._loaded.dtype, tuple(self._loaded.parts[2])
        return None


def check_pickle(data: bytes, sizes: Mapping[str, int]) -> Contents:
    """Looks through the pickle of an archive.

    Args:
        data: The pickle.
        sizes: Bytes of each record, by its name in the archive.

    Raises:
        Exception: Of any kind: the pickle is damaged, or a tensor is not within its record.
    """
    unpickler = _Unpickler(data, sizes)
    loaded = unpickler.load()
    if unpickler.rest():
        raise pickle.UnpicklingError("there are bytes after its end")
    return Contents(loaded)


def _names_of_storages(loaded: Any) -> Iterator[tuple[str, str]]:
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", loaded)]
    while stack:
        name, value = stack.pop()
        if id(value) in seen or len(name) > _NAME:
            continue
        if isinstance(value, _Storage):
            yield value.key, name
            continue
        seen.add(id(value))
        before = f"{name}." if name else ""
        if isinstance(value, dict):
            stack += [(f"{before}{key:.{_NAME}}", item) for key, item in value.items() if isinstance(key, str)]
            stack += [(f"{before}{key}", item) for key, item in value.items() if type(key) is int and key < 2**63]
        elif isinstance(value, (list, tuple)):
            stack += [(f"{before}{number}", item) for number, item in enumerate(value)]
        elif isinstance(value, _Inert):
            stack += [(name, list(part) if isinstance(part, tuple) else part) for part in value.parts]


class _Storage:
    """Stands for a tensor's storage."""

    def __init__(self, key: str, nbytes: int, dtype: torch.dtype) -> None:
        self.key = key
        self.nbytes = nbytes
        self.dtype = dtype


class _Tuple(tuple[Any, ...]):
    """A tuple that knows how many are in each other."""

    depth: int

    @classmethod
    def of(cls, items: Any) -> "_Tuple":
        made = cls(items)
        made.depth = 1 + max((item.depth for item in made if type(item) is cls), default=0)
        if made.depth > _NESTED:
            raise pickle.UnpicklingError("tuples are nested too deep")
        return made


class _Inert:
    """Takes the place of a function or class of a pickle, and of what it makes, so that no code of it runs."""

    module = name = ""
    unpickler: "_Unpickler"
    parts: list[Any]
    #: Of a tensor whose data are in a record.
    numel = 0
    dtype: torch.dtype | None = None

    def __new__(cls, *parts: Any, **named: Any) -> "_Inert":
        made = super().__new__(cls)
        made.parts = [*parts, *named.values()]
        if cls.name.startswith("_rebuild_tensor") and isinstance(parts[0], _Storage):
            made.dtype = _dtype_of(parts[0], parts[4:])
            made.numel = _numel_of(parts[0], made.dtype.itemsize, *parts[1:4])
        else:
            cls.unpickler.spend(len(parts) + sum(map(cls._cost_of, made.parts)))
        return made

    @classmethod
    def _cost_of(cls, part: Any) -> int:
        if isinstance(part, _Inert):
            return part.numel
        if type(part) is int and (cls.module == "builtins" or cls.name.endswith(("Tensor", "Storage"))):
            return abs(part)
        return len(part) if isinstance(part, (str, bytes, bytearray, list, tuple, dict)) else 0

    def __setstate__(self, state: Any) -> None:
        self.parts.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.parts.append({key: value})

    def append(self, value: Any) -> None:
        self.parts.append(value)

    add = append

    def extend(self, values: Any) -> None:
        self.parts += values


def _dtype_of(storage: _Storage, others: tuple[Any, ...]) -> torch.dtype:
    """The type of a tensor's elements: that of its storage, unless another one is named."""
    named = [getattr(torch, one.name, None) for one in others if isinstance(one, type) and issubclass(one, _Inert)]
    return next((dtype for dtype in named if isinstance(dtype, torch.dtype)), storage.dtype)


def _numel_of(storage: _Storage, itemsize: int, offset: Any, size: Any, stride: Any) -> int:
    """The number of elements of a tensor, which has to be within its storage."""
    numbers = [offset, *size, *stride]
    if len(size) != len(stride) or not all(type(number) is int and number >= 0 for number in numbers):
        raise pickle.UnpicklingError(f"the tensor in record {storage.key!r:.200} has no size")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    numel: int = math.prod(size)
    if numel and (last + 1) * itemsize > storage.nbytes:
        raise pickle.UnpicklingError(f"the tensor in record {storage.key!r:.200} is larger than that")
    return numel


class _Unpickler(pickle._Unpickler):  # C's has no hold on what it makes
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes, sizes: Mapping[str, int]) -> None:
        self._file = io.BytesIO(data)
        super().__init__(self._file, encoding="bytes")
        self._sizes = sizes
        self._left = _BESIDE + _PER_BYTE * (len(data) + sum(sizes.values()))
        self._classes: dict[tuple[str, str], type[_Inert]] = {}

    def rest(self) -> bytes:
        """What is behind the pickle."""
        return self._file.read(1)

    def spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError("it asks for more memory than it has use for")

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        key = module, name
        if key not in self._classes:
            self._classes[key] = type("_Inert", (_Inert,), {"module": module, "name": name, "unpickler": self})
        return self._classes[key]

    @override
    def persistent_load(self, pid: Any) -> Any:
        kind, stored, key, _, numel = pid[:5]
        if kind not in ("storage", b"storage") or type(key) is not str or type(numel) is not int or numel < 0:
            raise pickle.UnpicklingError("there is something in it that is kept elsewhere")
        dtype = torch.uint8 if stored.name == "UntypedStorage" else _DTYPES[stored.name]
        nbytes, size = numel * dtype.itemsize, self._sizes.get(f"data/{key}")
        if size is None or nbytes > size:
            there = "is missing" if size is None else f"has {size} bytes"
            raise pickle.UnpicklingError(f"record {key!r:.200}, of {nbytes} bytes, {there}")
        return _Storage(key, nbytes, dtype)

    def _load_tuple(self) -> None:
        items = self.pop_mark()
        self.append(_Tuple.of(items))

    def _load_tuple1(self) -> None:
        self.stack[-1] = _Tuple.of(self.stack[-1:])

    def _load_tuple2(self) -> None:
        self.stack[-2:] = [_Tuple.of(self.stack[-2:])]

    def _load_tuple3(self) -> None:
        self.stack[-3:] = [_Tuple.of(self.stack[-3:])]

    dispatch[pickle.TUPLE[0]] = _load_tuple
    dispatch[pickle.TUPLE1[0]] = _load_tuple1
    dispatch[pickle.TUPLE2[0]] = _load_tuple2
    dispatch[pickle.TUPLE3[0]] = _load_tuple3
