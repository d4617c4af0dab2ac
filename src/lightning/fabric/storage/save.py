"""Saves one file."""

import os
from typing import Any

import torch

from lightning.fabric.storage.location import locate
from lightning.fabric.storage.transport import open_writer


def save_file(obj: Any, path: str | os.PathLike[str]) -> None:
    """Saves ``obj`` with :func:`torch.save`, whole or not at all.

    Args:
        obj: Anything that ``torch.save`` takes.
        path: A local path or a URL of any fsspec protocol. Missing folders are made.

    Raises:
        OSError: The file could not be written; what was at ``path`` before is unchanged. The type is a more specific
            one for common reasons, such as ``PermissionError``.
    """
    with open_writer(locate(path)) as file:
        torch.save(obj, file)
