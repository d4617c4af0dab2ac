"""Files that PyTorch loads, but that the Trainer has not saved."""

import os
from collections.abc import Mapping
from typing import Any

from lightning.fabric.storage.paths.redact import redact

_SHOWN = 4


def refuse_foreign(loaded: Any, path: str | os.PathLike[str] | None) -> None:
    """Refuses what is no checkpoint of the Trainer's.

    Raises:
        ValueError: It is not. The message names the file and what is in it.
    """
    if isinstance(loaded, Mapping) and "pytorch-lightning_version" in loaded:
        return
    what = f"an object of type {type(loaded).__name__!r}"
    if isinstance(loaded, Mapping):
        names = [repr(name) for name in loaded]
        what = f"a dictionary of {', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)}"
    file = "The file" if path is None else redact(os.fspath(path))
    raise ValueError(
        f"{file} is no checkpoint of the Trainer's: it has {what}, and no 'pytorch-lightning_version'. Load"
        " what Fabric has saved with `fabric.load`, and the weights of a module with `torch.load` and `load_state_dict`"
    )
