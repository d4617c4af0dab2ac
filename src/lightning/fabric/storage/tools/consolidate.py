"""Makes one file for ``torch.load`` of a sharded checkpoint, in host memory that does not grow with it.

Objects other than tensors are loaded first, and pickled with stubs in the place of the tensors. Then the tensors are
read in pieces, in the order in which they are written. While one batch of pieces is written, the next is read.
"""

import io
import logging
import math
import pickle
import re
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from typing_extensions import override

from lightning.fabric.storage.archives.archive_writer import Archive, TensorStub
from lightning.fabric.storage.archives.load import load_bytes
from lightning.fabric.storage.archives.tensor_bytes import bytes_of
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.save_report import timed
from lightning.fabric.storage.sharded import metadata_file
from lightning.fabric.storage.sharded.metadata_check import contradictions
from lightning.fabric.storage.sharded.read_plan import read_plan
from lightning.fabric.storage.transport.open import open_writer
from lightning.fabric.storage.transport.sink import Sink
from lightning.fabric.storage.transport.threads import in_thread

log = logging.getLogger(__name__)

#: Bytes of tensors that are read at a time. Two such batches are in memory, unless one tensor is larger.
_BATCH = 64 * 2**20
#: Tensors start at multiples of so many bytes in the memory of a batch.
_ALIGNMENT = 64
#: Bytes of an archive for each tensor, beside the tensor's own, about.
_EXTRA = 256
#: A key of every checkpoint of the Trainer, beside model and optimizer.
_OF_TRAINER = "pytorch-lightning_version"


def consolidate(folder: Place, output: Place) -> None:
    """Writes a sharded checkpoint as one file, whole or not at all.

    The file holds the same as stock Lightning's: the nested dictionaries that were saved, with every tensor whole, and
    beside them the content of ``meta.pt``; and an empty state for optimizers without one. A checkpoint of the Trainer
    has the names of :func:`as_one_of_trainer`.

    Args:
        folder: The checkpoint's folder.
        output: The place of the file.

    Raises:
        FileNotFoundError: There is no complete checkpoint.
        OSError: The checkpoint could not be read or is damaged, or the file could not be written.
        RuntimeError: The checkpoint has an object that cannot be loaded, or is not safe to load.
    """
    metadata, _ = metadata_file.read_metadata(folder)
    for wrong in contradictions(metadata):
        raise OSError(f"{folder} is damaged: its .metadata {wrong}. Load another checkpoint.")
    names: dict[TensorStub, str] = {}
    checkpoint = _without_tensors(folder, metadata, names)
    meta = _meta(folder, metadata)
    if _OF_TRAINER in meta:  # first: the user may have given names in ``meta`` that the shards have as well
        checkpoint = as_one_of_trainer(checkpoint)
    checkpoint.update(meta)
    log.info(f"Consolidating {folder}, a checkpoint of {'the Trainer' if _OF_TRAINER in meta else 'Fabric'}")
    with timed("Consolidated", output) as transfer:
        with open_writer(output, lean=True) as file:
            _write(checkpoint, _Tensors(folder, metadata, names), file)
        transfer.size = file.tell()
    log.info(f"Saved {output} ({transfer.size / 2**20:.1f} MiB)")


