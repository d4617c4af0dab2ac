"""Read requests for the items of a load plan, and their way from a file of the checkpoint to the planner."""

import heapq
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from lightning.fabric.storage.archives.load import load_bytes
from lightning.fabric.storage.sharded.byte_ranges import REQUEST, Box, ByteRange
from lightning.fabric.storage.sharded.checksums import BLOCK, Record

#: Bytes from which on a run is read into a target's own memory. A smaller one shares its request with its neighbours,
#: and is copied.
_DIRECT = 4 * 2**20
#: The most bytes of an object that an extension of torch has compressed, and of an archive beside those of its tensor.
_OBJECT = 128 * 2**20
_AROUND = 2**20


class Damaged(Exception):
    """The metadata of a tensor cannot be true; the text says why."""


class Unloadable(Exception):
    """torch finds no tensor in a record; the text names it and says why."""


@dataclass
class ReadRequest:
    """Bytes of a file to read, and a function that takes them.

    Args:
        start: The offset of the first byte in the file.
        stop: The offset of the byte after the last.
        name: The name of the tensor or object that they belong to.
        done: Called with the bytes in the planner's thread, or with None if they were read into ``into``. Returns the
            number of bytes of memory that it frees.
        checks: The blocks among them, each with its start and stop in the file, the checksum to go on from and the one
            to reach, which is None if there are no checksums.
        into: The memory to read them into, if they do not share some with their neighbours.
        cost: Bytes of memory that were allocated for them.
    """

    start: int
    stop: int
    name: str
    done: Callable[[Tensor | None], int]
    checks: Sequence[tuple[int, int, int, int | None]] = ()
    into: memoryview | None = None
    cost: int = 0


class RecordPlace(NamedTuple):
    """The bytes of an item in a file. Its record is None if that is an archive without checksums."""

    offset: int
    length: int
    transforms: Sequence[str]
    record: Record | None


