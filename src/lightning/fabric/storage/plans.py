"""Which rank writes what of a sharded checkpoint."""

import dataclasses
import hashlib
import io
import math
import pickle
from collections import ChainMap
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from lightning.fabric.storage.meeting import Meeting
from lightning.fabric.storage.staging import Staged, Staging


@dataclasses.dataclass(frozen=True)
class Shard:
    """What this rank has of a state.

    Attributes:
        plan: Its items, as torch.distributed.checkpoint's planner has them.
        resolve: Returns what an item consists of.
        meta: What belongs to the checkpoint beside model and optimizer; that of rank zero is saved. None if there is
            nothing.
    """

    plan: SavePlan
    resolve: Callable[[WriteItem], Tensor | io.BytesIO]
    meta: Any

    @classmethod
    def of(cls, state: dict[str, Any], meta: Any, meeting: Meeting) -> "Shard":
        """What this rank has of ``state``, where it is."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=meeting.is_coordinator)
        return cls(planner.create_local_plan(), planner.resolve_data, meta if meeting.is_coordinator else None)

    def staged(self, staging: Staging) -> "StagedShard":
        """The same with a copy of everything in host memory."""
        contents = {item.index: self.resolve(item) for item in self.plan.items}
        tensors = {index: content for index, content in contents.items() if isinstance(content, Tensor)}
        return StagedShard(staging.stage_tensors(list(tensors.values()), self.meta), self.plan, contents, list(tensors))


@dataclasses.dataclass(frozen=True)
class StagedShard:
    """A copy of what this rank has of a state.

    Attributes:
        copy: Where the memory is.
    """

    copy: Staged
    _plan: SavePlan
    #: What is no tensor has been made into bytes already.
    _contents: dict[MetadataIndex, Tensor | io.BytesIO]
    _tensors: list[MetadataIndex]

    def arrived(self) -> Shard:
        """The copy, when it is complete."""
        self._contents.update(zip(self._tensors, self.copy.tensors, strict=True))
        return Shard(self._plan, lambda item: self._contents[item.index], self.copy.object())


@dataclasses.dataclass
class _Agreed:
    #: Tells the agreements apart.
    digest: bytes
    plan: SavePlan
    #: Rank zero's.
    metadata: Metadata | None = None


class Plans:
    """What the ranks have agreed upon in their last save, so that they need not do so again if nothing has changed.

    To send the plans of a thousand ranks, and to join them, takes rank zero longer than anything else it does.
    """

    def __init__(self) -> None:
        self._agreed: _Agreed | None = None

    def agree(self, plan: Callable[[], SavePlan], meeting: Meeting) -> tuple[SavePlan, Metadata | None]:
        """Joins the plans of all ranks; a collective call.

        Args:
            plan: Returns what this rank has.
            meeting: Of all ranks.

        Returns:
            What this rank is to write, without what another one writes as well; and on rank zero the metadata of the
            checkpoint, without what is known only when all is written.
        """
        before = self._agreed
        plans: list[SavePlan] = []

        def digest_own() -> tuple[bytes, bytes | None]:
            plans.append(plan())
            return _digest(pickle.dumps(plans[0])), before.digest if before else None

        digest, is_known = meeting.hold("plan", digest_own, _compare)
        if before is None or not is_known:
            self._agreed = None
            metadata: list[Metadata] = []

            def join(all_plans: list[SavePlan]) -> list[SavePlan]:
                joined, described = join_plans(all_plans)
                metadata.append(described)
                return joined

            joined = meeting.hold("plan", lambda: plans[0], join)
            before = self._agreed = _Agreed(digest, joined, metadata[0] if metadata else None)
        return before.plan, None if before.metadata is None else dataclasses.replace(before.metadata)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _compare(said: list[tuple[bytes, bytes | None]]) -> list[tuple[bytes, bool]]:
    """What all plans together are called, and whether that is what every rank has agreed upon before."""
    digest = _digest(b"".join(own for own, _ in said))
    return [(digest, all(before == digest for _, before in said))] * len(said)


def join_plans(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """What each rank is to write, and what the checkpoint consists of.

    What several ranks have is written by the one of them that has the least to write. torch's own planner does the
    same, but looks for chunks that overlap in a time that grows with the square of the number of ranks.

    Args:
        plans: What each rank has.

    Raises:
        ValueError: The chunks of a tensor are not all there is of it, or lie outside of it.
    """
    joined, metadata = create_default_global_save_plan(_without_duplicates(plans))
    metadata = dataclasses.replace(metadata, planner_data=dict(ChainMap(*(plan.planner_data for plan in plans))))
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata) and (wrong := _wrong_with(described)):
            raise ValueError(f"The ranks do not have {name!r} of shape {tuple(described.size)} in parts: {wrong}")
    return joined, metadata


def _without_duplicates(plans: list[SavePlan]) -> list[SavePlan]:
    holders: dict[MetadataIndex, list[int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
    loads = [sum(size_of(item) for item in plan.items if len(holders[item.index]) == 1) for plan in plans]
    writers: dict[MetadataIndex, int] = {}
    for plan in plans:
        for item in plan.items:
            if len(ranks := holders[item.index]) > 1 and item.index not in writers:
                writer = writers[item.index] = min(ranks, key=lambda one: loads[one])
                loads[writer] += size_of(item)
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if writers.get(item.index, rank) == rank])
        for rank, plan in enumerate(plans)
    ]


def _wrong_with(described: TensorStorageMetadata) -> str:
    outside = [
        chunk
        for chunk in described.chunks
        if any(at + size > whole for at, size, whole in zip(chunk.offsets, chunk.sizes, described.size, strict=True))
    ]
    if outside:
        return f"one at {tuple(outside[0].offsets)} of shape {tuple(outside[0].sizes)} is not within it"
    have, whole = sum(math.prod(chunk.sizes) for chunk in described.chunks), math.prod(described.size)
    return f"they have {have} values and not {whole}" if have != whole else ""


def size_of(item: WriteItem) -> int:
    """The bytes of a tensor that is to be written; 0 of anything else."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
