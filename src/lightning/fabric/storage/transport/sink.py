"""The file that ``torch.save`` writes to, and that drives an upload."""

import ctypes
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from lightning.fabric.storage.transport import progress
from lightning.fabric.storage.transport.upload import LARGEST_PIECE, Handover, UploadBackend

log = logging.getLogger(__name__)

#: Smaller writes are collected until they are as large. To pass each on by itself costs more than to copy it.
_SMALLEST_PIECE = 2**20


class GivenUp(Exception):
    """Raised by ``idle`` to end an upload. It leaves the writer as it is."""


class Sink(io.RawIOBase):
    """Passes all that is written on to an upload, in the memory and the pieces that its backend takes.

    ``torch.save`` does not notice when a write takes less than it was given, and shows any ``OSError`` of a write as a
    ``RuntimeError`` about a position. So a write takes everything, or remembers its error.

    The views that ``torch.save`` writes do not own their memory. For a backend that keeps what it gets, the storages
    that were announced and are in host memory are passed on as views that do; all else is copied: what is small (torch
    uses that memory again at once), and what comes from an accelerator (a temporary copy).

    Args:
        backend: The upload, which begins with the first byte: by then, all of the size that is ever known is.
        idle: Called now and then in long waits. It may raise a :class:`GivenUp`.
    """

    def __init__(self, backend: UploadBackend, idle: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.idle = idle
        #: The first error of a write.
        self.error: BaseException | None = None
        #: Bytes that are going to be written, as far as is known.
        self.announced = 0
        self._backend = backend
        self._has_begun = False
        self._part_size = 0
        self._position = 0
        self._collected = bytearray()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._lasting: dict[int, np.ndarray] = {}

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    def announce(self, storage: torch.UntypedStorage) -> None:
        """Announces memory that is going to be written, and does not change until the file is complete."""
        if storage._cdata in self._storages:  # views share one, which is written once
            return
        self._storages[storage._cdata] = storage  # alive, so that no other gets its address
        self.expect(storage.nbytes())
        if (
            self._backend.handover is Handover.LASTING
            and storage.device.type == "cpu"
            and storage.nbytes() >= _SMALLEST_PIECE
        ):
            # not by tensors: modes and the default device of the caller change what torch's functions make
            address = storage.data_ptr()
            memory = (ctypes.c_ubyte * storage.nbytes()).from_address(address)
            memory.storage = storage  # type: ignore[attr-defined]  # views keep alive what keeps this alive
            if storage.nbytes() > len(self._lasting.get(address, ())):  # there can be several on the same memory
                self._lasting[address] = np.frombuffer(memoryview(memory), np.uint8)

    def expect(self, size: int) -> None:
        """Announces ``size`` bytes more that are going to be written."""
        self.announced += size

    @override
    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._take(view, lasting=False)
        return len(view)

    def give(self, data: memoryview) -> None:
        """Writes memory that belongs to the view, and does not change until the file is complete."""
        self._take(data, lasting=True)

    def commit(self) -> None:
        """Makes what was written the file.

        Raises:
            BaseException: The error of an earlier write, though its caller may have ignored it, or one of the commit.
        """
        with self._errors_kept():
            self._begin_once()
            self._send_collected()
            self._backend.commit()

    def abort(self) -> None:
        """Takes the upload back, if it has begun."""
        self._collected.clear()
        if self._has_begun:
            self._backend.abort()

    def _take(self, data: memoryview, lasting: bool) -> None:
        with self._errors_kept():
            self._begin_once()
            if self._backend.handover is Handover.WHOLE_PARTS:
                self._collect(data, self._part_size)
            elif self._backend.handover is Handover.LASTING and len(data) < _SMALLEST_PIECE:
                self._collect(data, _SMALLEST_PIECE)
            else:
                self._send_collected()
                self._pass_on(data, lasting)

    @contextmanager
    def _errors_kept(self) -> Iterator[None]:
        if self.error is not None:
            raise self.error
        try:
            yield
        except BaseException as error:
            self.error = error
            raise

    def _begin_once(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._part_size = self._backend.begin(self.announced, self.idle)

    def _collect(self, data: memoryview, size: int) -> None:
        """Copies to pieces of exactly ``size`` bytes, and sends those that are full."""
        while len(data):
            taken = data[: min(size - len(self._collected), LARGEST_PIECE)]
            self._collected += taken
            self._position += len(taken)
            data = data[len(taken) :]
            if len(self._collected) == size:
                self._send_collected()

    def _send_collected(self) -> None:
        if self._collected:
            part, self._collected = self._collected, bytearray()
            self._send(part)

    def _pass_on(self, data: memoryview, lasting: bool) -> None:
        copies = False
        if self._backend.handover is Handover.LASTING and not lasting:
            known = self._lasting.get(np.frombuffer(data, np.uint8).ctypes.data, np.empty(0))
            copies = len(known) < len(data)
            data = data if copies else known[: len(data)].data
        while len(data):
            piece = data[: min(self._part_size - self._position % self._part_size, LARGEST_PIECE)]
            # numpy copies without holding the GIL, so that other threads go on
            self._send(np.frombuffer(piece, np.uint8).copy().data if copies else piece)
            self._position += len(piece)
            data = data[len(piece) :]

    def _send(self, piece: memoryview | bytearray) -> None:
        self._backend.write_part(piece)
        progress.made()

    def __del__(self) -> None:
        """Does not close the file, which would flush it, unlike that of other files.

        What is collected has been given up: it must not be sent, least of all when the interpreter ends, and there can
        be no more threads.
        """


@contextmanager
def uploading(backend: UploadBackend, idle: Callable[[], None] = lambda: None) -> Iterator[Sink]:
    """Yields a file to write to, which is committed when the context ends, or taken back on any exception.

    Args:
        backend: The upload.
        idle: Called now and then in long waits, as by :class:`Sink`.
    """
    sink = Sink(backend, idle)
    try:
        yield sink
        sink.commit()
    except BaseException:
        try:
            sink.abort()
        except Exception as error:
            log.warning(f"An upload that failed was not taken back ({type(error).__name__}: {error})")
        raise
