"""The module ``torch.late``: two devices whose copies really are late.

What a device of CUDA's does and what a mistake shows there is in the C++ sources in ``cpp``; here is what Python calls.
A process can have one such device only, so the tests with it have a process of their own: ``make test-device``.
"""

import atexit
import ctypes
import importlib.util
import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Stream

from tests.late_device.build import library

NAME = "late"


@cache
def load() -> ModuleType:
    """Gives torch the device. It stays until the process ends."""
    global _late
    spec = importlib.util.spec_from_file_location("_late", library())
    assert spec is not None
    assert spec.loader is not None
    torch.utils.rename_privateuse1_backend(NAME)
    _late = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_late)
    this = sys.modules[__name__]
    torch._register_device_module(NAME, this)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_late.shut_down)
    torch.empty(1, pin_memory=True)  # before that, torch takes no memory for pinned
    return this


_late: Any
Event = torch.Event


def _index(device: Any = None) -> int:
    if device is None:
        return int(_late.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(_late.current_device()) if index is None else index


# What torch and others look for in the module of a device


def is_available() -> bool:
    return True


is_initialized = is_available


def _is_in_bad_fork() -> bool:
    return bool(_late.is_forked())


def device_count() -> int:
    return int(_late.device_count)


def current_device() -> int:
    return int(_late.current_device())


def set_device(device: Any) -> None:
    _late.set_device(_index(device))


@contextmanager
def device(device: Any) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        _late.go_back_to_device(before)


def current_stream(device: Any = None) -> Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: Stream) -> Stream:
    return stream  # it is a context manager itself


def synchronize(device: Any = None) -> None:
    _late.synchronize(_index(device))


def manual_seed_all(seed: int) -> None:
    _late.seed(seed)


manual_seed = manual_seed_all


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors of a device take, in whole pages."""
    return int(_late.memory_allocated(_index(device)))


def max_memory_allocated(device: Any = None) -> int:
    return int(_late.max_memory_allocated(_index(device)))


def reset_peak_memory_stats(device: Any = None) -> None:
    _late.reset_peak_memory_stats()


def empty_cache() -> None:
    _late.empty_cache()


# How tests hold it up, and what it has seen


def hold_stream(stream: Stream) -> None:
    """Holds up all that a stream has not begun. Whoever waits for it in this thread gets an error, not a deadlock."""
    _late.hold_stream(stream.device_index, stream.stream_id)


def hold_copies(to_host: bool = True, to_device: bool = True) -> None:
    """Holds up each copy between host and device, on all streams, and what waits for it."""
    for kind, is_held in ((_late.Kind.TO_HOST, to_host), (_late.Kind.TO_DEVICE, to_device)):
        if is_held:
            _late.hold_copies(kind)


def settle() -> None:
    """Waits until nothing goes on any more but what is held up."""
    _late.settle()


def release() -> None:
    """Lets all go on that was held up."""
    _late.release()


def set_delay(seconds: float) -> None:
    """Lets each copy between host and device begin so much later than it could."""
    _late.set_delay(seconds)


def set_memory_limit(size: int | None, device: Any = None) -> None:
    """Lets a device have so many bytes for tensors."""
    _late.set_memory_limit(_index(device), 2**64 - 1 if size is None else size)


def first_uses() -> set[tuple[int, int]]:
    """Native ids of threads, each with a device that it has used: that makes a context, which takes memory there."""
    return set(_late.first_uses())


def forget_uses() -> None:
    _late.forget_uses()


class Registration(NamedTuple):
    """A call that registers host memory or removes it, as a driver sees it."""

    address: int
    size: int
    #: Bytes in pages that had memory before.
    touched: int
    #: The native id of the thread, and its current device.
    thread: int
    device: int
    #: CUDA's, 0 for none.
    error: int
    is_removal: bool


class Cudart:
    """The calls of CUDA's that are made by their names."""

    _ALREADY_REGISTERED, _NOT_REGISTERED, _CAPTURE_UNSUPPORTED = 712, 713, 900

    def __init__(self) -> None:
        self.calls: list[Registration] = []
        self.fails_after, self.fails_with = -1, 0
        self._registered: dict[int, int] = {}

    cudaError = int

    def cudaGetErrorString(self, error: int) -> str:
        return "out of memory" if error == 2 else "unknown error"

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        overlaps = any(start < address + size and address < start + of for start, of in self._registered.items())
        error = self._error(self._ALREADY_REGISTERED if overlaps else 0)
        self.fails_after -= error == 0
        if error == 0 and self.fails_after == -1 and self.fails_with:
            error, self.fails_with = self.fails_with, 0
        self._note(address, size, error, is_removal=False)
        if error == 0:
            self._registered[address] = size
            _late.add_pinned(address, size)
        return error

    def cudaHostUnregister(self, address: int) -> int:
        error = self._error(0 if address in self._registered else self._NOT_REGISTERED)
        self._note(address, self._registered.get(address, 0), error, is_removal=True)
        if error == 0:
            del self._registered[address]
            _late.remove_pinned(address)
        return error

    def _error(self, error: int) -> int:
        _late.use_device(current_device())
        return self._CAPTURE_UNSUPPORTED if _late.spoils_capture() else error

    def _note(self, address: int, size: int, error: int, is_removal: bool) -> None:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages)
        touched = mmap.PAGESIZE * sum(page & 1 for page in pages)
        thread = threading.get_native_id()
        self.calls.append(Registration(address, size, touched, thread, current_device(), error, is_removal))


_cudart = Cudart()


def cudart() -> Cudart:
    return _cudart


def fail_registering(error: int = 2, after: int = 0) -> None:
    """Lets one registration fail, after so many that do not."""
    _cudart.fails_after, _cudart.fails_with = after, error


# Graph capture in global mode, as `torch.cuda.graph` captures


@contextmanager
def capture() -> Iterator[None]:
    """Captures a graph; raises an error if something has spoiled it."""
    _late.begin_capture()
    try:
        yield
    finally:
        _late.end_capture()


def exchange_capture_mode(mode: str) -> str:
    """Sets the mode of this thread, ``global``, ``thread_local`` or ``relaxed``, and returns the one before."""
    return str(_late.exchange_capture_mode(getattr(_late.CaptureMode, mode.upper())).name.lower())


@contextmanager
def capture_mode_guard(mode: str) -> Iterator[None]:
    before = exchange_capture_mode(mode)
    try:
        yield
    finally:
        exchange_capture_mode(before)
