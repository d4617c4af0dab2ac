"""Staged copies of a rank's shard."""

from collections.abc import Callable

from torch import Tensor

from lightning.fabric.storage.background.staging import Staged, Staging
from lightning.fabric.storage.sharded.save_planner import Shard


def stage(shard: Shard, staging: Staging) -> tuple[Staged, Callable[[], Shard]]:
    """Copies a rank's shard to host memory.

    Returns:
        The copy, and a function that waits for its bytes and returns a shard of it.
    """
    contents = {item.index: shard.resolve(item) for item in shard.plan.items}  # objects are bytes already
    tensors = {index: content for index, content in contents.items() if isinstance(content, Tensor)}
    indexes, plan = list(tensors), shard.plan
    copy = staging.stage_tensors(list(tensors.values()), shard.meta)

    def arrived() -> Shard:
        contents.update(zip(indexes, copy.tensors, strict=True))
        return Shard(plan, lambda item: contents[item.index], copy.object())

    return copy, arrived
