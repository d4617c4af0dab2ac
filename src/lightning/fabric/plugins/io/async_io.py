"""The checkpoint plugin that saves in the background."""

import os
from typing import Any

import torch
from typing_extensions import override

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.storage.background import pending
from lightning.fabric.storage.background.queue import OnError
from lightning.fabric.storage.background.saver import BackgroundSaver, WhenBusy
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.types import _PATH


class AsyncCheckpointIO(CheckpointIO):
    """Saves checkpoints while training goes on, of every strategy, sharded ones included.

    A save returns when the state has been copied to host memory, which is allocated once. Saves and removals are done
    one after the other in a thread; a checkpoint is removed only when the one that replaces it has been saved. What
    fails is raised at the next step boundary (or by :meth:`drain`, or the next save), once; with the Trainer, by all
    Loading waits for everything in flight, and so do the end of training and of the interpreter.

    Args:
        checkpoint_io: The plugin that saves, loads and removes; by default a
            :class:`~lightning.fabric.plugins.io.torch_io.TorchCheckpointIO`. It is called in a thread of its own, and
            must not keep the tensors of a checkpoint when it has saved it: their memory is that of the next one.
        max_in_flight: The number of saves that may be in flight at a time. Each takes as much host memory as its state.
        when_busy: The treatment of a save that comes when there are as many: ``"wait"`` until one has ended, or
            ``"skip"`` it. A save after an exception always waits, and so does a ModelCheckpoint's second save at a
            step, which is that of ``save_last=True``.
        on_error: The treatment of a save that failed: ``"raise"`` stops training, ``"warn"`` lets it go on with a
            warning. The checkpoint that was to be replaced is kept in both cases.

    Raises:
        ValueError: An argument is none of these.
    """

    def __init__(
        self,
        checkpoint_io: CheckpointIO | None = None,
        *,
        max_in_flight: int = 1,
        when_busy: WhenBusy = "wait",
        on_error: OnError = "raise",
    ) -> None:
        if not isinstance(max_in_flight, int) or max_in_flight < 1:
            raise ValueError(f"`max_in_flight` is a number of saves, 1 or more, not {max_in_flight!r}")
        if when_busy not in ("wait", "skip"):
            raise ValueError(f'`when_busy` is "wait" or "skip", not {when_busy!r}')
        if on_error not in ("raise", "warn"):
            raise ValueError(f'`on_error` is "raise" or "warn", not {on_error!r}')
        super().__init__()
        self._checkpoint_io = checkpoint_io
        self._saver_arguments = (max_in_flight, when_busy, on_error)
        self._saver: BackgroundSaver | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a launcher may send the plugin to processes of its own, before anything is saved
        return {**self.__dict__, "_saver": None}

    @property
    def saver(self) -> BackgroundSaver:
        """The engine that saves in the background."""
        if self._saver is None or self._saver.process != os.getpid():  # a fork has none of its threads
            self._saver = BackgroundSaver(*self._saver_arguments)
        return self._saver

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that saves, loads and removes."""
        if self._checkpoint_io is None:
            self._checkpoint_io = TorchCheckpointIO()
        return self._checkpoint_io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Copies ``checkpoint``, and has the copy saved in the background.

        Args:
            checkpoint: The checkpoint.
            path: A local path, or a URL.
            storage_options: Options for the plugin that saves.

        Raises:
            OSError: An earlier save has failed, if ``on_error`` says so, in a job of one process.
            Exception: ``checkpoint`` cannot be pickled; whatever the pickler says of it.
        """
        if not _distributed_is_initialized() or torch.distributed.get_world_size() == 1:
            pending.settle()  # else this rank would fail alone, and the others wait for it
        io, path = self.checkpoint_io, _fixed(path)
        self.saver.save(
            checkpoint, locate(path), lambda copy: io.save_checkpoint(copy, path, storage_options=storage_options)
        )

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint with the plugin that loads, when everything in flight has been saved."""
        pending.drain()
        return self.checkpoint_io.load_checkpoint(*args, **kwargs)

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Removes a checkpoint after the saves in flight, unless the last one of them fails."""
        io, path = self.checkpoint_io, _fixed(path)
        self.saver.remove(locate(path), lambda: io.remove_checkpoint(path))

    def drain(self) -> None:
        """Waits until everything in flight is durable.

        Raises:
            OSError: A save or removal has failed; or whatever else the reason was.
        """
        pending.drain()

    @override
    def teardown(self) -> None:
        """Waits as :meth:`drain` does, and tears down the plugin that saves."""
        try:
            pending.drain()
        finally:
            self.checkpoint_io.teardown()


def _fixed(path: _PATH) -> _PATH:
    """Returns a path that does not depend on the working folder, which may be another one by the time it is used."""
    place = locate(path)
    absolute = place.absolute()
    return path if absolute == place else absolute.raw + "/" * os.fspath(path).endswith("/")
