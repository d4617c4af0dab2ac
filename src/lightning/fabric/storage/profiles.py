"""What profilers write to a folder that may be a URL.

A profile is not worth the training: a store that does not take it is a warning, and training goes on.
"""

import io
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from lightning.fabric.storage.location import Location, display, join, locate
from lightning.fabric.storage.text import open_text
from lightning.fabric.storage.transport import open_writer

log = logging.getLogger(__name__)

_PIECE = 16 * 2**20


@contextmanager
def folder_for(dirpath: str | os.PathLike[str]) -> Iterator[str]:
    """A folder on this machine to write files into, which are in ``dirpath`` when the context ends.

    Args:
        dirpath: A local path, which is made and given back, or a URL.
    """
    location = locate(dirpath)
    if isinstance(location, Path):
        LocalFileSystem().makedirs(str(dirpath), exist_ok=True)
        yield str(dirpath)
        return
    with tempfile.TemporaryDirectory(prefix="lightning-profile-") as folder:
        yield folder
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            _copy(path, join(location, path.relative_to(folder).as_posix()))


def open_report(dirpath: str | os.PathLike[str], name: str) -> IO[str]:
    """The text file ``name`` in ``dirpath``, to add to at its end."""
    location = locate(dirpath)
    if isinstance(location, Path):
        local = LocalFileSystem()
        local.makedirs(str(dirpath), exist_ok=True)
        file: IO[str] = local.open(os.path.join(dirpath, name), "a")
        return file
    return _Report(join(location, name))


class _Report(io.StringIO):
    """Goes to the store when it is closed, after what is there."""

    def __init__(self, location: Location) -> None:
        super().__init__(newline="")
        self._location = location

    @override
    def close(self) -> None:
        if self.closed:
            return
        text = self.getvalue()
        super().close()
        try:
            with open_text(self._location, "w") as file:  # is written at the end
                file.write(_content(self._location) + text)
        except OSError as error:
            _tell(error)


def _content(location: Location) -> str:
    try:
        with open_text(location, "r") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _copy(path: Path, location: Location) -> None:
    try:
        with open(path, "rb") as file, open_writer(location) as sink:
            sink.expect(path.stat().st_size)
            shutil.copyfileobj(file, sink, _PIECE)
    except OSError as error:
        _tell(error)


def _tell(error: OSError) -> None:
    log.warning(f"A profile is lost. {display(str(error))}")
