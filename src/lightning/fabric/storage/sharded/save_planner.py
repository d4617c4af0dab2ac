"""Which rank writes what of a sharded checkpoint."""

import dataclasses
import hashlib
import io
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.planner import WriteItem
from typing_extensions import override

from lightning.fabric.storage.collectives.rank_group import RankGroup
from lightning.fabric.storage.sharded.describable import Object, describable
from lightning.fabric.storage.sharded.global_plan import GlobalPlan, PackedPlan, join_plans


class _Planner(DefaultSavePlanner):
    """Takes objects as they are."""

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, object.value if isinstance(object, Object) else object)


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
    def of(cls, state: dict[str, Any], meta: Any, group: RankGroup) -> "Shard":
        """What this rank has of ``state``, where it is.

        Raises:
            ValueError: A part of ``state`` is of this rank alone, and cannot be put together with those of others.
        """
        planner = _Planner()
        planner.set_up_planner(describable(state), is_coordinator=group.is_coordinator)
        return cls(planner.create_local_plan(), planner.resolve_data, meta if group.is_coordinator else None)


@dataclasses.dataclass
class _Agreed:
    #: Tells the agreements apart.
    digest: bytes
    plan: SavePlan
    #: Rank zero's.
    global_plan: GlobalPlan | None


class PlanCache:
    """What the ranks have agreed upon in their last save, so that they need not do so again if nothing has changed."""

    def __init__(self) -> None:
        self._agreed: _Agreed | None = None

    def agree(self, plan: Callable[[], SavePlan], group: RankGroup) -> tuple[SavePlan, GlobalPlan | None]:
        """Joins the plans of all ranks; a collective call.

        Args:
            plan: Returns what this rank has.
            group: Of all ranks.

        Returns:
            What this rank is to write, without what another one writes as well; and on rank zero what all of them do.
        """
        before = self._agreed
        own: list[tuple[SavePlan, PackedPlan]] = []

        def digest_own() -> tuple[bytes, bytes | None]:
            made = plan()
            own.append((made, PackedPlan.of(made)))
            return _digest(b"".join(own[0][1])), before.digest if before else None

        digest, is_known = group.gather_scatter("plan", digest_own, _compare)
        if before is None or not is_known:
            self._agreed = None
            global_plan: list[GlobalPlan] = []

            def join(packed: list[PackedPlan]) -> list[bytes]:
                answers, joined = join_plans(packed)
                global_plan.append(joined)
                return answers

            made, packed = own[0]
            is_written = group.gather_scatter("plan", lambda: packed, join)
            items = [item for item, written in zip(made.items, is_written, strict=True) if written]
            joined = dataclasses.replace(made, items=items)
            before = self._agreed = _Agreed(digest, joined, global_plan[0] if global_plan else None)
        return before.plan, before.global_plan


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _compare(said: list[tuple[bytes, bytes | None]]) -> list[tuple[bytes, bool]]:
    """What all plans together are called, and whether that is what every rank has agreed upon before."""
    digest = _digest(b"".join(own for own, _ in said))
    return [(digest, all(before == digest for _, before in said))] * len(said)


def size_of(item: WriteItem) -> int:
    """The bytes of a tensor that is to be written; 0 of anything else."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
