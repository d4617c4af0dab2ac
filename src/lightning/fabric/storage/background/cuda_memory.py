"""Host memory that CUDA or ROCm knows as pinned; and their calls beside the capture of a graph in another thread.

Memory is registered, and unregistered in the end, in one thread of its own. It could be freed in any, by the garbage
collector in the middle of training's; and an error of CUDA's is reported once more to the next call in a thread.
"""

import ctypes
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

#: Bytes that are registered at a time. The driver has a lock meanwhile, for which other processes wait as well, and
#: some drivers fail from 512 GiB on. A copy must not go from one block to the next.
BLOCK = 2**30
#: The flag for memory that counts as pinned for all devices.
_PORTABLE = 1
#: The mode of a thread whose calls do not end a capture, "relaxed".
_RELAXED = 2


def takes_registered(device: torch.device) -> bool:
    """Returns whether memory is registered for a device; for others, torch allocates pinned memory."""
    return device.type == "cuda"


class Registered:
    """Memory that is pinned until it is freed, all of it or nothing.

    Args:
        view: The memory, which is unregistered when no reference to this view is left.
        mapping: The owner of the memory, which is kept until then.
        device: Any device that this process uses.

    Attributes:
        reason: The reason why the memory could not be pinned, None if it is.
    """

    def __init__(self, view: memoryview, mapping: Any, device: torch.device) -> None:
        result: Future[str | None] = Future()
        freed: SimpleQueue[None] = SimpleQueue()  # of which a finalizer may interrupt any call
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        spans = [(address + at, min(BLOCK, len(view) - at)) for at in range(0, len(view), BLOCK)]
        self._finalizer = weakref.finalize(view, freed.put, None)
        self._finalizer.atexit = False
        self._keeper = threading.Thread(
            target=_keep, args=(mapping, spans, device, result, freed), name="pinned-checkpoint-memory", daemon=True
        )
        self._keeper.start()
        self.reason = result.result()

    def wait_if_freed(self) -> None:
        """Waits until memory is unregistered of which no reference is left."""
        if not self._finalizer.alive:
            self._keeper.join()


def _keep(
    mapping: Any,
    spans: list[tuple[int, int]],
    device: torch.device,
    result: "Future[str | None]",
    freed: "SimpleQueue[None]",
) -> None:
    try:
        with torch.cuda.device(device), beside_captures():  # else this thread would take memory of the first device
            error = _register(spans)
            result.set_result(_reason(error) if error else None)
            if not error:
                freed.get()
                _unregister(spans)
    except BaseException as error:
        if result.done():
            raise
        result.set_exception(error)


def _register(spans: list[tuple[int, int]]) -> int:
    """Registers all spans of memory or none, and returns the error, 0 for none."""
    for at, span in enumerate(spans):
        if error := int(_runtime().cudaHostRegister(*span, _PORTABLE)):
            _unregister(spans[:at])
            return error
    return 0


def _unregister(spans: list[tuple[int, int]]) -> None:
    for address, _ in spans:
        _runtime().cudaHostUnregister(address)


def _reason(error: int) -> str:
    binding: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return (
        f"CUDA error {error}, {binding.cudaGetErrorString(binding.cudaError(error))}. The memory itself is there, and"
        " `ulimit -l` and the container's limits do not count here: it is the driver, which under WSL, on Windows and"
        " in some virtual machines pins only a part of the host's memory"
    )


@cache
def _runtime() -> Any:
    """Returns CUDA's runtime as torch has loaded it, else torch's binding, which before torch 2.5 holds the GIL."""
    with suppress(AttributeError, OSError, TypeError):  # such as ROCm, and Windows
        library = ctypes.CDLL(None)
        library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)
        return library
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@contextmanager
def beside_captures() -> Iterator[None]:
    """Lets this thread call CUDA while another captures a graph, which such calls would end with an error otherwise.

    Without effect where the function for it is not found.
    """
    exchange = _exchange_mode() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    mode = ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)):
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange_mode() -> Any:
    """Returns the driver's function that exchanges the capture mode of a thread, None if it is not found."""
    name = "cuThreadExchangeStreamCaptureMode"
    libraries = ["nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"]
    if torch.version.hip:
        name = "hipThreadExchangeStreamCaptureMode"
        libraries = [f"libamdhip64.so.{torch.version.hip.partition('.')[0]}", "libamdhip64.so"]
    for library in libraries:
        with suppress(AttributeError, OSError):
            return getattr(ctypes.CDLL(library), name)
    return None