def as_one_of_trainer(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Renames model and optimizers, which FSDP and ModelParallel name otherwise, as in the Trainer's files.

    Args:
        checkpoint: The content of the shards.
    """
    found = {int(match[1]): name for name in checkpoint if (match := re.fullmatch("optimizer_([0-9]+)", name))}
    result = {"state_dict" if name == "model" else name: value for name, value in checkpoint.items()}
    optimizers = [result.pop(name) for _, name in sorted(found.items())]
    return {**result, "optimizer_states": optimizers} if optimizers else result


def _write(checkpoint: dict[str, Any], tensors: "_Tensors", file: Sink) -> None:
    archive = Archive()
    head = archive.start(checkpoint)
    sizes = [stub.nbytes if isinstance(stub, TensorStub) else stub.nbytes() for stub in archive.contents]
    file.expect(len(head) + sum(sizes) + _EXTRA * len(sizes))
    file.write(head)
    pieces = tensors.read([content for content in archive.contents if isinstance(content, TensorStub)])
    for content, size in zip(archive.contents, sizes, strict=True):
        file.write(archive.tensor_starts())
        crc = written = 0
        while written < size:
            piece = next(pieces) if isinstance(content, TensorStub) else bytes_of(content)
            data = piece.reshape(-1).view(torch.uint8).numpy().data
            crc = zlib.crc32(data, crc)
            file.write(data)
            written += len(data)
        file.write(archive.tensor_ends(crc))
    file.write(archive.end())


def _without_tensors(folder: Place, metadata: Metadata, names: dict[TensorStub, str]) -> dict[str, Any]:
    """Returns the content of the shards, nested as it was. Tensors are stubs, whose names are put into ``names``."""
    planner, plan, nothing = _LoadPlanner(), LoadPlan([]), torch.Size((0,))
    for name, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            index = MetadataIndex(name)
            plan.items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
    read_plan(folder, metadata, plan, planner)
    nested: dict[str, Any] = {}
    paths = metadata.planner_data or {}
    places = _places(metadata)
    stubs: dict[Hashable, TensorStub] = {}
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            stub = TensorStub(described.properties.dtype, tuple(described.size))
            value: Any = stubs.setdefault((places.get(name), stub.dtype, stub.shape), stub)  # one for tied tensors
            names[value] = name
        else:
            value = planner.objects[name]
        try:
            set_element(nested, paths.get(name, (name,)), value)
        except (TypeError, AttributeError, IndexError) as error:  # another object is in its path
            raise OSError(f"{folder} is damaged: there is no place for {name!r}") from error
    return {name: _with_state(value) for name, value in nested.items()}


def _with_state(value: Any) -> Any:
    """Adds an empty state to an optimizer without one: shards have none then, and torch loads none without."""
    is_without = isinstance(value, dict) and "param_groups" in value and "state" not in value
    return {"state": {}, **value} if is_without else value


def _places(metadata: Metadata) -> dict[str, frozenset[Any]]:
    """Returns the places of the parts of each tensor or object, by name."""
    places: dict[str, set[Any]] = defaultdict(set)
    for index, info in metadata.storage_data.items():
        places[index.fqn].add((index.offset, info.relative_path, info.offset))
    return {name: frozenset(of_name) for name, of_name in places.items()}


def _meta(folder: Place, metadata: Metadata) -> dict[str, Any]:
    content = metadata_file.read_meta(folder, metadata)
    if content is None:
        return {}
    return dict(_load(io.BytesIO(content), f"What {folder} has beside model and optimizer"))


def _load(content: io.BytesIO, what: str) -> Any:
    try:
        return load_bytes(content, "cpu")
    except Exception as error:
        advice = ""
        if isinstance(error, pickle.UnpicklingError):
            advice = " If you trust its author, set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment."
        raise RuntimeError(f"{what} cannot be loaded here:{advice} {type(error).__name__}: {error}") from error


class _LoadPlanner(DefaultLoadPlanner):
    """Gives :func:`read_plan` the memory for pieces of tensors, and keeps the other objects."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[MetadataIndex, Tensor] = {}
        self.objects: dict[str, Any] = {}

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.tensors[index]

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.objects[name] = _load(value, repr(name))


class _Piece(NamedTuple):
    """Consecutive rows of a tensor."""

    name: str
    described: TensorStorageMetadata
    chunk: ChunkStorageMetadata

    @property
    def nbytes(self) -> int:
        return math.prod(self.chunk.sizes) * self.described.properties.dtype.itemsize

    @property
    def room(self) -> int:
        """Returns the bytes that it takes in the memory of its batch."""
        return self.nbytes + -self.nbytes % _ALIGNMENT


class _Tensors:
    """Reads a checkpoint's tensors.

    Args:
        folder: The checkpoint's folder.
        metadata: The checkpoint's metadata.
        names: The names of the tensors in the checkpoint.
    """

    def __init__(self, folder: Place, metadata: Metadata, names: dict[TensorStub, str]) -> None:
        self._folder = folder
        self._metadata = metadata
        self._names = names
        # the reader reads all of a record without checksums, for any part of it
        self._rows_alone = getattr(metadata, "lightning", None) is not None
        # used again and again, for an allocator may not give freed memory back to the system
        self._memory = [torch.empty(_BATCH, dtype=torch.uint8, device="cpu") for _ in range(2)]

    def read(self, stubs: list[TensorStub]) -> Iterator[Tensor]:
        """Yields the tensors' values in pieces, in their order; none of an empty tensor.

        A piece is valid until the next one is taken.
        """
        batches = _filled_batches(piece for stub in stubs for piece in self._pieces(self._names[stub]))
        current = self._begin(next(batches, None))
        while current is not None:
            wait([current])  # in which the waiting thread can be interrupted
            tensors = current.result()
            current = self._begin(next(batches, None))
            yield from tensors

    def _pieces(self, name: str) -> Iterator[_Piece]:
        described = self._metadata.state_dict_metadata[name]
        assert isinstance(described, TensorStorageMetadata)
        size = described.size
        whole = _Piece(name, described, ChunkStorageMetadata(torch.Size([0] * len(size)), size))
        if whole.nbytes <= _BATCH or not self._rows_alone:
            if whole.nbytes:
                yield whole
            return
        step = max(1, _BATCH * size[0] // whole.nbytes)
        for row in range(0, size[0], step):
            offsets, rows = torch.Size([row] + [0] * (len(size) - 1)), min(step, size[0] - row)
            yield _Piece(name, described, ChunkStorageMetadata(offsets, torch.Size([rows, *size[1:]])))

    def _begin(self, batch: list[_Piece] | None) -> "Future[list[Tensor]] | None":
        if batch is None:
            return None
        self._memory.reverse()
        room = sum(piece.room for piece in batch)
        memory = self._memory[0] if room <= _BATCH else torch.empty(room, dtype=torch.uint8, device="cpu")
        return in_thread("checkpoint-consolidate", self._read_batch, batch, memory)

    def _read_batch(self, batch: list[_Piece], memory: Tensor) -> list[Tensor]:
        planner, plan, tensors = _LoadPlanner(), LoadPlan([]), []
        at = 0
        for piece in batch:
            name, described, chunk = piece
            items = create_read_items_for_chunk_list(name, described, [chunk])
            tensor = memory[at : at + piece.nbytes].view(described.properties.dtype).view(chunk.sizes)
            at += piece.room
            planner.tensors[MetadataIndex(name, chunk.offsets)] = tensor
            plan.items.extend(items)
            tensors.append(tensor)
        read_plan(self._folder, self._metadata, plan, planner)
        return tensors


def _filled_batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.room > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.room
    if batch:
        yield batch