class ReadRequests:
    """Makes the read requests of items.

    Args:
        metadata: The checkpoint's metadata.
        planner: Gives the memory of an item's tensor when its first byte is about to be read. Its ``commit_tensor`` is
            called when the last one has been read.
    """

    def __init__(self, metadata: Metadata, planner: LoadPlanner) -> None:
        self._metadata = metadata
        self._planner = planner

    def of(self, place: RecordPlace, items: list[ReadItem]) -> Iterator[ReadRequest]:
        """Yields the read requests of all items of one record, by their first byte."""
        record = place.record
        if record is None or not record.is_tensor or place.transforms or items[0].type == LoadItemType.BYTE_IO:
            return self._of_whole(place, items)
        return heapq.merge(*(self._of_tensor(record, item) for item in items), key=lambda request: request.start)

    def _of_tensor(self, record: Record, item: ReadItem) -> Iterator[ReadRequest]:
        index = item.storage_index
        described = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[index.fqn])
        dtype, shape = described.properties.dtype, _shape_of_chunk(described.chunks, index)
        if math.prod(shape) * dtype.itemsize != record.nbytes:
            raise Damaged(f"{index.fqn!r} has {record.nbytes} bytes, which are not {list(shape)} of {dtype}")
        part = ByteRange(shape, item.storage_offsets, item.lengths, dtype.itemsize)
        target = self._target(item)
        if not part.nbytes:
            self._planner.commit_tensor(item, target)
            return
        flat = target
        if part.is_dense and target.is_contiguous():
            part, flat = part.flat(), target.reshape(-1)
        yield from _TensorLoad(item, self._planner, target, flat, record, part, dtype).requests()

    def _target(self, item: ReadItem) -> Tensor:
        target = self._planner.resolve_tensor(item).detach()
        if target.size() != torch.Size(item.lengths):
            raise ValueError(
                f"{item.storage_index.fqn!r} is loaded into a tensor of the size {list(target.size())}, but the"
                f" checkpoint has {list(item.lengths)} for it: is it a checkpoint of this model?"
            )
        return target

    def _of_whole(self, place: RecordPlace, items: list[ReadItem]) -> Iterator[ReadRequest]:
        """Yields the request of a whole record, or several for pieces of a large one, read into one file in memory."""
        offset, length = place.offset, place.length
        name = items[0].storage_index.fqn
        checks = place.record.blocks() if place.record is not None else []

        def done(data: Tensor | None) -> int:
            assert data is not None
            self._deliver(place, items, io.BytesIO(data.numpy().tobytes()))
            return 0

        if length == 0:
            self._deliver(place, items, io.BytesIO())
        elif length < _DIRECT:
            yield ReadRequest(offset, offset + length, name, done, checks)
        else:
            file = io.BytesIO(bytes(length))
            cuts = _cuts(offset, offset + length, [start for start, *_ in checks])
            views = [file.getbuffer()[start - offset : stop - offset] for start, stop in cuts]
            left = length

            def placed(view: memoryview, _: Tensor | None) -> int:
                nonlocal left
                left -= len(view)
                view.release()
                if left:
                    return 0
                self._deliver(place, items, file)
                return length

            for (start, stop), view in zip(cuts, views, strict=True):
                those = [check for check in checks if start <= check[0] < stop]
                cost = length if start == offset else 0
                yield ReadRequest(start, stop, name, partial(placed, view), those, view, cost)

    def _deliver(self, place: RecordPlace, items: list[ReadItem], file: io.BytesIO) -> None:
        """Hands the bytes of a record to the planner, or the tensor in it."""
        if items[0].type == LoadItemType.BYTE_IO:
            for item in items:
                file.seek(0)
                self._planner.load_bytes(item, io.BytesIO(_transformed(place, item, file, _OBJECT).getbuffer()))
            return
        index = items[0].storage_index
        described = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[index.fqn])
        try:
            shape = _shape_of_chunk(described.chunks, index)
            most = math.prod(shape) * described.properties.dtype.itemsize + _AROUND
            saved = load_bytes(_transformed(place, items[0], file, most), "cpu", weights_only=True)
            if not isinstance(saved, Tensor) or saved.size() != shape:
                raise ValueError(f"there is no tensor of the size {list(shape)}")
        except Exception as error:
            raise Unloadable(f"{index.fqn!r} ({type(error).__name__}: {error})") from error
        for item in items:
            part = narrow_tensor_by_index(saved, item.storage_offsets, item.lengths)
            target = self._target(item)
            target.copy_(part)
            self._planner.commit_tensor(item, target)


def _shape_of_chunk(chunks: list[ChunkStorageMetadata], index: MetadataIndex) -> torch.Size:
    if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == index.offset:
        return torch.Size(chunks[index.index].sizes)
    offset = index.offset if index.offset is not None else torch.Size([0] * len(chunks[0].sizes))
    for chunk in chunks:
        if chunk.offsets == offset:
            return torch.Size(chunk.sizes)
    raise Damaged(f"the metadata have no chunk at {list(offset)} of {index.fqn!r}")


def _cuts(start: int, stop: int, blocks: list[int]) -> list[tuple[int, int]]:
    """Returns pieces that are at most as large as a request, and hold whole blocks if there are any."""
    cuts, first = [], start
    while first < stop:
        end = min(first + REQUEST, stop)
        if end < stop and blocks:
            end = max(block for block in blocks if first < block <= end)
        cuts.append((first, end))
        first = end
    return cuts


def _transformed(place: RecordPlace, item: ReadItem, file: io.BytesIO, most: int) -> io.BytesIO:
    """Undoes what an extension of torch.distributed.checkpoint did to the record, such as compression.

    Raises:
        Unloadable: More than ``most`` bytes come out, which are held in memory.
    """
    if not place.transforms:
        return file
    from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms

    stream = _StorageReaderTransforms().transform_load_stream(item, place.transforms, file)
    made = io.BytesIO()
    while piece := stream.read(_DIRECT):
        made.write(piece)
        if made.tell() > most:
            raise Unloadable(f"{item.storage_index.fqn!r}, which becomes more than {most} bytes")
    made.seek(0)
    return made


