"""Checks whether ``.metadata`` can be true, before anything is read or memory is allocated because of it."""

import math
import re
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

NoneType = type(None)

#: A part of a name, without characters that have a meaning to a store, a shell or a terminal.
_NAME = re.compile(r"[^\0-\x1f\x7f/\\:?#%]+")
#: The most dictionaries in each other, and the most items of all lists together.
_DEPTH = 500
_LISTED = 2**20
_NO_PLACE = "a part of a tensor has no place in it"


def check_metadata(metadata: Metadata) -> None:
    """Checks the types and the bounds of everything that is used.

    Raises:
        ValueError: The metadata cannot be true; the text says why.
        AttributeError: Something is missing.
    """
    _check_tensors(metadata.state_dict_metadata)
    names = _check_storage(metadata.storage_data)
    ours = getattr(metadata, "lightning", None)
    if ours is not None:
        names |= _check_files(ours)
    for name in names:
        check_name(name)
    if metadata.planner_data is not None:
        _check_paths(metadata.planner_data)


def contradictions(metadata: Metadata) -> Iterator[str]:
    """Yields contradictions in the metadata of a checkpoint, each the end of a sentence that begins with them."""
    places = metadata.storage_data
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            if MetadataIndex(name) not in places:
                yield f"do not tell where {name!r:.200} is"
            continue
        if sum(math.prod(chunk.sizes) for chunk in described.chunks) < math.prod(described.size):
            yield f"do not tell where all of {name!r:.200} is"
        for chunk in described.chunks:
            nbytes = math.prod(chunk.sizes) * described.properties.dtype.itemsize
            info = places.get(MetadataIndex(name, chunk.offsets))
            if info is None and nbytes:
                yield f"do not tell where {name!r:.200} is at {list(chunk.offsets)}"
            elif info is not None and nbytes > info.length and not getattr(info, "transform_descriptors", None):
                yield f"have {info.length} bytes for {nbytes} of {name!r:.200}"
    yield from _contradictory_names(metadata)
    ends: dict[str, int] = {}
    for path, start, stop in sorted(
        {(info.relative_path, info.offset, info.offset + info.length) for info in places.values()}
    ):
        if start < ends.get(path, 0):
            yield f"have two records for the bytes from {start} to {ends[path]} of {path}"
        ends[path] = stop


def _contradictory_names(metadata: Metadata) -> Iterator[str]:
    known = metadata.state_dict_metadata.keys()
    for name in {index.fqn for index in metadata.storage_data} - known:
        yield f"do not tell what {name!r:.200} is"
    for name, path in (metadata.planner_data or {}).items():
        if name not in known:
            yield f"do not tell what {name!r:.200} is"
        elif ".".join(map(str, path)) != name:
            yield f"have {name!r:.200} at another place than its name says"


def check_name(name: Any) -> None:
    """Checks that a name is that of a file in the checkpoint's folder, or below it.

    Raises:
        ValueError: The name leads elsewhere.
    """
    parts = name.split("/") if type(name) is str else [""]
    if not all(_NAME.fullmatch(part) and part not in (".", "..") for part in parts):
        raise ValueError(f"it names a file {name!r:.200}, which can be none of the checkpoint's own")


def _expect(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(what)


def _types(values: Iterable[Any], attribute: str | None = None) -> set[type]:
    """Returns the types of many values, or of an attribute of theirs. Loops are in C, for there may be a million."""
    return set(map(type, values if attribute is None else map(attrgetter(attribute), values)))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _check_tensors(described: Any) -> None:
    _expect(type(described) is dict and _types(described) <= {str}, "there is no dictionary of what it has")
    own: list[Any] = []
    offsets: list[Any] = []
    sizes: list[Any] = []
    wholes: list[Any] = []  # for each part, the size of the tensor
    for name, of_name in described.items():
        if type(of_name) is BytesStorageMetadata:
            continue
        is_tensor = type(of_name) is TensorStorageMetadata and type(of_name.properties) is TensorProperties
        _expect(is_tensor and isinstance(of_name.properties.dtype, torch.dtype), f"{name!r:.200} is no tensor")
        _expect(type(of_name.chunks) is list and _types(of_name.chunks) <= {ChunkStorageMetadata}, _NO_PLACE)
        own.append(of_name.size)
        wholes += repeat(of_name.size, len(of_name.chunks))
        offsets += map(attrgetter("offsets"), of_name.chunks)
        sizes += map(attrgetter("sizes"), of_name.chunks)
    _expect(_types(chain(own, offsets, sizes)) <= {torch.Size}, "something has no size")
    dims = [list(map(len, values)) for values in (wholes, offsets, sizes)]
    _expect(dims[0] == dims[1] == dims[2], _NO_PLACE)
    offset, size = _numbers(offsets), _numbers(sizes)
    are_positive = bool((_numbers(own) >= 0).all() and (offset >= 0).all() and (size >= 0).all())
    _expect(are_positive and bool((offset <= _numbers(wholes) - size).all()), _NO_PLACE)


def _numbers(sizes: list[torch.Size]) -> NDArray[np.int64]:
    return np.fromiter(chain.from_iterable(sizes), np.int64)


def _check_storage(storage: Any) -> set[Any]:
    """Checks the places of items, and returns the names of their files."""
    _expect(type(storage) is dict and _types(storage) <= {MetadataIndex}, "there is no dictionary of places")
    infos = storage.values()
    _expect(_types(infos) <= {filesystem._StorageInfo}, "there are places of another kind")
    are_indexes = _types(storage, "fqn") <= {str} and _types(storage, "index") <= {int, NoneType}
    _expect(are_indexes and _types(storage, "offset") <= {torch.Size, NoneType}, "something has no name")
    _expect(_types(infos, "relative_path") <= {str}, "something is in no file")
    for which in ("offset", "length"):
        _expect(_types(infos, which) <= {int}, "something has no place in its file")
        numbers = [*map(attrgetter(which), infos), 0]
        _expect(min(numbers) >= 0 and max(numbers) < 2**62, "something is not within its file")
    if hasattr(filesystem._StorageInfo, "transform_descriptors"):  # since torch 2.7
        transforms = [one for one in map(attrgetter("transform_descriptors"), infos) if one is not None]
        _expect(all(map(_are_names, transforms)), "what was done to something has no names")
    return set(map(attrgetter("relative_path"), infos))


def _are_names(values: Any) -> bool:
    return type(values) in (list, tuple) and len(values) <= _DEPTH and all(type(value) is str for value in values)


def _check_files(ours: Any) -> set[Any]:
    """Checks the files, whose records are checked when they are read, and returns their names."""
    files, meta = ours["files"], ours["meta"]
    _expect(type(files) is dict and (meta is None or meta in files), "files are missing in it")
    for name, described in files.items():
        _expect(type(described) is dict and _is_count(described["size"]), f"the file {name!r:.200} has no size")
    return set(files)


def _check_paths(planner_data: Any) -> None:
    _expect(type(planner_data) is dict, "what torch calls planner data are no dictionary")
    longest: dict[Any, int] = {}
    for path in planner_data.values():
        _expect(type(path) is tuple and 0 < len(path) <= _DEPTH and _are_keys(path), "there is no way to something")
        for depth, part in enumerate(path):
            if type(part) is int:
                longest[path[:depth]] = max(part, longest.get(path[:depth], 0))
    _expect(sum(longest.values()) <= _LISTED, "there are lists that are longer than a checkpoint's")


def _are_keys(path: Iterable[Any]) -> bool:
    return all(type(part) is str or _is_count(part) for part in path)
