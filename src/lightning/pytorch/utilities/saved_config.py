"""The configuration that LightningCLI saves beside the logs of a run."""

import os
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logs import make_folder
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.transport.text import open_text


def write_config(parser: Any, config: Any, path: str, overwrite: bool, multifile: bool) -> None:
    """Saves a configuration, in a folder that is made where one is needed.

    jsonargparse's own way to a URL has fsspec make a folder, for which s3fs asks about the bucket and would make one.
    Who has rights on a prefix of a bucket may do neither.

    Args:
        parser: jsonargparse's, of which the configuration is.
        config: The configuration.
        path: A local path or a URL.
        overwrite: Whether a local file may be overwritten.
        multifile: Whether to keep files apart that it was read from, which is possible at local paths only.

    Raises:
        OSError: It could not be written.
    """
    make_folder(os.path.dirname(path))
    if multifile or isinstance(locate(path), Path):
        parser.save(config, path, skip_none=False, overwrite=overwrite, multifile=multifile)
        return
    with open_text(path, "w") as file:
        file.write(parser.dump(config, skip_none=False))