@dataclass
class _TensorLoad:
    """A tensor that is being read, as a part of a record."""

    item: ReadItem
    planner: LoadPlanner
    #: The planner's tensor.
    target: Tensor
    #: The same memory, with the dimensions of the part.
    shaped: Tensor
    record: Record
    part: ByteRange
    dtype: torch.dtype
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.part.nbytes
        blocks = self.record.blocks()
        self._blocks = blocks[1 : 1 + -(-self.record.nbytes // BLOCK)]  # after the head

    def requests(self) -> Iterator[ReadRequest]:
        memory = _memory_of(self.shaped) if self.shaped.dtype == self.dtype else None
        for box in self.part.boxes(unlimited=memory is not None):
            count = self.part.itemsize * math.prod(box.lengths)
            if memory is not None and box.stop - box.start == count:
                at = self.part.itemsize * sum(
                    offset * stride for offset, stride in zip(box.offsets, self.shaped.stride(), strict=True)
                )
                yield from self._of_run(box.start, box.stop, memory[at : at + count])
            else:
                yield self._request(box.start, box.stop, partial(self._place_box, box))

    def _of_run(self, start: int, stop: int, memory: "np.ndarray[Any, Any]") -> Iterator[ReadRequest]:
        """Yields requests that read whole blocks into the memory itself if they are many, and copy the rest.

        Only of whole blocks can checksums be verified.
        """
        first = -(-start // BLOCK) * BLOCK
        last = stop if stop == self.record.nbytes else stop // BLOCK * BLOCK
        if last - first < _DIRECT:
            yield self._request(start, stop, partial(self._place_run, start, memory))
            return
        if start < first:
            yield self._request(start, first, partial(self._place_run, start, memory[: first - start]))
        requests = -(-(last - first) // REQUEST)
        size = -(-(last - first) // (requests * BLOCK)) * BLOCK
        for at in range(first, last, size):
            end = min(at + size, last)
            view = memory[at - start : end - start].data
            yield self._request(at, end, partial(self._placed, end - at), view)
        if last < stop:
            yield self._request(last, stop, partial(self._place_run, last, memory[last - start :]))

    def _request(self, start: int, stop: int, done: Callable[..., int], into: memoryview | None = None) -> ReadRequest:
        """Returns a request for the blocks that hold the tensor's bytes from ``start`` to ``stop``."""
        blocks = self._blocks[start // BLOCK : -(-stop // BLOCK)]
        return ReadRequest(blocks[0][0], blocks[-1][1], self.item.storage_index.fqn, done, blocks, into)

    def _place_run(self, start: int, memory: "np.ndarray[Any, Any]", data: Tensor) -> int:
        at = start % BLOCK
        np.copyto(memory, data.numpy()[at : at + len(memory)])  # torch would wake its threads for a few KiB
        return self._placed(len(memory))

    def _place_box(self, box: Box, data: Tensor) -> int:
        at = box.start % BLOCK
        data = data[at : at + box.stop - box.start]
        if data.storage_offset() % self.dtype.itemsize:  # no address for an element
            data = data.clone()
        saved = data.view(self.dtype).as_strided(box.lengths, self.part.strides)
        self.shaped[box.slices].copy_(saved)
        return self._placed(self.part.itemsize * saved.numel())

    def _placed(self, count: int, _: Tensor | None = None) -> int:
        self.left -= count
        if not self.left:
            self.planner.commit_tensor(self.item, self.target)
        return 0


def _memory_of(tensor: Tensor) -> "np.ndarray[Any, Any] | None":
    """Returns a view of a tensor's bytes in host memory, or None if they are not one run or no plain values."""
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not is_plain or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.reshape(-1).view(torch.uint8).numpy()
