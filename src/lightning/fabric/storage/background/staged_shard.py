"""A rank's shard with a copy of its contents in host memory."""

import dataclasses
import io

from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import MetadataIndex

from lightning.fabric.storage.background.staging import Staged, Staging
from lightning.fabric.storage.sharded.save_planner import Shard


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


def stage(shard: Shard, staging: Staging) -> StagedShard:
    """Copies all that a rank has of a state to host memory."""
    contents = {item.index: shard.resolve(item) for item in shard.plan.items}
    tensors = {index: content for index, content in contents.items() if isinstance(content, Tensor)}
    return StagedShard(staging.stage_tensors(list(tensors.values()), shard.meta), shard.plan, contents, list(tensors))
