"""Plans a sharded save: local plans, and the agreement of all ranks on a global plan."""

import dataclasses
import hashlib
import io
import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from typing_extensions import override

from lightning.fabric.storage.collectives.rank_group import RankGroup
from lightning.fabric.storage.sharded.describable import Object, describable
from lightning.fabric.storage.sharded.global_plan import GlobalPlan, PackedPlan, join_plans


class _SavePlanner(DefaultSavePlanner):
    """Saves an :class:`Object` as its value."""

    @override
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, object.value if isinstance(object, Object) else object)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rank's shard of a state.

    Attributes:
        plan: The local plan of torch.distributed.checkpoint's planner.
        resolve: Returns the tensor or the bytes of an item.
        meta: The objects beside model and optimizer, if there are any. Those of rank zero are saved.
    """

    plan: SavePlan
    resolve: Callable[[WriteItem], Tensor | io.BytesIO]
    meta: Any

    @classmethod
    def of(cls, state: dict[str, Any], meta: Any, group: RankGroup) -> "Shard":
        """Returns this rank's shard of ``state``, without a copy.

        Raises:
            ValueError: A distributed tensor is in a part of ``state`` that is pickled as a whole.
        """
        planner = _SavePlanner()
        planner.set_up_planner(describable(state), is_coordinator=group.is_coordinator)
        return cls(planner.create_local_plan(), planner.resolve_data, meta if group.is_coordinator else None)

    def values(self) -> tuple[int, int]:
        """Returns how many values of distributed tensors this rank has, and how many these have in all."""
        shards = [item for item in self.plan.items if item.type == WriteItemType.SHARD and item.tensor_data]
        whole = {item.index.fqn: math.prod(item.tensor_data.size) for item in shards if item.tensor_data}
        return sum(math.prod(item.tensor_data.chunk.sizes) for item in shards if item.tensor_data), sum(whole.values())


@dataclasses.dataclass
class _Agreed:
    #: The digest of all local plans.
    digest: bytes
    plan: SavePlan
    #: None on other ranks than zero.
    global_plan: GlobalPlan | None


class PlanCache:
    """The plans that the ranks agreed on in their last save, which are used again if nothing has changed."""

    def __init__(self) -> None:
        self._agreed: _Agreed | None = None

    def agree(self, plan: Callable[[], SavePlan], group: RankGroup) -> tuple[SavePlan, GlobalPlan | None]:
        """Joins the plans of all ranks; a collective call.

        Args:
            plan: Returns the local plan of this rank.
            group: The group of all ranks.

        Returns:
            The items that this rank writes, and on rank zero the global plan.
        """
        before = self._agreed
        own: list[tuple[SavePlan, PackedPlan]] = []

        def digest_own() -> tuple[bytes, bytes | None]:
            made = plan()
            own.append((made, PackedPlan.of(made)))
            return _digest(own[0][1]), before.digest if before else None

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


def _digest(parts: Iterable[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def _compare(digests: list[tuple[bytes, bytes | None]]) -> list[tuple[bytes, bool]]:
    """Returns, for each rank, the digest of all plans, and whether it is the one that every rank agreed on before."""
    digest = _digest(own for own, _ in digests)
    return [(digest, all(before == digest for _, before in digests))] * len(digests)


def size_of(item: WriteItem) -> int:
    """Returns the bytes of the item's tensor; 0 for anything else."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
