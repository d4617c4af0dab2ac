"""Files of this machine: a temporary file beside the target, made durable, and renamed onto it."""

import errno
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import override

from lightning.fabric.storage.paths.layout import is_shard_folder
from lightning.fabric.storage.paths.replace import sync_folder, take_place, temporary_beside
from lightning.fabric.storage.transport.ranged_file import REPLACED, Source
from lightning.fabric.storage.transport.upload import LARGEST_PIECE, UploadBackend, write_all

log = logging.getLogger(__name__)


class LocalUpload(UploadBackend):
    """A temporary file beside the target, made durable, and renamed onto it.

    Args:
        path: The place of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cleanup = ExitStack()

    @override
    def begin(self, size: int, idle: Callable[[], None]) -> int:
        self._path = Path(os.path.realpath(self._path))  # a link goes on to be one
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # not in $TMPDIR: a rename is atomic within one file system only. open() gives it the umask's permissions
        self._temporary = self._path.with_name(self._cleanup.enter_context(temporary_beside(self._path.name)))
        self._cleanup.callback(self._remove_temporary)
        self._file = self._cleanup.enter_context(open(self._temporary, "xb", buffering=0))  # noqa: SIM115
        return LARGEST_PIECE

    @override
    def write_part(self, part: memoryview | bytearray) -> None:
        write_all(self._file, part)

    @override
    def commit(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        _replace(self._temporary, self._path)
        self._cleanup.close()
        sync_folder(self._path.parent)

    @override
    def abort(self) -> None:
        self._cleanup.close()

    def _remove_temporary(self) -> None:
        if not self._temporary.is_dir():  # the folder that was replaced, which a later save removes
            self._temporary.unlink(missing_ok=True)


class LocalSource(Source):
    """A file to read ranges of.

    Args:
        path: Its path.
    """

    parallel = True

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._version = self._ask()
        self.size, _ = self._version

    # one that has taken its name since it was opened is another file, and this one is read on
    def _ask(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    @override
    def read_into(self, start: int, view: memoryview) -> None:
        done = 0
        while done < len(view):  # one call reads at most 2 GiB
            count = os.preadv(self._file.fileno(), [view[done:]], start + done)
            if count == 0:
                raise OSError(f"it has {start + done} bytes, and {start + len(view)} were to be read")
            done += count

    @override
    def check(self) -> None:
        if self._ask() != self._version:
            raise OSError(REPLACED)

    @override
    def close(self) -> None:
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
