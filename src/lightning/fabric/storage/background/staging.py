"""Staged copies of states in host memory, from which checkpoints are written while training goes on.

The tensors' memory is copied, from all devices, into one block that is used for one copy after the other, and
everything else is pickled.
"""

import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.storage import UntypedStorage

from lightning.fabric.storage.archives.tensor_bytes import bytes_of, is_plain, memory_of, rows_of
from lightning.fabric.storage.background.cuda_memory import beside_captures
from lightning.fabric.storage.background.slot import Slot, Spot
from lightning.fabric.storage.background.state_pickler import Pickled
from lightning.fabric.storage.device_copies import DeviceCopies, has_streams
from lightning.fabric.storage.gc_pause import collection_paused

#: Seconds between two looks whether copies have arrived. To wait for them instead would end the capture of a graph.
_POLL = 0.002


class Staging:
    """Makes copies in memory that it keeps from one to the next, and replaces only by more.

    Args:
        slots: The number of copies for which memory is kept. More of them at a time, such as one in a signal handler
            that saves while a copy is being made, have memory that is freed with them.
    """

    def __init__(self, slots: int = 1) -> None:
        self._lock = threading.RLock()  # a signal handler may save
        self._slots = slots
        self._free = [Slot() for _ in range(slots)]
        #: Copies whose bytes are in flight, and the thread that lives as long as there are any.
        self._watched: list[Staged] = []
        self._watcher: threading.Thread | None = None

    def warm(self, size: int, device: torch.device | None = None) -> None:
        """Allocates the memory of one copy in a thread; the first copy, which would else do it, waits for the rest.

        That of others is allocated when there is a first one.

        Args:
            size: Bytes of the expected tensors. For more, the memory is allocated again.
            device: An accelerator that some of the tensors are on.
        """
        with self._lock:
            if self._free:
                min(self._free, key=lambda slot: slot.size).warm(size, device)

    def stage_object(self, obj: Any) -> "Staged":
        """Copies a state. Its tensors stay tied where they share memory.

        Args:
            obj: Anything that ``torch.save`` takes.

        Returns:
            The copy. Bytes from devices may be in flight still. The devices' current streams wait for them: what is
            launched from now on does not change the copy.

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
            self._watch(staged)
        except BaseException:
            staged.release()
            raise
        with self._lock:
            for other in self._free:
                other.warm(slot.size, slot.device)
        return staged

    def _take(self) -> Slot:
        with self._lock:
            self._free.sort(key=lambda slot: slot.size)
            return self._free.pop() if self._free else Slot()

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            if len(self._free) < self._slots:
                self._free.append(slot)

    def _stage(self, staged: "Staged", slot: Slot, tensors: Sequence[Tensor], obj: Any) -> None:
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
        spots = slot.reserve(sources)
        targets = [spot.tensor for spot in spots]
        self._copy(staged, spots, sources)
        staged.size = sum(source.nbytes for source in sources)
        staged._storages = [target.untyped_storage() for target in targets[:storages]]
        staged._tensors = [targets[item] if isinstance(item, int) else item for item in items]

    def _copy(self, staged: "Staged", spots: list[Spot], sources: list[Tensor]) -> None:
        at_once: list[tuple[Tensor, Tensor]] = []
        beside: dict[torch.device, list[tuple[Spot, Tensor]]] = {}
        for spot, source in zip(spots, sources, strict=True):
            if has_streams(source.device):
                beside.setdefault(source.device, []).append((spot, source))
            else:
                at_once.append((spot.tensor, source))
        for device, those in beside.items():
            copies = DeviceCopies(device, [source for _, source in those])
            staged.add(copies)
            # torch makes contiguous on the device, in memory of its own, what it copies from there
            copies.begin(
                part
                for spot, source in those
                for rows, into in rows_of(source, spot.tensor)
                for part in spot.memory.parts(into, rows)
            )
        for target, source in at_once:  # while devices copy; also from devices without streams, for which this waits
            target.copy_(source)

    def _watch(self, staged: "Staged") -> None:
        """Has a thread look when the bytes of a copy arrive, for its sources to be let go then."""
        if staged.arrived():
            return
        with self._lock:
            self._watched.append(staged)
            if self._watcher is None:
                watcher = threading.Thread(target=self._look, name="checkpoint-copies", daemon=True)
                watcher.start()
                self._watcher = watcher

    def _look(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched)
            # without the lock, for which a signal handler might wait that interrupts whoever has that of a copy
            arrived = [staged for staged in watched if staged.arrived()]
            with self._lock:
                self._watched = [staged for staged in self._watched if staged not in arrived]
                if not self._watched:
                    self._watcher = None
                    return
            time.sleep(_POLL)


class Staged:
    """A copy of a state, which can be used until its release."""

    def __init__(self, staging: Staging, slot: Slot) -> None:
        #: Bytes of the copied tensors.
        self.size = 0
        self._staging = staging
        self._slot: Slot | None = slot
        self._pickled: Pickled | None = None
        self._storages: list[UntypedStorage] = []
        self._tensors: list[Tensor] = []
        self._lock = threading.RLock()
        self._in_flight: list[DeviceCopies] = []
        self._error: Exception | None = None

    def add(self, copies: DeviceCopies) -> None:
        """Adds copies that are about to begin."""
        self._in_flight.append(copies)

    def arrived(self) -> bool:
        """Returns whether all bytes have arrived from devices, or a device has failed, without waiting."""
        with self._lock, beside_captures():
            try:
                self._in_flight = [copies for copies in self._in_flight if not copies.arrived()]
            except Exception as error:
                self._error, self._in_flight = error, []
            return not self._in_flight

    def wait(self) -> None:
        """Waits until all bytes have arrived from devices.

        Raises:
            Exception: The error of a device.
        """
        while not self.arrived():
            time.sleep(_POLL)
        if self._error is not None:
            raise self._error

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
        """Waits for the bytes, and gives the memory back for another copy. A second call does nothing."""
        while not self.arrived():
            time.sleep(_POLL)
        self._pickled, self._storages, self._tensors = None, [], []
        slot, self._slot = self._slot, None
        if slot is not None:  # a device that has failed may still write to the memory: there will be other memory
            self._staging._give_back(slot if self._error is None else Slot())
