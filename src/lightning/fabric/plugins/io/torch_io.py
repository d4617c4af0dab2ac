"""The default checkpoint plugin."""

import logging
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.storage import location
from lightning.fabric.storage.load import existing_file
from lightning.fabric.storage.namespace import remove
from lightning.fabric.storage.save import save_file
from lightning.fabric.utilities.cloud_io import _load
from lightning.fabric.utilities.types import _PATH

log = logging.getLogger(__name__)


class TorchCheckpointIO(CheckpointIO):
    """Keeps each checkpoint as one file that :func:`torch.load` reads, on a local disk or at any fsspec URL."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Saves ``checkpoint``, whole or not at all.

        On object stores it is uploaded with ``pipe_file``, in concurrent parts where the store's client does that; on
        other file systems it is written beside ``path`` and renamed. Missing folders are made.

        Args:
            checkpoint: What to save.
            path: A local path, or a URL.
            storage_options: Not supported by this plugin.

        Raises:
            TypeError: ``storage_options`` are given.
            OSError: The checkpoint could not be saved. What was at ``path`` before is unchanged.
        """
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__} takes no `storage_options`. Configure the file system through fsspec instead"
                " (its configuration files or the store's environment variables), or pass a `CheckpointIO` plugin of"
                " your own that makes use of them."
            )
        log.debug(f"torch.save to {location.display(location.locate(path))}")
        save_file(checkpoint, path)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads what :meth:`save_checkpoint` saved.

        Args:
            path: A local path, or a URL; ``http(s)`` URLs too.
            map_location: As for :func:`torch.load`. By default tensors stay in host memory.
            weights_only: As for :func:`torch.load`: with True, nothing but tensors and plain Python types is unpickled,
                which is the right choice for a file from someone else.

        Raises:
            FileNotFoundError: There is no checkpoint at ``path``.
            IsADirectoryError: There is a folder, such as a sharded checkpoint.
        """
        checkpoint: dict[str, Any] = _load(existing_file(path), map_location=map_location, weights_only=weights_only)
        return checkpoint

    @override
    def remove_checkpoint(self, path: _PATH) -> None:
        """Removes a checkpoint, be it a file or the folder of a sharded one, if there is one.

        Args:
            path: A local path, or a URL. Taken literally: ``*`` and the like have no meaning in it.
        """
        place = location.locate(path)
        remove(place)
        log.debug(f"Nothing is left at {location.display(place)}")
