"""Lightning's own savers, which save a checkpoint at the path that they are given.

A plugin of the user's may save it anywhere: with something added to the name, as a folder, or in a database.
"""

from typing import Any

_PACKAGES = ("lightning", "lightning_fabric", "pytorch_lightning")


def saves_at_path(saver: Any) -> bool:
    """Returns whether each checkpoint is saved at the path that is given, as far as is known.

    Args:
        saver: A strategy, or a checkpoint plugin; what it saves with counts as well.
    """
    return _has_own(saver, "save_checkpoint")


def loads_from_path(saver: Any) -> bool:
    """Returns whether each checkpoint is looked for at the path that is given, and so has to be saved there.

    Args:
        saver: A strategy, or a checkpoint plugin; what it loads with counts as well.
    """
    return _has_own(saver, "load_checkpoint")


def _has_own(saver: Any, method: str) -> bool:
    while saver is not None:
        module = getattr(getattr(saver, method, None), "__module__", "")
        if module.partition(".")[0] not in _PACKAGES:
            return False
        if saves_shards(saver):  # by itself
            return True
        saver = getattr(saver, "checkpoint_io", None)
    return True


def saves_shards(strategy: Any) -> bool:
    """Returns whether a strategy saves sharded checkpoints."""
    sharded = getattr(strategy, "_state_dict_type", None) == "sharded"
    return sharded or bool(getattr(strategy, "_save_distributed_checkpoint", False))
