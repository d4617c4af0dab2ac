"""Saves files with ``torch.save``."""

import os
import pickle
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from typing_extensions import override

from lightning.fabric.storage.gc_pause import collection_paused
from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.save_report import reported, stages
from lightning.fabric.storage.transport.open import open_writer


def save_file(obj: Any, path: AnyPath, options: Mapping[str, Any] | None = None) -> None:
    """Saves ``obj`` with :func:`torch.save`, whole or not at all.

    Args:
        obj: Anything that ``torch.save`` takes.
        path: A local path or a URL of any fsspec protocol. Missing folders are made.
        options: Options of the fsspec client, see :func:`~lightning.fabric.storage.paths.location.locate`.

    Raises:
        IsADirectoryError: ``path`` ends with a slash, as the name of a folder does.
        OSError: The file could not be written; what was at ``path`` before is unchanged. The type is a more specific
            one for common reasons, such as ``PermissionError``.
    """
    if not isinstance(path, Place) and (text := os.fspath(path)).endswith(("/", os.sep)):
        raise IsADirectoryError(
            f"{redact(text)} ends with a slash, as the name of a folder does, and what is saved is one file: give it a"
            f" name, such as {redact(text)}model.ckpt, or leave the slash out."
        )
    place = locate(path, options)
    with reported(place), stages("upload") as enter_stage, open_writer(place) as file:
        write_object(obj, file)
        enter_stage("commit")


class Announced(Protocol):
    """A file to which memory is announced before it is written, such as a sink."""

    def announce(self, storage: torch.UntypedStorage) -> None:
        """See :meth:`~lightning.fabric.storage.transport.sink.Sink.announce`."""

    def write(self, data: Any) -> int:
        """Writes all of ``data``."""


def write_object(obj: Any, file: Announced) -> None:
    """Runs ``torch.save`` to a file of :func:`~lightning.fabric.storage.transport.open.open_writer`.

    torch pickles everything before it writes the first byte. Meanwhile each tensor's storage is announced to the file,
    which can then plan for the size, and need not copy the memory.
    """
    # torch makes the pickler itself, of a class that it derives from that of the module
    bound = type("Pickler", (_Announcing,), {"announce": staticmethod(file.announce)})
    module = types.ModuleType("pickle")
    module.__dict__.update(vars(pickle), Pickler=bound)
    try:
        torch.save(obj, file, pickle_module=module)  # type: ignore[arg-type]  # it is all that torch needs of one
    finally:
        del bound.announce  # type: ignore[attr-defined]  # a class lives until the next garbage collection


class _Announcing(pickle.Pickler):
    """Announces the storages of the tensors that it pickles."""

    announce: ClassVar[Callable[[torch.UntypedStorage], None]]

    @override
    def dump(self, obj: Any) -> None:
        with collection_paused():
            super().dump(obj)

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and (storage := _storage_of(obj)) is not None:
            type(self).announce(storage)
        return NotImplemented


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Returns the memory that is going to be written for a tensor, None if it has none of its own."""
    try:
        with torch._C.DisableTorchFunction():  # an uninitialized parameter refuses to be asked
            storage = tensor.untyped_storage()
        storage.data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or a wrapper: its parts are tensors, and follow
        return None
    return None if storage.device.type == "meta" else storage
