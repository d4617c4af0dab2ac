"""Tensors of a ``torch.save`` file whose bytes have not been read, and the reads of the byte ranges that a rank needs.

Such a tensor is on the meta device; torch notes the offset in the file of its storage. It is read as one of a sharded
checkpoint is, many byte ranges at a time.
"""

import math
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning.fabric.storage.archives.without_tensors import OpenedFile
from lightning.fabric.storage.collectives.errors import failures_of_ranks
from lightning.fabric.storage.sharded.checksums import Record
from lightning.fabric.storage.sharded.describable import is_distributed
from lightning.fabric.storage.strategies import load_targets

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

_Key = TypeVar("_Key", bound=Hashable)

#: An attribute of the storages of tensors that have not been read: the file.
_MARK = "_lightning_file"


class _TensorRange(NamedTuple):
    """The byte range of a contiguous tensor in the file."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


def mark_unread(obj: Any, file: OpenedFile) -> int:
    """Marks the tensors in ``obj`` that were left out, and returns how many of the file's storages they are."""
    places = set()

    def mark(tensor: Tensor) -> Tensor:
        is_usual = type(tensor) in (Tensor, torch.nn.Parameter) and load_targets.is_strided(tensor)
        if is_usual and tensor.is_meta and not tensor.is_conj() and not tensor.is_neg():
            storage = tensor.untyped_storage()
            if hasattr(storage, "_checkpoint_offset"):
                setattr(storage, _MARK, file)
                places.add(storage._checkpoint_offset)
        return tensor

    apply_to_collection(obj, Tensor, mark)
    return len(places)


def _is_unread(value: Any) -> bool:
    is_meta = isinstance(value, Tensor) and value.is_meta and value.layout == torch.strided
    return is_meta and hasattr(value.untyped_storage(), _MARK)


def _start_of(tensor: Tensor) -> int:
    """Returns the offset in the file of an unread tensor's storage."""
    return int(tensor.untyped_storage()._checkpoint_offset)  # type: ignore[arg-type]


def filled(tree: Any) -> Any:
    """Returns a copy of a collection with all its tensors read; those that share memory go on sharing it."""
    unread: dict[int, torch.UntypedStorage] = {}

    def collect(tensor: Tensor) -> Tensor:
        if _is_unread(tensor):
            unread[_start_of(tensor)] = tensor.untyped_storage()
        return tensor

    apply_to_collection(tree, Tensor, collect)
    if not unread:
        return tree
    file: OpenedFile = getattr(next(iter(unread.values())), _MARK)
    sizes = {start: storage.nbytes() for start, storage in unread.items()}
    memory = {start: torch.empty(size, dtype=torch.uint8, device="cpu") for start, size in sizes.items()}
    _read(file, memory, {start: _TensorRange(start, torch.uint8, memory[start].size()) for start in unread})

    def fill(tensor: Tensor) -> Tensor:
        if not _is_unread(tensor):
            return tensor
        storage = memory[_start_of(tensor)].untyped_storage()
        filled = torch.empty(0, dtype=tensor.dtype, device="cpu")
        filled.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(filled, tensor.requires_grad)
        return filled.requires_grad_(tensor.requires_grad)

    return apply_to_collection(tree, Tensor, fill)


def read_parts(state: dict[_Key, Any], own: dict[_Key, Any]) -> dict[_Key, Any]:
    """Returns this rank's part of ``state``: in the tensors of ``own``, where it has those, else whole."""
    own = {name: value for name, value in own.items() if _takes(value, state.get(name))}
    direct = {name: state[name] for name in own if _is_unread(state[name]) and state[name].is_contiguous()}
    if direct:
        ranges = {
            name: _TensorRange(_start_of(value) + value.storage_offset() * value.itemsize, value.dtype, value.size())
            for name, value in direct.items()
        }
        file: OpenedFile = getattr(next(iter(direct.values())).untyped_storage(), _MARK)
        _read(file, {name: own[name] for name in direct}, ranges)
    rest = filled({name: value for name, value in state.items() if name not in direct})
    return {name: own[name] if name in direct else _distributed(rest[name], own.get(name)) for name in state}


