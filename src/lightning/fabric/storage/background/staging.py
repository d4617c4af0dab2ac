"""Staged copies of states in host memory, from which checkpoints are written while training goes on.

The tensors' memory is copied, from all devices, into one block that is used for one copy after the other, and
everything else is pickled.
"""

import threading
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from lightning.fabric.storage.archives.tensor_bytes import bytes_of, is_plain, memory_of, rows_of
from lightning.fabric.storage.background.host_memory import ALIGNMENT, HostMemory
from lightning.fabric.storage.background.state_pickler import Pickled
from lightning.fabric.storage.gc_pause import collection_paused


class Staging:
    """Makes copies in memory that it keeps from one to the next, and replaces only by more.

    Args:
        slots: The number of copies for which memory is kept. More of them at a time, such as one in a signal handler
            that saves while a copy is being made, have memory that is freed with them.
    """

    def __init__(self, slots: int = 1) -> None:
        self._lock = threading.RLock()  # a signal handler may save
        self._slots = slots
        self._free = [_Slot() for _ in range(slots)]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def warm(self, size: int, pinned: bool) -> None:
        """Allocates the memory of one copy in a thread; the first copy, which would else do it, waits for the rest.

        Args:
            size: Bytes of the expected tensors. For more, the memory is allocated again.
            pinned: Whether some of the tensors are on CUDA devices.
        """
        device = torch.device("cuda", torch.cuda.current_device()) if pinned else None
        with self._lock:
            if self._free:
                min(self._free, key=lambda slot: slot.size).warm(size, device)

    def stage_object(self, obj: Any) -> "Staged":
        """Copies a state. Its tensors stay tied where they share memory.

        Args:
            obj: Anything that ``torch.save`` takes.

        Returns:
            The copy. Bytes from CUDA devices may be in flight still. The devices' current streams wait for them: what
            is launched from now on does not change the copy.

        Raises:
            pickle.PicklingError: A part of the object cannot be pickled; the message names it.
            RuntimeError: Tensors of different types share memory, which ``torch.save`` does not take.
            MemoryError: The host has not enough memory.
        """
        return self.stage_tensors((), obj)

    def stage_tensors(self, tensors: Sequence[Tensor], obj: Any = None) -> "Staged":
        """Copies tensors, each into a storage of its own, and one object, as :meth:`stage_object` does.

        Args:
            tensors: Tensors of any kind. One that comes twice is copied once.
            obj: Anything that ``torch.save`` takes.
        """
        slot = self._take()
        staged = Staged(self, slot)
        try:
            with collection_paused():
                self._stage(staged, slot, tensors, obj)
        except BaseException:
            staged.release()
            raise
        return staged

    def _take(self) -> "_Slot":
        with self._lock:
            self._free.sort(key=lambda slot: slot.size)
            return self._free.pop() if self._free else _Slot()

    def _give_back(self, slot: "_Slot") -> None:
        with self._lock:
            if len(self._free) < self._slots:
                self._free.append(slot)

    def _stage(self, staged: "Staged", slot: "_Slot", tensors: Sequence[Tensor], obj: Any) -> None:
        staged._pickled = Pickled(obj)
        sources = [bytes_of(storage) for storage in staged._pickled.take_storages()]
        storages = len(sources)
        places: dict[Hashable, int] = {}
        items: list[int | Tensor] = []
        for tensor in tensors:
            if not is_plain(tensor):
                items.append(tensor.detach().cpu().clone())
                continue
            place = places.setdefault(memory_of(tensor), len(sources))
            if place == len(sources):
                sources.append(tensor.detach())
            items.append(place)
        targets = slot.reserve(sources)
        self._copy(staged, targets, sources)
        staged.size = sum(source.nbytes for source in sources)
        staged._storages = [target.untyped_storage() for target in targets[:storages]]
        staged._tensors = [targets[item] if isinstance(item, int) else item for item in items]

    def _copy(self, staged: "Staged", targets: list[Tensor], sources: list[Tensor]) -> None:
        on_host: list[tuple[Tensor, Tensor]] = []
        on_cuda: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for target, source in zip(targets, sources, strict=True):
            (on_cuda.setdefault(source.device, []) if source.is_cuda else on_host).append((target, source))
        for device, pairs in on_cuda.items():
            staged._sources += [source for _, source in pairs]
            self._copy_beside(staged, device, pairs)
        for target, source in on_host:  # while CUDA devices copy; also from other devices, for which this waits
            target.copy_(source)

    def _copy_beside(self, staged: "Staged", device: torch.device, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copies on a stream of its own, for which the device's current stream waits, but the CPU does not."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream, current = self._streams[device], torch.cuda.current_stream(device)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    # torch makes contiguous on the device, in memory of its own, what it copies from there
                    for rows, into in rows_of(source, target):
                        into.copy_(rows, non_blocking=True)
        finally:  # there may be no memory left for some rows, while others are being copied
            copied.record(stream)
            current.wait_event(copied)
            staged._arriving.append((device, copied))


class Staged:
    """A copy of a state, which can be used until its release."""

    def __init__(self, staging: Staging, slot: "_Slot") -> None:
        #: Bytes of the copied tensors.
        self.size = 0
        self._staging = staging
        self._slot: _Slot | None = slot
        self._pickled: Pickled | None = None
        self._storages: list[UntypedStorage] = []
        self._tensors: list[Tensor] = []
        self._arriving: list[tuple[torch.device, torch.cuda.Event]] = []
        self._sources: list[Tensor] = []

    def wait(self) -> None:
        """Waits until all bytes have arrived from CUDA devices."""
        for device, copied in self._arriving:
            with torch.cuda.device(device):  # a thread's first use of CUDA takes memory of its current device
                copied.synchronize()
        self._arriving.clear()
        self._sources.clear()

    def object(self) -> Any:
        """Waits for the bytes, and makes an object like the copied one, as a load with ``map_location="cpu"`` would.

        Each tensor that has memory is saved without that of the others.
        """
        assert self._pickled is not None, "has been released"
        self.wait()
        return self._pickled.restore(self._storages)

    @property
    def tensors(self) -> list[Tensor]:
        """Waits for the bytes, and returns the copies of the tensors.

        They are contiguous and have a storage each, except for tensors that are more than values in memory, such as
        sparse ones.
        """
        self.wait()
        return self._tensors

    def release(self) -> None:
        """Gives the memory back for another copy. A second call does nothing."""
        self.wait()
        self._pickled, self._storages, self._tensors = None, [], []
        slot, self._slot = self._slot, None
        if slot is not None:
            self._staging._give_back(slot)


class _Slot:
    """The memory of one copy."""

    def __init__(self) -> None:
        #: Bytes that it has, or for which memory is being prepared.
        self.size = 0
        self._memory: HostMemory | None = None
        self._warming: threading.Thread | None = None

    def warm(self, size: int, device: torch.device | None) -> None:
        if self._warming is None and size > self.size:
            self.size = size
            self._warming = threading.Thread(
                target=self._warm, args=(size, device), name="warm-checkpoint-memory", daemon=True
            )
            self._warming.start()

    def reserve(self, sources: list[Tensor]) -> list[Tensor]:
        """Returns a place in memory for each tensor; the memory is pinned if one is on a CUDA device."""
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        offsets, size = [], 0
        for source in sources:
            offsets.append(size)
            size += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        memory = self._allocate(size, next((source.device for source in sources if source.is_cuda), None))
        return [memory.tensor(at, source.dtype, source.shape) for at, source in zip(offsets, sources, strict=True)]

    def _warm(self, size: int, device: torch.device | None) -> None:
        try:
            self._allocate(size, device).touch()
        except MemoryError:
            self.size = 0  # the first save tries again, and raises the error

    def _allocate(self, size: int, device: torch.device | None) -> HostMemory:
        if self._memory is None or self._memory.size < size:
            # a state that has grown may go on growing, and new memory takes longer than a copy
            size += 0 if self._memory is None else size // 8
            self._memory = None  # first, so that there is never twice as much
            self._memory = HostMemory(size)
            self.size = size
        if device is not None:
            self._memory.pin(device)
        return self._memory
