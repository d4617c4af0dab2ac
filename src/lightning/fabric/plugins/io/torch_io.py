"""The default checkpoint plugin."""

import logging
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.remove import remove
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.storage.transport.retry import retrying
from lightning.fabric.utilities.types import _PATH

log = logging.getLogger(__name__)


class TorchCheckpointIO(CheckpointIO):
    """Keeps each checkpoint as one file that :func:`torch.load` reads, on a local disk or at any fsspec URL."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Saves ``checkpoint``, whole or not at all.

        To object stores it is uploaded in parts while it is being written; on other file systems it is written beside
        ``path`` and renamed. Missing folders are made.

        Args:
            checkpoint: The checkpoint.
            path: A local path, or a URL.
            storage_options: A dictionary of options for the fsspec file system of a URL, such as ``endpoint_url``, on
                top of those that fsspec is configured with. A local path has none.

        Raises:
            TypeError: ``storage_options`` is not a dictionary.
            OSError: The checkpoint could not be saved. What was at ``path`` before is unchanged.
        """
        save_file(checkpoint, path, storage_options)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = lambda storage, loc: storage,
        weights_only: bool | None = None,
        storage_options: Any | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint that :meth:`save_checkpoint` saved.

        Args:
            path: A local path, or a URL; ``http(s)`` URLs too.
            map_location: The argument of that name of :func:`torch.load`. By default tensors stay in host memory.
            weights_only: The argument of that name of :func:`torch.load`: with True, nothing but tensors and plain
                Python types is unpickled, which is the right choice for a file from someone else.
            storage_options: Options for the file system of a URL.

        Raises:
            FileNotFoundError: There is no checkpoint at ``path``.
            IsADirectoryError: There is a folder, such as a sharded checkpoint.
            OSError: The file could not be read, or was replaced meanwhile.
            RuntimeError: The file is truncated, or is no checkpoint.
        """
        checkpoint: dict[str, Any] = load_file(path, map_location, weights_only, storage_options)
        return checkpoint

    @override
    def remove_checkpoint(self, path: _PATH, storage_options: Any | None = None) -> None:
        """Removes a checkpoint, be it a file or the folder of a sharded one, if there is one.

        Args:
            path: A local path, or a URL. Taken literally: ``*`` and the like have no meaning in it.
            storage_options: Options for the file system of a URL.
        """
        place = locate(path, storage_options)
        with questions_named(place, "remove"):
            retrying(f"The removal of {place}", lambda: remove(place))
        log.debug(f"Nothing is left at {place}")
