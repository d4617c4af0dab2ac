"""Large blocks of host memory that are used again and again, and that accelerators can copy to at full rate."""

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

#: Where tensors start, as in the archives of ``torch.save``.
ALIGNMENT = 64
#: Touched at a time; torch does not spread that few pages over its threads, which are for training.
_TOUCHED = 64 * 2**20
_PAGE = 4096
#: From Linux's headers. What a process is forked with has the addresses, but none of the content.
_MADV_WIPEONFORK = 18
#: From CUDA's headers. The memory counts as pinned for each of the devices.
_HOST_REGISTER_PORTABLE = 1


class HostMemory:
    """One block of memory. It is given back when no tensor of it is left.

    Args:
        size: Bytes.

    Raises:
        MemoryError: There is not so much.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._mapping = _map(max(size, 1))
        self._view = memoryview(self._mapping)
        self._pinning_was_tried = False

    def tensor(self, offset: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """A contiguous tensor in this memory, with a storage of its own: torch saves it without what is around it.

        Args:
            offset: Where it starts, in bytes.
            dtype: Of the tensor.
            shape: Of the tensor.
        """
        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self._view, dtype=dtype, count=count, offset=offset).view(shape)

    def touch(self) -> None:
        """Has the system find all of the memory now, which it else does when the memory is written for the first time.

        The content becomes undefined.
        """
        pages = torch.frombuffer(self._view, dtype=torch.uint8)[::_PAGE]
        for at in range(0, len(pages), _TOUCHED // _PAGE):
            pages[at : at + _TOUCHED // _PAGE].fill_(0)

    def pin(self, device: torch.device) -> None:
        """Lets accelerators copy to this memory while the CPU goes on. Where that is not possible, warns.

        Args:
            device: Any CUDA device that this process uses.
        """
        if self._pinning_was_tried:
            return
        self._pinning_was_tried = True
        address = torch.frombuffer(self._view, dtype=torch.uint8).data_ptr()
        # torch's own pinned memory would take the next power of two, and keep it when it is not needed any more
        with ThreadPoolExecutor(1) as own_thread:  # for CUDA would report a failure once more, to whoever comes next
            error = own_thread.submit(_register, address, len(self._mapping), device).result()
        if error:
            warnings.warn(
                f"{len(self._mapping) / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {error}), so"
                " training stops for longer while a checkpoint is copied from the device. Look whether the host has as"
                " much free memory, and whether `ulimit -l` or the container limits what may be locked.",
                stacklevel=2,
            )
        else:
            # when no tensor is left that holds the view; until then the memory stays mapped
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
    """Returns CUDA's error, 0 for none."""
    with torch.cuda.device(device):  # else this thread would use, and take memory of, the first device
        return int(_cuda().cudaHostRegister(address, size, _HOST_REGISTER_PORTABLE))


def _unregister(mapping: mmap.mmap, address: int, process: int) -> None:
    if os.getpid() == process:  # a fork of it has nothing pinned, and must not use CUDA
        _cuda().cudaHostUnregister(address)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
