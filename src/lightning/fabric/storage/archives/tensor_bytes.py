"""The values of tensors, piece by piece."""

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

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


def host_pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yields a tensor's bytes in host memory. Those of an accelerator come in new memory, of which none is kept.

    While one piece is being sent, the next is copied from the device.
    """
    pieces = (piece for (rows,) in rows_of(tensor) for piece in _pieces(rows))
    if tensor.device.type != "cuda":
        yield from (piece.cpu().numpy().data for piece in pieces)
        return
    copies = (_copy_from_cuda(piece) for piece in pieces)
    ahead = next(copies, None)
    while ahead is not None:
        host, copied = ahead
        ahead = next(copies, None)
        copied.synchronize()
        yield host.numpy().data


def _copy_from_cuda(piece: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    # torch keeps pinned memory that is free for the next piece, and does not give it out before the copy has ended
    host = torch.empty(len(piece), dtype=torch.uint8, device="cpu", pin_memory=True)
    host.copy_(piece, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(piece.device))
    return host, copied


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    yield from (flat[at : at + _PIECE] for at in range(0, len(flat), _PIECE))


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
