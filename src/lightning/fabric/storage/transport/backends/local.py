"""Files of this machine: a temporary file beside the target, made durable, and renamed onto it."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.storage.paths.layout import is_shard_folder
from lightning.fabric.storage.paths.replace import sync_folder, take_place, temporary_beside
from lightning.fabric.storage.transport.ranged_file import REPLACED
from lightning.fabric.storage.transport.sink import Sink

log = logging.getLogger(__name__)


@contextmanager
def open_writer(path: Path) -> Iterator[Sink]:
    """See :func:`lightning.fabric.storage.transport.open.open_writer`."""
    path = Path(os.path.realpath(path))  # a link goes on to be one
    path.parent.mkdir(parents=True, exist_ok=True)
    # not in $TMPDIR: a rename is atomic within one file system only. open() gives it the umask's permissions
    with temporary_beside(path.name) as name:
        temporary = path.with_name(name)
        try:
            with open(temporary, "xb", buffering=0) as file:
                yield Sink(file)
                os.fsync(file.fileno())
            _replace(temporary, path)
        except BaseException:
            if not temporary.is_dir():  # which is what was replaced, and a later save removes
                temporary.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


class Source:
    """A file to read ranges of.

    Args:
        path: Where it is.
    """

    parallel = True

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._version = self._ask()
        self.size, _ = self._version

    def _ask(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def read_into(self, start: int, view: memoryview) -> None:
        """Fills ``view`` with the bytes from ``start`` on.

        Raises:
            OSError: The file ends before that, or the disk failed.
        """
        done = 0
        while done < len(view):  # one call reads at most 2 GiB
            count = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if count == 0:
                raise OSError(f"it has {start + done} bytes, and {start + len(view)} were to be read")
            done += count

    def check(self) -> None:
        """Looks whether the file has been written to since it was opened.

        One that has taken its name since then is another file, and this one is read on.

        Raises:
            OSError: It has.
        """
        if self._ask() != self._version:
            raise OSError(REPLACED)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _replace(temporary: Path, path: Path) -> None:
    try:
        if path.is_dir() and is_shard_folder(os.listdir(path)):
            take_place(temporary, path)
        else:
            os.replace(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        log.warning(f"The file system of {path} cannot rename files: an interrupted save can leave an incomplete file")
        shutil.copyfile(temporary, path)
        temporary.unlink()
