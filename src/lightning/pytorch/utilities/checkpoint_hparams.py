"""The hyperparameters in a checkpoint file, without its tensors."""

import logging
import os
from typing import Any

import torch

from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.without_tensors import load_without_tensors
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.redact import redact

log = logging.getLogger(__name__)

_Path = str | os.PathLike[str]


def is_checkpoint_file(path: _Path) -> bool:
    """Returns whether there is a file at a local path or a URL; False if only a plugin that loads it can tell.

    Raises:
        OSError: The store did not answer.
    """
    try:
        return locate(path).is_file()
    except (ImportError, ValueError) as error:
        log.debug(f"No hyperparameters are taken from {redact(str(path))!r}: {error}")
        return False


def load_beside_tensors(path: _Path, weights_only: bool | None = None) -> dict[str, Any]:
    """Loads a checkpoint file without its weights, none of which are read if possible.

    Args:
        path: The file's local path or URL.
        weights_only: The argument of that name of :func:`torch.load`, but None means True.

    Raises:
        OSError: The file could not be read.
        pickle.UnpicklingError: There is more than tensors and plain Python types, and nothing else may be loaded.
    """
    place, weights_only = locate(path), weights_only is not False
    found = load_without_tensors(place, weights_only)
    loaded: dict[str, Any] = load_file(place, "cpu", weights_only) if found is None else found.obj
    hparams = loaded.get("hyper_parameters", {})
    if found is not None and any(isinstance(value, torch.Tensor) for value in hparams.values()):
        loaded = load_file(place, "cpu", weights_only)
    return loaded
