"""The hyperparameters in a checkpoint file, without its tensors."""

import os
from typing import Any

import torch

from lightning.fabric.storage.load import load_file, load_without_tensors
from lightning.fabric.storage.location import is_file, locate

_Path = str | os.PathLike[str]


def is_checkpoint_file(path: _Path) -> bool:
    """Whether there is a file at a local path or a URL.

    Raises:
        OSError: The store did not answer.
    """
    return is_file(locate(path))


def load_beside_tensors(path: _Path) -> dict[str, Any]:
    """Loads a checkpoint file with ``weights_only=True``, but for its weights, of which nothing is read if possible.

    Raises:
        OSError: The file could not be read.
        pickle.UnpicklingError: There is more than tensors and plain Python types.
    """
    location = locate(path)
    found = load_without_tensors(location, weights_only=True)
    loaded: dict[str, Any] = load_file(location, "cpu", weights_only=True) if found is None else found.obj
    hparams = loaded.get("hyper_parameters", {})
    if found is not None and any(isinstance(value, torch.Tensor) for value in hparams.values()):
        loaded = load_file(location, "cpu", weights_only=True)
    return loaded
