"""The memory of one staged copy after the other."""

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from lightning.fabric.storage.background.host_memory import ALIGNMENT, HostMemory
from lightning.fabric.storage.device_copies import has_streams


class Spot(NamedTuple):
    """A place in memory for a copy of a tensor.

    Attributes:
        memory: The memory.
        tensor: The tensor there.
    """

    memory: HostMemory
    tensor: Tensor


class Slot:
    """The memory of one copy: what was allocated at first, and more for what a state has grown by."""

    def __init__(self) -> None:
        #: Bytes that it has, or for which memory is being prepared.
        self.size = 0
        #: The accelerator that the memory is pinned for.
        self.device: torch.device | None = None
        self._blocks: list[HostMemory] = []
        self._warming: threading.Thread | None = None

    def warm(self, size: int, device: torch.device | None) -> None:
        """Allocates memory in a thread, unless there is as much, or that has been begun."""
        if self._warming is None and size > self.size:
            more, self.size = size - self.size, size
            self._warming = threading.Thread(
                target=self._warm, args=(more, device), name="warm-checkpoint-memory", daemon=True
            )
            self._warming.start()

    def reserve(self, sources: list[Tensor]) -> list[Spot]:
        """Returns a place for each tensor, in memory that is pinned if one of them is on an accelerator."""
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        device = next((source.device for source in sources if has_streams(source.device)), None)
        sizes = [-(-source.nbytes // ALIGNMENT) * ALIGNMENT for source in sources]
        if self.device is None and device is not None:
            self._free()
        places = self._places(sizes)
        missing, needed = sum(size for size, place in zip(sizes, places, strict=True) if place is None), sum(sizes)
        # a state that has grown may go on growing, and new memory takes longer than a copy
        spare = needed // 8 if self._blocks else 0
        if missing and self.size + missing > needed + needed // 2:  # there is memory, but in the wrong pieces
            self._free()
            missing = needed
        if missing or not self._blocks:
            self._allocate(missing + spare, device)
            places = self._places(sizes)
        found = [(self._blocks[place[0]], place[1]) for place in places if place is not None]
        return [Spot(of, of.tensor(at, to.dtype, to.shape)) for (of, at), to in zip(found, sources, strict=True)]

    def _places(self, sizes: list[int]) -> list[tuple[int, int] | None]:
        """Returns, for each size, the number of the first block with room for it and the offset there, if any has."""
        filled = [0] * len(self._blocks)
        places: list[tuple[int, int] | None] = []
        for size in sizes:
            number = next((of for of, block in enumerate(self._blocks) if filled[of] + size <= block.size), None)
            places.append(None if number is None else (number, filled[number]))
            if number is not None:
                filled[number] += size
        return places

    def _warm(self, size: int, device: torch.device | None) -> None:
        try:
            self._allocate(size, device)
            if self.device is None:  # else it has been touched, to be pinned
                self._blocks[-1].touch()
        except (MemoryError, RuntimeError):  # also for there are no more threads at the end of the process
            self.size -= size  # the first save tries again, and raises the error

    def _allocate(self, size: int, device: torch.device | None) -> None:
        self.device = self.device or device
        self._blocks.append(HostMemory(size, self.device))
        self.size = sum(block.size for block in self._blocks)

    def _free(self) -> None:
        """Lets go of the memory, before other memory takes its place: there must not be twice as much."""
        while self._blocks:
            registered = self._blocks.pop().registered
            if registered is not None:
                registered.wait_if_freed()
        self.size, self.device = 0, None
