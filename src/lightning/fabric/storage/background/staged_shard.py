"""Staged copies of a rank's shard."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from lightning.fabric.storage.background.staging import Staged, Staging
from lightning.fabric.storage.sharded.save_planner import Shard


def stage(shard: Shard, items: Sequence[WriteItem], staging: Staging) -> tuple[Staged, Callable[[], Shard]]:
    """Copies a rank's shard to host memory.

    Args:
        shard: The shard.
        items: The items of its plan that this rank may have to write.
        staging: The memory.

    Returns:
        The copy, and a function that waits for its bytes and returns a shard of it.
    """
    resolved = {item.index: shard.resolve(item) for item in items}
    tensors = {index: content for index, content in resolved.items() if isinstance(content, Tensor)}
    # the function has no tensors, which are let go as soon as their copies have arrived; objects are bytes already
    contents = {index: content for index, content in resolved.items() if index not in tensors}
    indexes, plan = list(tensors), shard.plan
    copy = staging.stage_tensors(list(tensors.values()), shard.meta)

    def arrived() -> Shard:
        contents.update(zip(indexes, copy.tensors, strict=True))
        return Shard(plan, lambda item: contents[item.index], copy.object())

    return copy, arrived
