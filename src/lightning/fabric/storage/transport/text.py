"""Small text files, such as those of hyperparameters."""

import io
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any, Literal

from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.storage.transport.open import open_reader, open_writer

_Path = str | os.PathLike[str]


@contextmanager
def open_text(path: AnyPath, mode: Literal["r", "w"]) -> Iterator[IO[str]]:
    """Opens a text file in UTF-8, with line ends as they are, which is held in memory as a whole.

    Args:
        path: A local path or a URL of any fsspec protocol.
        mode: ``"r"`` to read. ``"w"`` to write a file that takes the place of the previous one when the context ends
            without an exception, whole or not at all. Where nothing was written, the previous one stays.

    Raises:
        FileNotFoundError: There is no file to read at ``path``.
        OSError: On leaving the context, if the file could not be written. What was at ``path`` before is unchanged.
    """
    place = locate(path)
    if mode == "r":
        with open_reader(place) as file:
            content = file.read().decode("utf-8")
        yield io.StringIO(content, newline="")
    else:
        text = io.StringIO(newline="")
        yield text
        if not text.tell():
            return
        with open_writer(place) as file:
            file.write(text.getvalue().encode("utf-8"))


def is_there(path: _Path) -> bool:
    """Returns whether there is something at ``path`` now, whatever this process remembers of the store.

    Raises:
        OSError: The store did not answer.
    """
    place = locate(path)
    with questions_named(place):
        return place.kind() != "nothing"


def has_folder(path: _Path) -> bool:
    """Returns whether there is a folder for a file at ``path``, or none is needed."""
    place = locate(path)
    return place.shares_names() or place.parent.kind() == "directory"


class TextFile:
    """A small text file, with the methods that Lightning calls on the file system for it.

    Args:
        path: A local path or a URL of any fsspec protocol.
    """

    def __init__(self, path: _Path) -> None:
        self._path = path

    def exists(self, path: _Path) -> bool:
        """Returns whether there is something at ``path``, as :func:`is_there`."""
        return is_there(path)

    def isdir(self, folder: _Path) -> bool:
        """Tells of this file what :func:`has_folder` does: ``folder`` may have lost what makes it a URL."""
        return has_folder(self._path)

    def open(self, path: _Path, mode: Literal["r", "w"], **_: Any) -> AbstractContextManager[IO[str]]:
        """Opens the file as :func:`open_text` does, with its encoding and line ends."""
        return open_text(path, mode)
