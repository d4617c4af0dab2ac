"""The bytes of a tensor in host memory, piece by piece."""

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

#: How much of a tensor is on its way from an accelerator to host memory, twice, or is checked before it is sent.
_PIECE = 16 * 2**20


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than its values, one after the other in memory."""
    is_own_class = type(tensor.detach()) is Tensor and not tensor.is_conj() and not tensor.is_neg()
    is_strided = tensor.layout == torch.strided and not tensor.is_nested
    return is_own_class and is_strided and not tensor.is_quantized and tensor.device.type != "meta"


def memory_of(tensor: Tensor) -> Hashable:
    """Where the values of a plain tensor are: the same for those that are tied, as long as both are alive."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def host_pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in host memory. Those of an accelerator come in memory of their own, and none is kept.

    While one piece is being sent, the next is on its way from the device.
    """
    pieces = _pieces(tensor)
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
    """Bytes, on the tensor's device, that make up its values in row-major order: views of it if it is contiguous."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.reshape(-1).view(torch.uint8)
        yield from (flat[at : at + _PIECE] for at in range(0, len(flat), _PIECE))
    elif tensor.nbytes <= _PIECE:
        yield tensor.contiguous().reshape(-1).view(torch.uint8)
    elif len(tensor) == 1:
        yield from _pieces(tensor[0])
    else:
        rows = max(1, _PIECE * len(tensor) // tensor.nbytes)
        for at in range(0, len(tensor), rows):
            yield from _pieces(tensor[at : at + rows])
