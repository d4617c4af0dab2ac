"""Parts of parameters that are flat ranges, and the agreement of all ranks that theirs make up the parameters."""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, eq=False)
class FlatPart:
    """This rank's part of one parameter of a module.

    Attributes:
        name: The parameter's name in checkpoints.
        parameter: The parameter that an optimizer has: this one, or the flat one that it is a part of.
        owners: The modules that have the parameter, each with its name there.
        shape: The shape of the whole parameter.
        dims: The dimensions from that with the largest stride to that with the smallest.
        range: The flat range of the parameter that this rank has, from its first value to the one after the last.
        offset: The number of the range's first value among the values of ``parameter`` that this rank has.
        held: The number of these values.
        is_replicated: Whether every rank has the whole parameter, which its strategy does not shard.
        local: The values, on the memory of the flat parameter.
    """

    name: str
    parameter: Tensor
    owners: list[tuple[nn.Module, str]]
    shape: torch.Size
    dims: tuple[int, ...]
    range: tuple[int, int]
    offset: int
    held: int
    is_replicated: bool
    local: Tensor

    @cached_property
    def value(self) -> Tensor:
        """Returns the parameter in place: its shard, or the whole of it where it is replicated."""
        return self._part(self.local)

    def state(self, value: Tensor) -> Tensor:
        """Returns this parameter's part of a state that an optimizer has of ``parameter``, in place.

        Args:
            value: A tensor with a value for each that this rank has of ``parameter``. The planner refuses any other.
        """
        if self.is_replicated and value.shape == self.shape:
            return value
        flat = value.reshape(-1)
        return self._part(flat.narrow(0, self.offset, len(self.local)) if len(flat) == self.held else flat)

    def nothing_of(self, like: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns shards without values in the place of the state of a parameter of which this rank has none.

        Args:
            like: The state of another parameter.
        """
        from lightning.fabric.storage.sharded.flat_shard import FlatShard

        tensors = {key: value for key, value in like.items() if isinstance(value, Tensor)}
        return {
            key: FlatShard(self.local.new_empty(0, dtype=value.dtype), 0, 0, self.shape if value.dim() else ())
            for key, value in tensors.items()
        }

    def _part(self, local: Tensor) -> Tensor:
        from lightning.fabric.storage.sharded.flat_shard import FlatShard

        if not self.is_replicated:
            return FlatShard(local, *self.range, self.shape, self.dims)
        whole = local.view([self.shape[dim] for dim in self.dims])
        return whole.permute([self.dims.index(dim) for dim in range(len(self.shape))])


class Description(NamedTuple):
    """A rank's description of its parts, in little memory.

    Attributes:
        reason: The reason why the rank cannot describe them, if there is one.
        digest: A digest of all that is the same on all ranks.
        ranges: The first value and the one after the last of each part, as whole numbers of eight bytes.
    """

    reason: str | None
    digest: bytes
    ranges: bytes

    @classmethod
    def of(cls, parts: Iterable[FlatPart], reason: str | None) -> "Description":
        """Describes parts in their order."""
        same = [(part.name, tuple(part.shape), part.dims, str(part.local.dtype)) for part in parts]
        digest = hashlib.blake2b(repr(same).encode(), digest_size=16).digest()
        return cls(reason, digest, np.array([part.range for part in parts], "<i8").tobytes())


def agree(describe: Callable[[], Description], parts: list[FlatPart]) -> str | None:
    """Checks that the ranks have each value once, or replicas of it; a collective call.

    Args:
        describe: Returns the description of this rank's parts.
        parts: The parts, whose names and shapes are the same on all ranks.

    Returns:
        On all ranks the same reason why their parts do not make up the parameters, or None.

    Raises:
        RuntimeError: A rank could not take part.
    """
    from torch.distributed.checkpoint import CheckpointException

    from lightning.fabric.storage.collectives.rank_group import RankGroup

    group = RankGroup()
    try:
        reason: str | None = group.gather_scatter(
            "describe", describe, lambda ranks: [_reason_against(ranks, parts)] * len(ranks)
        )
    except CheckpointException as error:
        if group.error is not None and not isinstance(group.error, Exception):
            raise group.error from None
        raise RuntimeError(f"Could not describe the shards of FSDP: {error}") from error
    return reason


def _reason_against(ranks: list[Description], parts: list[FlatPart]) -> str | None:
    for rank, description in enumerate(ranks):
        if description.reason is not None:
            return description.reason
        if description.digest != ranks[0].digest:
            return f"rank {rank} has other parameters than rank 0"
    by_rank = [np.frombuffer(description.ranges, "<i8").reshape(-1, 2) for description in ranks]
    for part, ranges in zip(parts, np.stack(by_rank, axis=1), strict=True):
        have = np.unique(ranges[ranges[:, 0] < ranges[:, 1]], axis=0)  # replicas have the same
        if [*have[:, 0].tolist(), math.prod(part.shape)] != [0, *have[:, 1].tolist()]:
            return f"the ranks do not have each value of {part.name!r} once"
    return None
