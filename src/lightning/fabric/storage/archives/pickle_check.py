"""Checks the tensors in the pickle of an archive of ``torch.save``, without running code of it.

With ``weights_only=True`` torch runs none either, but it believes the sizes there: it reads beyond the record of a
tensor that is larger than that, and a few bytes can ask for any amount of memory.
"""

import dataclasses
import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from typing_extensions import override

#: The most tuples in each other: they are hashed in a recursion that only the stack limits.
_NESTED = 500
#: The objects that a pickle may make of data that are used more than once: for each byte of it and of the tensors, and
#: beside that.
_PER_BYTE = 16
_BESIDE = 2**24
#: The most characters in the reported name of a tensor.
_NAME = 500
#: The types of the elements of storages, by the storage's class.
_DTYPES: dict[str, torch.dtype] = torch.storage._storage_type_to_dtype_map()


def check_pickle(data: bytes, sizes: Mapping[str, int]) -> Any:
    """Checks the pickle of an archive, and returns its object, with stand-ins for what its code would make.

    Args:
        data: The pickle.
        sizes: Bytes of the data of each record, by its name without the archive's own.

    Raises:
        Exception: Of any kind: the pickle is damaged, or a tensor is not within its record.
    """
    unpickler = _Unpickler(data, sizes)
    loaded = unpickler.load()
    if unpickler.rest():
        raise pickle.UnpicklingError("there are bytes after its end")
    return loaded


def tensor_in(loaded: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Returns the type and the shape, if an object of :func:`check_pickle` is one tensor and nothing else."""
    return (loaded.dtype, tuple(loaded.parts[2])) if isinstance(loaded, _Inert) and loaded.dtype else None


def names_of_records(loaded: Any) -> dict[str, str]:
    """Returns the names of tensors in an object of :func:`check_pickle`, by the records with their data."""
    return {f"data/{key}": name for key, name in reversed([*_names_of_storages(loaded)])}  # the first stays


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


@dataclasses.dataclass(frozen=True)
class _Storage:
    """Stand-in for a tensor's storage."""

    key: str
    nbytes: int
    dtype: torch.dtype


class _Tuple(tuple[Any, ...]):
    """A tuple with the number of tuples in each other."""

    depth: int

    @classmethod
    def of(cls, items: Any) -> "_Tuple":
        made = cls(items)
        made.depth = 1 + max((item.depth for item in made if type(item) is cls), default=0)
        if made.depth > _NESTED:
            raise pickle.UnpicklingError("tuples are nested too deep")
        return made


class _Inert:
    """Stand-in for a function or class of a pickle, and for what it makes, so that no code runs."""

    module = name = ""
    unpickler: "_Unpickler"
    parts: list[Any]
    #: Set for a tensor whose data are in a record.
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
    """Returns the type of a tensor's elements: that of its storage, unless the pickle names another one."""
    named = [getattr(torch, one.name, None) for one in others if isinstance(one, type) and issubclass(one, _Inert)]
    return next((dtype for dtype in named if isinstance(dtype, torch.dtype)), storage.dtype)


def _numel_of(storage: _Storage, itemsize: int, offset: Any, size: Any, stride: Any) -> int:
    """Returns the number of elements of a tensor, which has to be within its storage."""
    numbers = [offset, *size, *stride]
    if len(size) != len(stride) or not all(type(number) is int and number >= 0 for number in numbers):
        raise pickle.UnpicklingError(f"the tensor in record {storage.key!r:.200} has no size")
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    numel: int = math.prod(size)
    if numel and (last + 1) * itemsize > storage.nbytes:
        raise pickle.UnpicklingError(f"the tensor in record {storage.key!r:.200} is larger than that")
    return numel


class _Unpickler(pickle._Unpickler):  # the one in C makes tuples by itself
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
        """Returns the first byte behind the pickle, if there is one."""
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

    def _load_short_tuple(self, count: int) -> None:
        self.stack[-count:] = [_Tuple.of(self.stack[-count:])]

    dispatch[pickle.TUPLE[0]] = _load_tuple
    for _opcode, _count in ((pickle.TUPLE1, 1), (pickle.TUPLE2, 2), (pickle.TUPLE3, 3)):
        dispatch[_opcode[0]] = partial(_load_short_tuple, count=_count)
