"""The checkpoint plugin that saves in the background, for the Trainer."""

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.async_io import AsyncCheckpointIO as _AsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO


class AsyncCheckpointIO(_AsyncCheckpointIO, _WrappingCheckpointIO):
    """Saves checkpoints while training goes on; see :class:`lightning.fabric.plugins.io.async_io.AsyncCheckpointIO`.

    Args:
        checkpoint_io: The plugin that saves, loads and removes; by default the one that the strategy uses otherwise.
        max_in_flight: The number of saves that may be in flight at a time.
        when_busy: ``"wait"`` or ``"skip"``, for a save that comes when there are as many.
        on_error: ``"raise"`` or ``"warn"``, for a save that failed.
    """

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that saves, loads and removes."""
        return _AsyncCheckpointIO.checkpoint_io.fget(self)  # type: ignore[attr-defined, no-any-return]

    @checkpoint_io.setter
    def checkpoint_io(self, checkpoint_io: CheckpointIO) -> None:
        # a strategy sets what it uses, which counts unless there is a plugin already
        _WrappingCheckpointIO.checkpoint_io.fset(self, checkpoint_io)  # type: ignore[attr-defined]
