"""Read requests for a tensor: a part of a record, into the memory of the planner's tensor."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from lightning.fabric.storage.sharded.byte_ranges import REQUEST, Box, ByteRange
from lightning.fabric.storage.sharded.checksums import BLOCK, Record

#: Bytes from which on a run is read into a target's own memory. A smaller one shares its request with its neighbours,
#: and is copied.
DIRECT = 4 * 2**20


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


@dataclass
class TensorLoad:
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
        """Yields the requests by their first byte; the last of them that is done commits the tensor."""
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
        if last - first < DIRECT:
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