def _takes(own: Any, value: Any) -> bool:
    """Returns whether a tensor is loaded into the rank's own one, rather than replaces it."""
    if not isinstance(own, Tensor) or not isinstance(value, Tensor) or own.is_meta:
        return False
    return is_distributed(own) or (load_targets.is_writable(own) and own.size() == value.size())


def _distributed(value: Any, like: Any) -> Any:
    """Returns this rank's part of a whole tensor, in the memory of the distributed tensor ``like``, if it is one."""
    if not isinstance(value, Tensor) or not hasattr(like, "device_mesh"):
        return value
    for chunk in _parts_of(like):
        whole = value[tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))]
        like.to_local().detach().copy_(whole)
    return like


def _parts_of(tensor: Tensor) -> "list[ChunkStorageMetadata]":
    """Returns the parts of a distributed tensor that this rank has, but for empty ones."""
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    return [chunk for chunk in _create_chunk_list(tensor) if math.prod(chunk.sizes)]


def _read(file: OpenedFile, targets: Mapping[_Key, Tensor], ranges: Mapping[_Key, _TensorRange]) -> None:
    """Reads the byte ranges into ``targets``, which are tensors in host memory or DTensors."""
    from torch.distributed.checkpoint import DefaultLoadPlanner

    from lightning.fabric.storage.sharded.reader import ShardReader

    class Reader(ShardReader):
        """Checks after each read that the file is still the one whose offsets are used."""

        @override
        def read(self, plan: Any, planner: Any) -> None:
            super().read(plan, planner)
            file.check()

    named = {str(key): key for key in ranges}  # which errors give
    own = {name: targets[key] for name, key in named.items()}
    metadata = _metadata(file, own, {name: ranges[key] for name, key in named.items()})
    reader = Reader(file.place.parent, metadata)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with failures_of_ranks("load", file.place, reader):
        reader.load(own, planner)


def _metadata(file: OpenedFile, targets: dict[str, Tensor], ranges: dict[str, _TensorRange]) -> "Metadata":
    """Describes the file as a sharded checkpoint, of which the rows that this rank needs are the chunks."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

    name = file.place.name
    metadata = Metadata(state_dict_metadata={}, storage_data={})
    records: dict[int, Record] = {}
    for key, tensor_range in ranges.items():
        chunks = list(_rows(targets[key], tensor_range.shape))
        for chunk in chunks:
            record = _record(tensor_range, chunk, records)
            index = MetadataIndex(key, chunk.offsets)
            metadata.storage_data[index] = _StorageInfo(name, record.offset, record.length)
        properties = TensorProperties(dtype=tensor_range.dtype)
        metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, tensor_range.shape, chunks)
    files = {name: {"size": file.size, "records": sorted(map(tuple, records.values()))}}
    metadata.lightning = {"files": files}  # type: ignore[attr-defined]
    return metadata


def _rows(target: Tensor, shape: torch.Size) -> "Iterator[ChunkStorageMetadata]":
    """Yields the parts of the saved tensor that this rank needs, with all their columns: so each is one byte range."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    for part in _parts_of(target):
        offsets = [*part.offsets[:1], *([0] * (len(shape) - 1))]
        yield ChunkStorageMetadata(torch.Size(offsets), torch.Size([*part.sizes[:1], *shape[1:]]))


def _record(whole: _TensorRange, rows: "ChunkStorageMetadata", records: dict[int, Record]) -> Record:
    """Returns the byte range of some rows as a record without checksums; the records of a file differ in offset."""
    row = math.prod(whole.shape[1:]) * whole.dtype.itemsize
    data = whole.start + (rows.offsets[0] * row if rows.offsets else 0)
    nbytes = math.prod(rows.sizes) * whole.dtype.itemsize
    offset = data - 1
    while offset in records and records[offset][2:4] != (data, nbytes):  # views of one memory
        offset -= 1
    return records.setdefault(offset, Record(offset, data + nbytes - offset, data, nbytes, b""))
