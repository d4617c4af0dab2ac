"""Saves one file."""

import os
import pickle
import threading
import types
from collections.abc import Mapping
from typing import Any, Protocol

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
        options: As for :func:`~lightning.fabric.storage.paths.location.locate`.

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
    """A file to which the memory that is going to be written is announced, as a sink is."""

    def announce(self, storage: torch.UntypedStorage) -> None:
        """See :meth:`~lightning.fabric.storage.transport.sink.Sink.announce`."""

    def write(self, data: Any) -> int:
        """Writes all of it."""


def write_object(obj: Any, file: Announced) -> None:
    """Runs ``torch.save`` to a file of :func:`~lightning.fabric.storage.transport.open.open_writer`.

    torch pickles everything before it writes the first byte. Each tensor's storage is announced to the file as that
    goes on: it can plan for the size, and need not copy the memory.
    """
    outer = getattr(_writing, "announce", None)  # of a save whose pickling leads here
    _writing.announce = file.announce
    try:
        torch.save(obj, file, pickle_module=_PICKLE)  # type: ignore[arg-type]  # it is all that torch needs of one
    finally:
        _writing.announce = outer


_writing = threading.local()


class _Announcing(pickle.Pickler):
    """Tells of the storages of the tensors it meets."""

    @override
    def dump(self, obj: Any) -> None:
        with collection_paused():
            super().dump(obj)

    @override
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            try:
                with torch._C.DisableTorchFunction():  # an uninitialized parameter refuses to be asked
                    storage = obj.untyped_storage()
                storage.data_ptr()
            except (NotImplementedError, RuntimeError):
                pass  # a sparse tensor, or a wrapper: its parts are tensors, which come by
            else:
                if storage.device.type != "meta":  # of which nothing is written
                    _writing.announce(storage)
        return NotImplemented


#: What ``torch.save`` uses of the module ``pickle``.
_PICKLE = types.ModuleType("pickle")
_PICKLE.__dict__.update(vars(pickle), Pickler=_Announcing)
