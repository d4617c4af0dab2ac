"""Files of this machine: a temporary file beside the target, made durable, and renamed onto it."""

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.fabric.storage.transport.sink import Sink

log = logging.getLogger(__name__)


@contextmanager
def open_writer(path: Path) -> Iterator[Sink]:
    """See :func:`lightning.fabric.storage.transport.open_writer`."""
    path = Path(os.path.realpath(path))  # a link goes on to be one
    path.parent.mkdir(parents=True, exist_ok=True)
    # not in $TMPDIR: a rename is atomic within one file system only. open() gives it the umask's permissions. Its name
    # does not hold the target's, which may be as long as a name can be
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", buffering=0) as file:
            yield Sink(file)
            os.fsync(file.fileno())
        _replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _replace(temporary: Path, path: Path) -> None:
    try:
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        log.warning(f"The file system of {path} cannot rename files: an interrupted save can leave an incomplete file")
        shutil.copyfile(temporary, path)
        temporary.unlink()


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the platform and the file system have that notion."""
    if os.name != "posix":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # the file is in its place, which matters more
        log.debug(f"Could not make the new name in {folder} durable ({error})")
