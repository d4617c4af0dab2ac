"""Files that profilers write to a folder, which may be a URL.

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

    from lightning.pytorch.profilers.profiler import Profiler

log = logging.getLogger(__name__)

_PIECE = 16 * 2**20
#: An attribute of a profiler: the local folder for the files that its store did not take.
_KEPT = "_kept_profiles"


@contextmanager
def folder_for(profiler: "Profiler") -> Iterator[str]:
    """Yields a folder on this machine for files that are in the profiler's folder when the context ends."""
    dirpath = str(profiler.dirpath or ".")
    place = locate(dirpath)
    if place.is_local:
        LocalFileSystem().makedirs(dirpath, exist_ok=True)
        yield dirpath
        return
    with tempfile.TemporaryDirectory(prefix="lightning-profile-") as folder:
        yield folder
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            _copy(profiler, path, place, path.relative_to(folder).as_posix())


class ReportFiles:
    """The text files of a profiler's reports, with the methods that Lightning calls on a file system for them."""

    def __init__(self, profiler: "Profiler") -> None:
        self._profiler = profiler

    def mkdirs(self, folder: str | os.PathLike[str], exist_ok: bool) -> None:
        """Leaves it to :meth:`open` to make a folder where files need one."""

    def open(self, path: str, mode: str) -> IO[str]:
        """Opens a text file in the profiler's folder, to add to at its end."""
        dirpath, name = str(self._profiler.dirpath), os.path.basename(path)
        place = locate(dirpath)
        if not place.is_local:
            return _Report(self._profiler, place, name)
        local = LocalFileSystem()
        local.makedirs(dirpath, exist_ok=True)
        file: IO[str] = local.open(os.path.join(dirpath, name), "a")
        return file


def export_trace(own: Any, profiler: "torch.profiler.profile", action_name: str) -> None:
    """Writes the trace and the stacks of one action, if they are asked for, to the folder of a PyTorchProfiler.

    Args:
        own: Lightning's profiler.
        profiler: Torch's profiler, which has recorded the action.
        action_name: The action.
    """
    from torch.profiler import tensorboard_trace_handler

    if own.dirpath is None:
        rank_zero_warn("PyTorchProfiler has no `dirpath`, so that its trace is not written.")
        return
    if own._export_to_chrome:
        with folder_for(own) as folder:
            tensorboard_trace_handler(folder, own._prepare_filename(action_name=action_name, extension=""))(profiler)
    if own._export_to_flame_graph:
        with folder_for(own) as folder:
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
    """A text file that is added to the store's one when it is closed."""

    def __init__(self, profiler: "Profiler", folder: Place, name: str) -> None:
        super().__init__(newline="")
        self._profiler = profiler
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
            with open(_kept_instead(self._profiler, self._folder, error) / self._name, "a", newline="") as kept:
                kept.write(text)


def _content(place: Place) -> str:
    try:
        with open_text(place, "r") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _copy(profiler: "Profiler", path: Path, folder: Place, name: str) -> None:
    try:
        with open(path, "rb") as file, open_writer(folder / name) as sink:
            sink.expect(path.stat().st_size)
            shutil.copyfileobj(file, sink, _PIECE)
    except OSError as error:
        kept = _kept_instead(profiler, folder, error) / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, kept)


def _kept_instead(profiler: "Profiler", folder: Place, error: OSError) -> Path:
    """Returns a local folder for what ``folder`` did not take; warns once, for there may be dozens of files."""
    kept: Path | None = vars(profiler).get(_KEPT)
    if kept is None:
        kept = vars(profiler)[_KEPT] = Path(tempfile.mkdtemp(prefix="lightning-profiles-"))
        log.warning(f"Profiles for {folder} stay in {kept}. {redact(str(error))}")
    return kept
