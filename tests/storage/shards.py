"""Sharded checkpoints of any world, which one process makes and plans to load."""

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from typing_extensions import override

from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.sharded import metadata_file
from lightning.fabric.storage.sharded.checksums import FileRecords, Record
from lightning.fabric.storage.sharded.record_writer import RecordWriter
from lightning.fabric.storage.transport.open import open_writer

#: How a tensor is cut: the offsets and sizes of its chunks.
Cut = Callable[[torch.Size], list[ChunkStorageMetadata]]


def along(dim: int, parts: int) -> Cut:
    """Cuts as FSDP2 does: the last parts may be smaller than the others, or have nothing."""

    def cut(size: torch.Size) -> list[ChunkStorageMetadata]:
        if dim >= len(size):
            return whole(size)
        step = -(-size[dim] // parts)
        starts = range(0, size[dim], step) if size[dim] else [0]
        return [
            ChunkStorageMetadata(
                torch.Size(start if d == dim else 0 for d in range(len(size))),
                torch.Size(min(step, size[dim] - start) if d == dim else size[d] for d in range(len(size))),
            )
            for start in starts
        ]

    return cut


def whole(size: torch.Size) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size([0] * len(size)), size)]


def slices(chunk: ChunkStorageMetadata) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))


def make(
    folder: Path,
    tensors: dict[str, Tensor],
    cut: Cut = whole,
    objects: dict[str, Any] | None = None,
    ranks: int = 2,
    checksums: bool = True,
) -> Metadata:
    """Writes the shards of a checkpoint as ours, or as torch's without checksums, and describes them."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = Metadata({}, storage_data={})
    shards: dict[str, list[tuple[MetadataIndex, Any]]] = {f"__{rank}_0.distcp": [] for rank in range(ranks)}
    for name, tensor in tensors.items():
        chunks = cut(tensor.size())
        properties = TensorProperties(dtype=tensor.dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.size(), chunks)
        for number, chunk in enumerate(chunks):
            part = tensor[slices(chunk)].clone(memory_format=torch.contiguous_format)
            shards[f"__{number % ranks}_0.distcp"].append((MetadataIndex(name, chunk.offsets, number), part))
    for name, value in (objects or {}).items():
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        saved = io.BytesIO()
        torch.save(value, saved)
        shards["__0_0.distcp"].append((MetadataIndex(name), saved))
    records = {}
    for name, items in shards.items():
        with open_writer(locate(folder / name)) as file:
            records[name] = [_append(file, value, checksums) for _, value in items]
        for (index, _), record in zip(items, records[name], strict=True):
            metadata.storage_data[index] = _StorageInfo(name, record.offset, record.length)
    if checksums:
        metadata_file.describe(metadata, None, {name: FileRecords.of(of_file) for name, of_file in records.items()})
    return metadata


def _append(file: Any, value: Tensor | io.BytesIO, checksums: bool) -> Record:
    if checksums:
        return RecordWriter(file).write(value)
    offset = file.tell()
    if isinstance(value, Tensor):
        torch.save(value, file)
    else:
        file.write(value.getbuffer())
    return Record(offset, file.tell() - offset, offset, 0, b"")


@dataclass
class Targets(LoadPlanner):
    """Plans to load chunks of tensors, and keeps what became of it."""

    metadata: Metadata
    plan: LoadPlan = field(default_factory=lambda: LoadPlan([]))
    tensors: dict[MetadataIndex, Tensor] = field(default_factory=dict)
    #: What is loaded besides tensors.
    objects: dict[str, Any] = field(default_factory=dict)
    committed: list[ReadItem] = field(default_factory=list)

    def add(self, name: str, target: Tensor, chunk: ChunkStorageMetadata | None = None) -> None:
        described = self.metadata.state_dict_metadata[name]
        assert isinstance(described, TensorStorageMetadata)
        chunk = chunk or whole(described.size)[0]
        items = create_read_items_for_chunk_list(name, described, [chunk])
        self.tensors[MetadataIndex(name, chunk.offsets)] = target
        self.plan.items += items

    def add_object(self, name: str) -> None:
        index, nothing = MetadataIndex(name), torch.Size((0,))
        self.plan.items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))

    @override
    def set_up_planner(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError

    @override
    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    @override
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    @override
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=False)
        self.committed.append(read_item)

    @override
    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.tensors[read_item.dest_index]
        places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return target[tuple(slice(offset, offset + length) for offset, length in places)]

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.committed.append(read_item)


def targets(metadata: Metadata, names: Iterable[str] = (), objects: Iterable[str] = ()) -> Targets:
    """Whole tensors, not filled yet, and objects, to load."""
    made = Targets(metadata)
    for name in names:
        described = metadata.state_dict_metadata[name]
        assert isinstance(described, TensorStorageMetadata)
        made.add(name, torch.zeros(described.size, dtype=described.properties.dtype))
    for name in objects:
        made.add_object(name)
    return made
