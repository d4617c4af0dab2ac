"""Loads one file."""

import os
from pathlib import Path
from typing import IO, Any

import torch

from lightning.fabric.storage.location import (
    Location,
    display,
    is_file,
    join,
    kind,
    locate,
)
from lightning.fabric.storage.transport import open_reader

_Path = str | os.PathLike[str]


def load_file(path: _Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Loads with :func:`torch.load` what is at ``path``, a local path or a URL of any fsspec protocol.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
    """
    with open_reader(locate(path)) as file:
        return torch.load(file, map_location=map_location, weights_only=weights_only)


def existing_file(path: _Path) -> Location:
    """The place of a file that is there.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        IsADirectoryError: There is a folder, such as a sharded checkpoint. Opened as a file, it is an empty one on
            an object store.
    """
    location = locate(path)
    found = kind(location)
    if found == "nothing":
        raise FileNotFoundError(f"Checkpoint file not found: {display(location)}")
    if found == "directory":
        what = "a folder, not a checkpoint file"
        if is_file(join(location, "meta.pt")):
            what = "a sharded checkpoint: load it with FSDP or ModelParallel, or consolidate a local copy of it first"
        raise IsADirectoryError(f"{display(location)} is {what}")
    return location


def archive(path: _Path) -> str | IO[bytes]:
    """What :class:`torch.PyTorchFileReader` reads the checkpoint at ``path`` from, record by record.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
    """
    location = locate(path)
    if not isinstance(location, Path):
        return open_reader(location)
    if not location.is_file():  # which the reader itself would report as a RuntimeError
        raise FileNotFoundError(f"There is no file {str(location)!r}")
    return str(location)
