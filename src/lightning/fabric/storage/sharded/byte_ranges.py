"""The bytes of a part of a tensor that is stored row by row."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightning.fabric.storage.sharded.checksums import BLOCK
from lightning.fabric.storage.transport.ranged_file import REQUEST

#: The most bytes that are read although they are not wanted, for that takes less time than another request: a store
#: answers after 10 to 30 ms, in which a connection carries 1 MiB and more.
GAP = 2**20


class Box(NamedTuple):
    """A box of elements that is read together.

    Attributes:
        offsets: The index of its first element in the part of the tensor.
        lengths: Its shape, in elements.
        start: The offset of its first byte in the tensor's data.
        stop: The offset of the byte after its last one there.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int
    stop: int

    @property
    def slices(self) -> tuple[slice, ...]:
        """Returns the index of the box in a tensor of the part's shape."""
        return tuple(slice(offset, offset + length) for offset, length in zip(self.offsets, self.lengths, strict=True))


class ByteRange:
    """A part of a tensor, in bytes.

    Args:
        shape: The shape of the tensor, which is contiguous.
        offsets: The index of the part's first element.
        lengths: The shape of the part, in elements.
        itemsize: Bytes of one element.

    Raises:
        ValueError: The tensor has no such part.
    """

    def __init__(self, shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], itemsize: int) -> None:
        inside = len(shape) == len(offsets) == len(lengths) and all(
            0 <= offset <= offset + length <= size for size, offset, length in zip(shape, offsets, lengths, strict=True)
        )
        if not inside:
            raise ValueError(f"A tensor of the shape {list(shape)} has no {list(lengths)} at {list(offsets)}")
        self.lengths = tuple(lengths)
        self.itemsize = itemsize
        #: Bytes of the part.
        self.nbytes = math.prod(lengths) * itemsize
        #: Elements from one index to the next, in each dimension of the tensor.
        self.strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        self._start = itemsize * sum(offset * stride for offset, stride in zip(offsets, self.strides, strict=True))

    @property
    def is_dense(self) -> bool:
        """Returns whether its bytes are one run."""
        return self._span(0) == self.nbytes

    def flat(self) -> "ByteRange":
        """Returns the same bytes, which are dense, as a part of a tensor with one dimension."""
        first, count = self._start // self.itemsize, self.nbytes // self.itemsize
        return ByteRange((first + count,), (first,), (count,), self.itemsize)

    def boxes(self, unlimited: bool) -> Iterator[Box]:
        """Cuts the part where its bytes are far apart or too many for one request.

        Args:
            unlimited: Whether bytes that are one run need not be cut.

        Returns:
            The boxes, by their first byte. One that is limited is at most as large as a request, with the blocks that
            it touches. It covers all of the part in every dimension after the one where the part was cut.
        """
        if self.nbytes:
            yield from self._cut((), self._start, unlimited)

    def _span(self, dim: int) -> int:
        """Returns the bytes from the first to the last of one index in each dimension before ``dim``."""
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
    """Returns the last byte, exclusive, of the largest request that begins with the block of ``start``."""
    return start // BLOCK * BLOCK + REQUEST
