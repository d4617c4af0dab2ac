"""The values of tensors, piece by piece."""

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from lightning.fabric.storage.device_copies import DeviceCopies, pinned_memory

#: Bytes that are copied from an accelerator at a time, of which two pieces are in host memory, or that are made
#: contiguous at a time.
_PIECE = 16 * 2**20


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is no more than its values, one after the other in memory."""
    is_own_class = type(tensor.detach()) is Tensor and not tensor.is_conj() and not tensor.is_neg()
    is_strided = tensor.layout == torch.strided and not tensor.is_nested
    return is_own_class and is_strided and not tensor.is_quantized and tensor.device.type != "meta"


def memory_of(tensor: Tensor) -> Hashable:
    """Returns a key of a plain tensor's values: tied tensors have the same one, as long as both are alive."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Returns a view of all bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class HostPieces:
    """Bytes of tensors in host memory, piece by piece; those of accelerators in the same memory again and again.

    That is two pieces large: while one is being sent, the next is copied from the device.
    """

    def __init__(self) -> None:
        self._halves: list[Tensor] = []

    def of(self, tensor: Tensor) -> Iterator[memoryview]:
        """Yields a plain tensor's bytes. If its device is not the host, each piece is valid until the next."""
        pieces = (piece for (rows,) in rows_of(tensor) for piece in _pieces(rows))
        if tensor.device.type == "cpu":
            yield from (piece.view(torch.uint8).numpy().data for piece in pieces)
            return
        copies = (self._copy(piece, number % 2) for number, piece in enumerate(pieces))
        ahead = next(copies, None)
        while ahead is not None:
            host, copied = ahead
            ahead = next(copies, None)
            copied.wait()
            yield host.numpy().data

    def _copy(self, piece: Tensor, half: int) -> tuple[Tensor, DeviceCopies]:
        if not self._halves:
            size = 2 * _PIECE
            pinned = pinned_memory(size, piece.device)
            both = torch.empty(size, dtype=torch.uint8, device="cpu") if pinned is None else pinned
            self._halves = [both[:_PIECE], both[_PIECE:]]
        host, copies = self._halves[half][: piece.nbytes], DeviceCopies(piece.device, [piece])
        copies.begin([(host.view(piece.dtype), piece)])
        return host, copies


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.contiguous().reshape(-1)  # not as bytes, which some devices have no view as
    size = _PIECE // flat.element_size()
    yield from (flat[at : at + size] for at in range(0, len(flat), size))


def rows_of(tensor: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cuts a tensor, unless it is contiguous, into small views, each of which takes little memory if made contiguous.

    Args:
        tensor: The tensor to cut, in row-major order.
        others: Tensors of the same shape, which are cut in the same places.
    """
    if tensor.is_contiguous() or tensor.nbytes <= _PIECE:
        yield tensor, *others
    elif len(tensor) == 1:
        yield from rows_of(tensor[0], *(other[0] for other in others))
    else:
        rows = max(1, _PIECE * len(tensor) // tensor.nbytes)
        for at in range(0, len(tensor), rows):
            yield from rows_of(tensor[at : at + rows], *(other[at : at + rows] for other in others))
