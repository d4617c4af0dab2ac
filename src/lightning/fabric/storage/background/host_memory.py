"""Large blocks of host memory, used again and again, to which accelerators copy at full rate."""

import math
import mmap
import os
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

#: Tensors start at multiples of so many bytes, as in the archives of ``torch.save``.
ALIGNMENT = 64
#: Bytes that are touched at a time; torch does not use its threads, which are for training, for that few pages.
_TOUCHED = 64 * 2**20
_PAGE = 4096
#: Linux's flag for memory of which a forked process gets the addresses, but not the content.
_MADV_WIPEONFORK = 18
#: CUDA's flag for memory that counts as pinned for all devices.
_HOST_REGISTER_PORTABLE = 1


class HostMemory:
    """One block of memory, freed when no tensor of it is left.

    Args:
        size: Bytes of the block.

    Raises:
        MemoryError: The host has not enough memory.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._mapping = _map(max(size, 1))
        self._view = memoryview(self._mapping)
        self._pinning_was_tried = False

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

    def touch(self) -> None:
        """Writes to each page, for which the system then need not find memory later. The content becomes undefined."""
        pages = torch.frombuffer(self._view, dtype=torch.uint8)[::_PAGE]
        for at in range(0, len(pages), _TOUCHED // _PAGE):
            pages[at : at + _TOUCHED // _PAGE].fill_(0)

    def pin(self, device: torch.device) -> None:
        """Pins the memory, so that accelerators copy to it while the CPU goes on, or warns that this is not possible.

        Args:
            device: Any CUDA device that this process uses.
        """
        if self._pinning_was_tried:
            return
        self._pinning_was_tried = True
        address = torch.frombuffer(self._view, dtype=torch.uint8).data_ptr()
        # torch's own pinned memory would take the next power of two, and keep it when it is not needed any more
        with ThreadPoolExecutor(1) as own_thread:  # CUDA reports a failure once more, to the next call in the thread
            error = own_thread.submit(_register, address, len(self._mapping), device).result()
        if error:
            warnings.warn(
                f"{len(self._mapping) / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {error}), so"
                " training stops for longer while a checkpoint is copied from the device. Look whether the host has as"
                " much free memory, and whether `ulimit -l` or the container limits what may be locked.",
                stacklevel=2,
            )
        else:
            # called when no tensor is left that holds the view; until then the memory stays mapped
            weakref.finalize(self._view, _unregister, self._mapping, address, os.getpid()).atexit = False


def _map(size: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"Cannot allocate {size / 2**30:.1f} GiB of host memory for a copy of the state, which an asynchronous save"
            " needs. Save synchronously (without `AsyncCheckpointIO`), or let fewer processes share this host."
        ) from error
    if sys.platform == "linux":
        # Without this, writing again after a fork, such as that of a data loader's workers, would copy the memory: that
        # is only slower. No huge pages: where memory is fragmented, to make room for them takes far longer than to
        # touch small ones, and the first save would wait for that.
        with suppress(OSError):
            mapping.madvise(_MADV_WIPEONFORK)
    return mapping


def _register(address: int, size: int, device: torch.device) -> int:
    """Pins memory, and returns CUDA's error, 0 for none."""
    with torch.cuda.device(device):  # else this thread would take memory of the first device
        return int(_cuda().cudaHostRegister(address, size, _HOST_REGISTER_PORTABLE))


def _unregister(mapping: mmap.mmap, address: int, process: int) -> None:
    if os.getpid() == process:  # a forked one has nothing pinned, and must not use CUDA
        _cuda().cudaHostUnregister(address)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
