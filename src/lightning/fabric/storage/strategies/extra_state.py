"""The rest of a checkpoint of all ranks, beside model and optimizers, of which only what rank zero has is saved."""

import logging
import math
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.sharded.describable import is_distributed, is_shard, is_values, tensors_in

log = logging.getLogger(__name__)

#: How many values of a tensor are compared.
_SAMPLE = 1024
#: By the path of each tensor: its type, its shape, and a checksum of some of its values.
_Summary = dict[str, tuple[Any, ...]]


def refuse_parts(rest: Mapping[str, Any], place: Place) -> None:
    """Refuses to save a tensor that is a part which only this rank has, for the others would get that of rank zero.

    A collective call. Numbers may differ from rank to rank, and so may tensors of one value, such as metrics. Of whole
    numbers that do, such as the state of a random number generator, there is a warning: those of rank zero are saved.

    Args:
        rest: The rest of the checkpoint, which is saved of rank zero.
        place: The place of the checkpoint, for the error.

    Raises:
        ValueError: There is such a tensor; the message says where. Every rank raises it.
    """
    from torch.distributed.checkpoint import CheckpointException

    from lightning.fabric.storage.collectives.rank_group import RankGroup

    group = RankGroup()
    try:
        group.gather_scatter("save", lambda: _summary_of(rest), _compare)
    except CheckpointException as error:
        if group.error is not None and not isinstance(group.error, Exception):
            raise group.error from None
        reason = next(iter(error.failures.values()))[0]
        raise ValueError(f"Could not save {place}: {reason}") from error


def _summary_of(rest: Mapping[str, Any]) -> _Summary:
    summary: _Summary = {}
    for path, tensor in tensors_in(rest):
        if is_shard(tensor):
            raise ValueError(
                f"{path!r} is a distributed tensor, of which each rank has a part, and outside of model and optimizers"
                " only what rank zero has is saved. Put its `full_tensor()` there, on all ranks."
            )
        if not is_distributed(tensor) and is_values(tensor) and tensor.numel() > 1:
            summary[path] = (tensor.dtype, tuple(tensor.shape), _checksum(tensor.detach()))
    return summary


def _checksum(tensor: Tensor) -> int:
    some = tensor.reshape(-1)[:: math.ceil(tensor.numel() / _SAMPLE)].cpu().resolve_conj().resolve_neg()
    return zlib.crc32(some.contiguous().view(torch.uint8).numpy().data)


def _compare(summaries: list[_Summary]) -> list[None]:
    for path, (dtype, shape, checksum) in summaries[0].items():
        for rank, summary in enumerate(summaries):
            of_rank = summary.get(path, (dtype, shape, checksum))
            if of_rank[:2] == (dtype, shape) and not (dtype.is_floating_point or dtype.is_complex):
                if of_rank[2] != checksum:
                    _warn_of_rank_zeros(path)
            elif of_rank != (dtype, shape, checksum):
                raise ValueError(
                    f"{path!r} is not the same tensor on rank {rank} as on rank 0, and outside of model and optimizers"
                    " only what rank zero has is saved. If each rank has a part, put the whole there, on all ranks"
                    " (`DTensor.full_tensor()`, or `FSDP.summon_full_params`); if each has its own, a list of all"
                    " (`torch.distributed.all_gather_object`)."
                )
    return [None] * len(summaries)


@cache
def _warn_of_rank_zeros(path: str) -> None:
    log.warning(
        f"{path!r} is not the same on all ranks. A checkpoint has that of rank zero, which all of them get when they"
        " resume: if each needs its own, save a list of all (`torch.distributed.all_gather_object`)."
    )
