"""Folders that loggers and profilers write to, be they local paths or URLs."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import IO, Any

from fsspec.implementations.local import LocalFileSystem

from lightning.fabric.loggers.mirror import Mirror
from lightning.fabric.storage.paths.filesystem import has_folders
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.remove import remove_file
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.utilities.rank_zero import rank_zero_warn

log = logging.getLogger(__name__)

_Path = str | os.PathLike[str]


def path_or_url(path: _Path | None) -> _Path | None:
    """Returns a folder as it was given, but the URL that a ``Path`` was made from, and the path of a ``file:`` URL."""
    if not path:
        return path
    place = locate(path)
    is_url = os.fspath(path).startswith(("file:", "local:"))
    return path if place.is_local and not is_url else place.raw


def local_folder_for(client: str, folder: _Path | None) -> _Path | None:
    """Returns ``folder``, or a temporary one for a URL, for the package ``client``, which knows local folders only."""
    folder = path_or_url(folder)
    if not folder or locate(folder).is_local:
        return folder
    made = tempfile.mkdtemp(prefix=f"{client}-")
    log.info(f"{client} writes to local folders only: its own files go to {made}, and not to {locate(folder)}")
    return made


def refuse_url(folder: _Path | None, instead: str) -> None:
    """Refuses a folder that is no local one.

    Raises:
        ValueError: It is a URL. The message has what to do instead.
    """
    if folder and not locate(folder).is_local:
        raise ValueError(f"{locate(folder)} is not a local folder: {instead}")


def make_folder(folder: str) -> None:
    """Makes a folder where files need one. An object store is not asked: its client would make a bucket."""
    fs, path = locate(folder).resolve()
    if has_folders(fs):
        fs.makedirs(path, exist_ok=True)


def has_entries(folder: str) -> bool:
    """Returns whether there is anything in a folder.

    Raises:
        OSError: The store did not answer.
    """
    return bool(_names_in(locate(folder)))


def next_version(folder: str) -> int:
    """Returns the number after that of the last folder ``version_N``, whatever this process remembers of the store.

    Raises:
        OSError: The store did not answer.
    """
    place = locate(folder)
    numbers = {name: name.split("_")[1] for name in _names_in(place) if name.startswith("version_")}
    for name in sorted((name for name in numbers if numbers[name].isdecimal()), key=lambda name: -int(numbers[name])):
        if (place / name).kind() == "directory":
            return int(numbers[name]) + 1
    return 0


def _names_in(place: Place) -> list[str]:
    try:
        with questions_named(place):
            return place.list_names()
    except (FileNotFoundError, NotADirectoryError):
        return []


class _LogFolder:
    """A folder that a logger writes to, local or of a mirror, with methods that Lightning calls on a file system."""

    def __init__(self) -> None:
        self._mirror: Mirror | None = None
        self._fs = LocalFileSystem()

    def begin(self, folder: str) -> str:
        """Returns where to write what belongs into ``folder``, a local path or a URL."""
        if self._mirror is None and not (place := locate(folder)).is_local:
            self._mirror = Mirror(place)
        return folder if self._mirror is None else str(self._mirror.folder)

    def makedirs(self, folder: str, exist_ok: bool) -> None:
        """Makes a folder where files need one, as :func:`make_folder`."""
        make_folder(folder)

    def isdir(self, folder: str) -> bool:
        """Returns whether files can be written into the folder."""
        return self._mirror is not None or bool(self._fs.isdir(folder))

    def flush(self) -> None:
        """Flushes the mirror, if there is one."""
        if self._mirror is not None:
            self._mirror.flush()

    def drain(self) -> None:
        """Drains the mirror, if there is one."""
        if self._mirror is not None:
            self._mirror.drain()


class _CopiedWriter:
    """A base class of writers of events to a mirror's folder."""

    copies: Mirror

    def write_out(self) -> None:
        super().flush()  # type: ignore[misc]  # of the writer that is the next base class

    def flush(self) -> None:
        self.write_out()
        self.copies.flush()

    def close(self) -> None:
        super().close()  # type: ignore[misc]
        self.copies.drain()


class EventFiles(_LogFolder):
    """The folder of TensorBoard's files of events, and a file of hyperparameters beside the folder's copy."""

    def copied(self, writer: Any) -> Any:
        """Returns a writer of events; where they are copied to a URL, what flushes or closes it copies what is new.

        Args:
            writer: A ``SummaryWriter`` of torch or tensorboardX, to the folder that :meth:`begin` has returned. Its
                class is changed after it was made: the command line learns from the logger's source that it is called
                with the logger's other arguments, and which these are.
        """
        if self._mirror is not None:
            kind = type(writer)
            writer.__class__ = type(kind.__name__, (_CopiedWriter, kind), {})
            writer.copies = self._mirror
            self._mirror.follow(writer)
        return writer

    def isfile(self, path: str) -> bool:
        """Returns whether the place that is copied to has a file; see :meth:`Mirror.lacks`."""
        if self._mirror is None:
            return bool(self._fs.isfile(path))
        return not self._mirror.lacks(os.path.basename(path))


class LogFiles(_LogFolder):
    """The files of a folder that a logger adds to.

    Args:
        folder: A local path or a URL.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.begin(folder)

    def isfile(self, path: str) -> bool:
        """Returns whether the logger has written a file. ``path`` begins with the folder."""
        return bool(self._fs.isfile(self._here(path)))

    @contextmanager
    def open(self, path: str, mode: str, newline: str | None = None) -> Iterator[IO[str]]:
        """Opens a text file, which is not copied before the context ends."""
        changing = nullcontext() if self._mirror is None else self._mirror.changing
        with changing, self._fs.open(self._here(path), mode, newline=newline) as file:
            yield file

    def start_afresh(self, folder: str, file: str) -> None:
        """Removes the file of an earlier run from a folder, with a warning if the folder is not empty.

        Raises:
            OSError: The store did not answer.
        """
        if has_entries(folder):
            rank_zero_warn(
                f"Experiment logs directory {locate(folder)} exists and is not empty. What an earlier run has logged"
                f" to {os.path.basename(file)} there is deleted: give each run its own version, to keep all."
            )
            remove_file(locate(file))

    def _here(self, path: str) -> str:
        return path if self._mirror is None else str(self._mirror.folder / os.path.basename(path))
