"""Read requests for the items of a load plan, and their way from a file of the checkpoint to the planner."""

import heapq
import io
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from lightning.fabric.storage.archives.load import load_bytes
from lightning.fabric.storage.sharded.byte_ranges import REQUEST, ByteRange
from lightning.fabric.storage.sharded.checksums import Record
from lightning.fabric.storage.sharded.tensor_requests import DIRECT, ReadRequest, TensorLoad

#: The most bytes of an object that an extension of torch has compressed, and of an archive beside those of its tensor.
_OBJECT = 128 * 2**20
_AROUND = 2**20


class Damaged(Exception):
    """The metadata of a tensor cannot be true; the text says why."""


class Unloadable(Exception):
    """torch finds no tensor in a record; the text names it and says why."""


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
        yield from TensorLoad(item, self._planner, target, flat, record, part, dtype).requests()

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
        elif length < DIRECT:
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
    while piece := stream.read(DIRECT):
        made.write(piece)
        if made.tell() > most:
            raise Unloadable(f"{item.storage_index.fqn!r}, which becomes more than {most} bytes")
    made.seek(0)
    return made
