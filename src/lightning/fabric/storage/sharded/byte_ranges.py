"""Which bytes of a tensor, stored row by row, a region of it needs."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning.fabric.storage.sharded.checksums import BLOCK
from lightning.fabric.storage.transport.ranged_file import REQUEST

#: Bytes that nobody needs and that are read all the same, for that takes less time than another request: a store
#: answers after 10 to 30 ms, in which a connection carries 1 MiB and more.
GAP = 2**20


class Box(NamedTuple):
    """A part of a region that is read together.

    Attributes:
        offsets: Of its first element in the region, in each dimension.
        lengths: In elements, in each dimension.
        start: Of its first byte in the tensor's data.
        stop: Of the byte after its last one there.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    stop: int

    @property
    def slices(self) -> tuple[slice, ...]:
        """What a tensor of the region's size is indexed with for it."""
        return tuple(slice(offset, offset + length) for offset, length in zip(self.offsets, self.lengths, strict=True))


class ByteRange:
    """A region of a tensor.

    Args:
        shape: Of the tensor, which is contiguous.
        offsets: Of the region's first element, in each dimension.
        lengths: Of the region in elements, in each dimension.
        itemsize: Bytes of one element.

    Raises:
        ValueError: The tensor has no such region.
    """

    def __init__(self, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int) -> None:
        inside = len(shape) == len(offsets) == len(lengths) and all(
            0 <= offset <= offset + length <= size for size, offset, length in zip(shape, offsets, lengths, strict=True)
        )
        if not inside:
            raise ValueError(f"A tensor of the shape {list(shape)} has no {list(lengths)} at {list(offsets)}")
        self.lengths = tuple(lengths)
        self.itemsize = itemsize
        #: Bytes of the region.
        self.nbytes = math.prod(lengths) * itemsize
        #: Elements from one index to the next, in each dimension of the tensor.
        self.strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        self._start = itemsize * sum(offset * stride for offset, stride in zip(offsets, self.strides, strict=True))

    @property
    def is_dense(self) -> bool:
        """Whether its bytes are one run."""
        return self._span(0) == self.nbytes

    def flat(self) -> "ByteRange":
        """The same of a tensor with one dimension; for a region that is dense."""
        first, count = self._start // self.itemsize, self.nbytes // self.itemsize
        return ByteRange((first + count,), (first,), (count,), self.itemsize)

    def boxes(self, unlimited: bool) -> Iterator[Box]:
        """Cuts the region, unless it is empty, where its bytes are far apart or too many for one request.

        Args:
            unlimited: Bytes that are one run need not be cut.

        Returns:
            The boxes, by their first byte. With the blocks that it touches, one that is limited is as large as a
            request at most. It covers all of the region in every dimension after the one where the region was cut.
        """
        if self.nbytes:
            yield from self._cut((), self._start, unlimited)

    def _span(self, dim: int) -> int:
        """Bytes from the first to the last, of what has one index in each dimension before ``dim``."""
        inner = zip(self.lengths[dim:], self.strides[dim:], strict=True)
        return self.itemsize * (1 + sum((length - 1) * stride for length, stride in inner))

    def _cut(self, at: tuple[int, ...], start: int, unlimited: bool) -> Iterator[Box]:
        dim = len(at)
        inner = self.lengths[dim:]
        span = self._span(dim)
        is_run = span == math.prod(inner) * self.itemsize
        if (is_run and unlimited) or start + span <= _limit(start):
            yield Box(at + (0,) * len(inner), (1,) * dim + inner, start, start + span)
            return
        pitch, row = self.strides[dim] * self.itemsize, self._span(dim + 1)
        if pitch - row > GAP or row > REQUEST - 2 * BLOCK:
            for index in range(inner[0]):
                yield from self._cut((*at, index), start + index * pitch, unlimited)
            return
        index = 0
        while index < inner[0]:
            first = start + index * pitch
            count = min(inner[0] - index, 1 + (_limit(first) - first - row) // pitch)
            lengths = (1,) * dim + (count, *inner[1:])
            yield Box((*at, index) + (0,) * (len(inner) - 1), lengths, first, first + (count - 1) * pitch + row)
            index += count


def _limit(start: int) -> int:
    """Up to where one request can go that begins with the block of ``start``."""
    return start // BLOCK * BLOCK + REQUEST
