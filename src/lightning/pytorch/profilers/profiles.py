"""What profilers write to a folder that may be a URL.

A profile is not worth the training: a store that does not take it is a warning that says where it stays on this
machine, and training goes on.
"""

import io
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport.open import open_writer
from lightning.fabric.storage.transport.text import open_text
from lightning.fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_PIECE = 16 * 2**20
#: By folder at a URL, the one for what it did not take.
_kept: dict[Place, Path] = {}


@contextmanager
def folder_for(dirpath: str | os.PathLike[str]) -> Iterator[str]:
    """A folder on this machine to write files into, which are in ``dirpath`` when the context ends.

    Args:
        dirpath: A local path, which is made and given back, or a URL.
    """
    place = locate(dirpath)
    if place.is_local:
        LocalFileSystem().makedirs(str(dirpath), exist_ok=True)
        yield str(dirpath)
        return
    with tempfile.TemporaryDirectory(prefix="lightning-profile-") as folder:
        yield folder
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            _copy(path, place, path.relative_to(folder).as_posix())


def open_report(dirpath: str | os.PathLike[str], name: str) -> IO[str]:
    """The text file ``name`` in ``dirpath``, to add to at its end."""
    place = locate(dirpath)
    if place.is_local:
        local = LocalFileSystem()
        local.makedirs(str(dirpath), exist_ok=True)
        file: IO[str] = local.open(os.path.join(dirpath, name), "a")
        return file
    return _Report(place, name)


class ReportFiles:
    """The text files of reports, with the methods that Lightning calls on a file system for them.

    Args:
        folder: A local path or a URL.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = folder

    def mkdirs(self, folder: str | os.PathLike[str], exist_ok: bool) -> None:
        """Leaves it to :meth:`open` to make a folder where files need one."""

    def open(self, path: str, mode: str) -> IO[str]:
        """Opens a text file of the folder, as :func:`open_report`."""
        return open_report(self._folder, os.path.basename(path))


def export_trace(own: Any, profiler: "torch.profiler.profile", action_name: str) -> None:
    """Writes the trace and the stacks of one action, if they are asked for, to the folder of a PyTorchProfiler.

    Args:
        own: Lightning's profiler.
        profiler: Torch's, which has recorded.
        action_name: The action.
    """
    from torch.profiler import tensorboard_trace_handler

    if own.dirpath is None:
        rank_zero_warn("The PyTorchProfiler failed to export trace: it has no `dirpath` to write it to.")
        return
    if own._export_to_chrome:
        with folder_for(own.dirpath) as folder:
            tensorboard_trace_handler(folder, own._prepare_filename(action_name=action_name, extension=""))(profiler)
    if own._export_to_flame_graph:
        with folder_for(own.dirpath) as folder:
            path = os.path.join(folder, own._prepare_filename(action_name=action_name, extension=".stack"))
            profiler.export_stacks(path, metric=own._metric)
            if os.path.getsize(path) == 0:
                _warn_of_no_stacks()


@cache
def _warn_of_no_stacks() -> None:
    log.warning(
        "PyTorch has recorded no stacks, and their file is empty. It records them with `with_stack=True` and an"
        " `experimental_config` that has `verbose=True`, which PyTorchProfiler asks for unless it is given one."
    )


class _Report(io.StringIO):
    """Goes to the store when it is closed, after what is there."""

    def __init__(self, folder: Place, name: str) -> None:
        super().__init__(newline="")
        self._folder = folder
        self._name = name

    @override
    def close(self) -> None:
        if self.closed:
            return
        text = self.getvalue()
        super().close()
        try:
            place = self._folder / self._name
            with open_text(place, "w") as file:  # is written at the end
                file.write(_content(place) + text)
        except OSError as error:
            with open(_kept_instead(self._folder, error) / self._name, "a", newline="") as kept:
                kept.write(text)


def _content(place: Place) -> str:
    try:
        with open_text(place, "r") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _copy(path: Path, folder: Place, name: str) -> None:
    try:
        with open(path, "rb") as file, open_writer(folder / name) as sink:
            sink.expect(path.stat().st_size)
            shutil.copyfileobj(file, sink, _PIECE)
    except OSError as error:
        kept = _kept_instead(folder, error) / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, kept)


def _kept_instead(folder: Place, error: OSError) -> Path:
    """A folder of this machine for what ``folder`` did not take. It is told once, for there may be dozens of files."""
    if folder not in _kept:
        _kept[folder] = Path(tempfile.mkdtemp(prefix="lightning-profiles-"))
        log.warning(f"Profiles for {folder} stay in {_kept[folder]}. {redact(str(error))}")
    return _kept[folder]
