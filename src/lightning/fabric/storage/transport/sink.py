"""What ``torch.save`` writes into."""

import ctypes
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from lightning.fabric.storage.transport import progress

#: No single write is larger: HDFS refuses one above 2 GB, and its client dies of one above 1 GB.
_LARGEST_WRITE = 16 * 2**20
#: Smaller writes are collected until they are as large. To pass each on by itself costs more than to copy it.
_SMALLEST_PIECE = 2**20


class GivenUp(Exception):
    """What :attr:`Sink.idle` raises to end the upload. It leaves the writer as it is."""


class Sink(io.RawIOBase):
    """Passes on all that it is given, in pieces of bounded size, and remembers why it could not.

    ``torch.save`` does not notice when a write takes less than it was given, and shows any ``OSError`` of a write as a
    ``RuntimeError`` about a position.

    Args:
        file: An object with ``write``, which may take less than it is given and say so.
        copies: Give ``file`` pieces of its own rather than views of the writer's memory. What keeps a piece beyond the
            call needs that, since the writer uses the memory again.
    """

    def __init__(self, file: Any, copies: bool = False) -> None:
        super().__init__()
        self.error: BaseException | None = None
        #: How many bytes are going to be written, as far as is known.
        self.announced = 0
        #: Called now and then while there is nothing to do but to wait. It may raise a :class:`GivenUp`.
        self.idle: Callable[[], None] = lambda: None
        #: Whether nobody will look for the file if the upload fails: then one that cannot be stopped is left alone.
        self.disposable = False
        self._announced: dict[int, torch.UntypedStorage] = {}
        self._file = file
        self._copies = copies
        self._position = 0

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    def announce(self, storage: torch.UntypedStorage) -> None:
        """Tells the sink of memory that is going to be written, and does not change until the file is complete."""
        if storage._cdata not in self._announced:  # views share one, which is written once
            self._announced[storage._cdata] = storage  # alive, so that no other gets its address
            self.expect(storage.nbytes())

    def expect(self, size: int) -> None:
        """Tells the sink of ``size`` bytes more that are going to be written."""
        self.announced += size

    def give(self, data: memoryview) -> None:
        """Writes memory that belongs to the view, and does not change until the file is complete."""
        self.write(data)

    @override
    def write(self, data: Any) -> int:
        with memoryview(data) as view, view.cast("B") as rest:
            at = 0
            try:
                while at < len(rest):
                    piece = rest[at : at + _LARGEST_WRITE]
                    written = self._file.write(bytes(piece) if self._copies else piece)
                    at += len(piece) if written is None else written
                    progress.made()
            except BaseException as error:
                self.error = self.error or error
                raise
            finally:
                self._position += at
            return at

    def __del__(self) -> None:
        """Does not close the file, which would flush it, unlike that of other files.

        What is collected has been given up: it must not be sent, least of all when the interpreter ends, and there can
        be no more threads.
        """


class PieceSink(Sink):
    """Passes on pieces which stay valid for as long as their receiver keeps them, and copies as little as that takes.

    The views that ``torch.save`` writes do not own their memory. The storages that were announced and are in host
    memory are passed on as views that do; all else is copied: what is small (torch uses that memory again at once), and
    what comes from an accelerator (a temporary copy).

    Args:
        file: An object with ``write``, which takes a piece whole.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._owned: dict[int, np.ndarray] = {}
        self._small = bytearray()

    @override
    def announce(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "cpu" and storage.nbytes() >= _SMALLEST_PIECE:
            # not by tensors: modes and the default device of the caller change what torch's functions make
            address = storage.data_ptr()
            memory = (ctypes.c_ubyte * storage.nbytes()).from_address(address)
            memory.storage = storage  # type: ignore[attr-defined]  # views keep alive what keeps this alive
            if storage.nbytes() > len(self._owned.get(address, ())):  # there can be several on the same memory
                self._owned[address] = np.frombuffer(memoryview(memory), np.uint8)
        super().announce(storage)

    @override
    def write(self, data: Any) -> int:
        with memoryview(data) as view, view.cast("B") as rest:
            try:
                if len(rest) < _SMALLEST_PIECE:
                    self._small += rest
                    if len(self._small) >= _SMALLEST_PIECE:
                        self.flush()
                else:
                    self._write_large(np.frombuffer(rest, np.uint8))
            except BaseException as error:
                self.error = self.error or error
                raise
            self._position += len(rest)
            return len(rest)

    @override
    def give(self, data: memoryview) -> None:
        if len(data) < _SMALLEST_PIECE:
            self.write(data)
            return
        try:
            self.flush()
            self._file.write(data)
        except BaseException as error:
            self.error = self.error or error
            raise
        self._position += len(data)

    def _write_large(self, data: np.ndarray) -> None:
        self.flush()
        owned = self._owned.get(data.ctypes.data)
        if owned is not None and len(owned) >= len(data):
            self._file.write(owned[: len(data)].data)
            return
        for at in range(0, len(data), _LARGEST_WRITE):
            # numpy copies without holding the GIL, so that other threads go on
            self._file.write(data[at : at + _LARGEST_WRITE].copy().data)

    @override
    def flush(self) -> None:
        if self._small:
            small, self._small = self._small, bytearray()
            self._file.write(memoryview(small))
