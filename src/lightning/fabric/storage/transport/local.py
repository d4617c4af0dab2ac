"""Files of this machine: a temporary file beside the target, made durable, and renamed onto it."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.fabric.storage.transport.sink import Sink


@contextmanager
def open_writer(path: Path) -> Iterator[Sink]:
    """See :func:`lightning.fabric.storage.transport.open_writer`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # not in $TMPDIR: a rename is atomic within one file system only. open() gives it the umask's permissions
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(temporary, "xb", buffering=0) as file:
            yield Sink(file)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the platform and the file system have that notion."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
