"""Copies between accelerators and the host, made beside what the devices compute; all that knows of their streams."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: The parts of a device's module in ``torch`` that copies beside its computations take.
_PARTS = ("Stream", "current_stream", "device", "stream")


@cache
def _stream_of(device: torch.device) -> Any:
    """Returns the stream of this process for all copies of a device; None if the device has no streams."""
    module = getattr(torch, device.type, None)
    if device.type == "cpu" or not all(hasattr(module, part) for part in _PARTS):
        return None
    return module.Stream(device=device)  # type: ignore[union-attr]


def has_streams(device: torch.device) -> bool:
    """Returns whether copies of a device are made beside what it computes; else they are made at once."""
    return _stream_of(device) is not None


def pinned_memory(size: int, device: torch.device) -> Tensor | None:
    """Returns so many bytes of host memory that torch has pinned for a device; None if it cannot, or that is no help.

    It may take the next power of two, and keeps the memory for later when it is freed.
    """
    if has_streams(device):
        # else a thread that is new to devices might use the first one
        with suppress(RuntimeError), getattr(torch, device.type).device(device):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    return None


class DeviceCopies:
    """Copies from or to a device, in flight until they have arrived.

    Args:
        device: The device.
        sources: Tensors that are not let go before all copies have arrived.
    """

    def __init__(self, device: torch.device, sources: Sequence[Tensor] = ()) -> None:
        self._device = device
        self._stream = _stream_of(device)
        self._sources = sources
        #: What says when the copies have arrived: the stream, until an event has been recorded behind them.
        self._last: Any = self._stream

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Begins to copy, after what the device's current stream has been given to do.

        The current stream waits for the copies: what is launched from now on does not change them. It could do so
        later, before an optimizer's step changes the parameters, but nobody can know that nothing else changes them
        before: modules write to buffers, and to parameters (to clip or normalize them), in the forward pass, and
        neither a graph that is replayed nor a compiled step calls an optimizer's hooks.

        Args:
            pairs: Targets, each with its source. Those from or to memory that is not pinned may hold up the CPU.
        """
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        module = getattr(torch, self._device.type)
        current = module.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            # the device as well, for the stream before is one of the current device, which is used when it is set again
            with module.device(self._device), module.stream(self._stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
        finally:  # some are in flight, where there was no memory for others
            copied = self._stream.record_event()
            self._last = copied
            current.wait_event(copied)

    def arrived(self) -> bool:
        """Returns whether all copies have arrived, without waiting. If so, lets go of the sources."""
        if self._last is not None:
            with getattr(torch, self._device.type).device(self._device):  # else this thread might use the first one
                if not self._last.query():
                    return False
            self._last = None
        self._sources = ()
        return True

    def wait(self) -> None:
        """Waits until all copies have arrived, and lets go of the sources."""
        if self._last is not None:
            with getattr(torch, self._device.type).device(self._device):
                self._last.synchronize()
            self._last = None
        self._sources = ()
