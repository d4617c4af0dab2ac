"""Large blocks of host memory, used again and again, to which accelerators copy at full rate."""

import math
import mmap
import os
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from lightning.fabric.storage.background import cuda_memory
from lightning.fabric.storage.device_copies import pinned_memory

#: Tensors start at multiples of so many bytes, as in the archives of ``torch.save``.
ALIGNMENT = 64
#: Bytes that a thread touches at a time.
_TOUCHED = 64 * 2**20
_TOUCHING_THREADS = 4
_PAGE = 4096
#: Linux's flag for memory of which a forked process gets the addresses, but not the content.
_MADV_WIPEONFORK = 18
#: Linux's flag for memory that a forked process does not get, for kernels without the other one.
_MADV_DONTFORK = 10


class HostMemory:
    """One block of memory, freed when no tensor of it is left.

    Args:
        size: Bytes of the block.
        device: An accelerator that copies to it, for which it is pinned; there is a warning where that is not possible.

    Raises:
        MemoryError: The host has not enough memory.
    """

    def __init__(self, size: int, device: torch.device | None = None) -> None:
        self.size = size
        self.device = device
        self.registered: cuda_memory.Registered | None = None
        registers = device is not None and cuda_memory.takes_registered(device)
        reason: str | None = None
        if device is not None and not registers:
            if (pinned := pinned_memory(max(size, 1), device)) is not None:
                self._view = pinned.numpy().data
                return
            reason = f"PyTorch could not pin it for {device.type}"
        mapping = _map(max(size, 1))
        self._view = memoryview(mapping)
        can_pin = _keep_from_forks(mapping)
        if device is not None and registers:
            # before it is registered, when the driver would have one thread do it, and other processes wait
            self.touch()
            reason = "the kernel cannot keep it from forked processes"
            if can_pin:
                self.registered = cuda_memory.Registered(self._view, mapping, device)
                reason = self.registered.reason
        if reason is not None:
            warnings.warn(
                f"{size / 2**30:.1f} GiB of host memory are not pinned, so training stops for longer while a"
                f" checkpoint is copied from the device: {reason}.",
                stacklevel=2,
            )

    def touch(self) -> None:
        """Writes to each page, for which the system then need not find memory later. The content becomes undefined."""
        pages, step = np.frombuffer(self._view, np.uint8)[::_PAGE], _TOUCHED // _PAGE

        def touch(at: int) -> None:
            pages[at : at + step] = 0  # which other threads can run beside

        with ThreadPoolExecutor(_TOUCHING_THREADS) as threads:
            list(threads.map(touch, range(0, len(pages), step)))

    def tensor(self, offset: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """Returns a contiguous tensor in this memory, with a storage of its own, which torch saves without the rest.

        Args:
            offset: The byte of the block at which the tensor starts.
            dtype: The type of the elements.
            shape: The shape of the tensor.
        """
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._view, dtype=dtype, count=count, offset=offset).view(shape)

    def parts(self, target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cuts a tensor in this memory, and one of its shape, where memory ends that can be copied to at a time.

        What is not contiguous is made so before it is cut.
        """
        start = target.data_ptr() - torch.frombuffer(self._view, dtype=torch.uint8, count=1).data_ptr()
        block, itemsize = cuda_memory.BLOCK, target.element_size()
        first = block - start % block
        if target.nbytes <= first:
            yield target, source
            return
        target, source = target.view(-1), source.reshape(-1)
        ends = [*range(first, target.nbytes, block), target.nbytes]
        for at, end in zip([0, *ends], ends, strict=False):
            yield target[at // itemsize : end // itemsize], source[at // itemsize : end // itemsize]


def _map(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"Cannot allocate {size / 2**30:.1f} GiB of host memory for a copy of the state, which an asynchronous save"
            " needs. Save synchronously (without `AsyncCheckpointIO`), or let fewer processes share this host."
        ) from error


def _keep_from_forks(mapping: mmap.mmap) -> bool:
    """Returns whether memory is kept from forked processes, such as a data loader's workers.

    Otherwise writing again after a fork copies the memory. That is only slower, unless it is pinned: a device goes on
    to write to the memory that the other process has then. No huge pages: where memory is fragmented, to make room for
    them takes far longer than to touch small ones, and the first save would wait for that.
    """
    if sys.platform != "linux":
        return not hasattr(os, "fork")
    for advice in (_MADV_WIPEONFORK, _MADV_DONTFORK):
        with suppress(OSError):
            mapping.madvise(advice)
            return True
    return False
