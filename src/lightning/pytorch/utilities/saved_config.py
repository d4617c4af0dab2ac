"""The configuration that LightningCLI saves beside the logs of a run."""

from typing import Any

from lightning.fabric.loggers.logs import make_folder
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.transport.text import is_there, open_text


class ConfigFile:
    """The file of a configuration, with the methods that LightningCLI calls on a file system for it.

    Args:
        parser: The parser of jsonargparse that has made the configuration.
    """

    def __init__(self, parser: Any) -> None:
        self._parser = parser

    def isfile(self, path: str) -> bool:
        """Returns whether there is something; see :func:`~lightning.fabric.storage.transport.text.is_there`."""
        return is_there(path)

    def makedirs(self, folder: str, exist_ok: bool) -> None:
        """Makes a folder where one is needed; see :func:`~lightning.fabric.loggers.logs.make_folder`."""
        make_folder(folder)

    def save(self, config: Any, path: str, *, multifile: bool, **arguments: Any) -> None:
        """Saves a configuration, in a folder that is there.

        jsonargparse's own way to a URL has fsspec make a folder, for which s3fs asks about the bucket and would make
        one: a user with rights on a prefix of a bucket may do neither.

        Args:
            config: The configuration.
            path: A local path or a URL.
            multifile: Whether to keep apart the files that it was read from, which is possible at local paths only.
            arguments: Further arguments of the parser's own method, for local paths.

        Raises:
            OSError: It could not be written.
        """
        if multifile or locate(path).is_local:
            self._parser.save(config, path, multifile=multifile, **arguments)
            return
        with open_text(path, "w") as file:
            file.write(self._parser.dump(config, skip_none=False))
