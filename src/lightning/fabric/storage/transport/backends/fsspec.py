"""Any fsspec file system: a temporary file that is renamed, an object in one call, or a stream of parts."""

import errno
import inspect
import io
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from typing_extensions import override

from lightning.fabric.storage.paths.client_options import clients_of, protocols_of
from lightning.fabric.storage.paths.filesystem import has_folders, is_object_store, kind_of, names_inside
from lightning.fabric.storage.paths.layout import is_shard_folder
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.paths.remove import move
from lightning.fabric.storage.paths.replace import set_aside, temporary_beside
from lightning.fabric.storage.transport import multipart
from lightning.fabric.storage.transport.backends.fsspec_reader import close_abandoned
from lightning.fabric.storage.transport.retry import retrying, retrying_async
from lightning.fabric.storage.transport.sink import uploading
from lightning.fabric.storage.transport.threads import run_in_loop
from lightning.fabric.storage.transport.upload import LARGEST_PIECE, UploadBackend, write_all

log = logging.getLogger(__name__)

#: adlfs uploads with the blocks of 4 MiB that the Azure client is set to, and a blob has at most 50,000 of them.
_AZURE_PIPE_LIMIT = 45_000 * 4 * 2**20

#: Held while a file takes the place of another. Where that takes two renames, what another thread puts there between
#: them would be in the way, and be removed with the save that fails for it.
_replacing = threading.Lock()


def client_upload(fs: AbstractFileSystem, path: str, lean: bool, parts: multipart.Parts) -> UploadBackend:
    """Returns the upload of a file with the means of its file system. ``lean`` is that of ``open_writer``.

    Raises:
        ImportError: The client of the store is too old.
    """
    clients = clients_of(fs) & {"s3fs", "gcsfs", "adlfs"}
    if is_object_store(fs):
        # others than these cannot take back what a stream has written
        return StreamUpload(fs, path, parts.smallest) if lean and clients else PipeUpload(fs, path, parts)
    if clients:
        raise ImportError(f"This release of {clients.pop()} is too old to save checkpoints with: upgrade it with pip")
    return FileUpload(fs, path)


class FileUpload(UploadBackend):
    """A temporary file beside the target, which is renamed onto it, on a file system that has folders."""

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._size = 0
        self._name = temporary_beside(path.rpartition("/")[2])
        self._temporary = ""
        self._file: Any = None

    @override
    def begin(self, size: int, idle: Callable[[], None]) -> int:
        close_abandoned(self._fs)
        folder = self._fs._parent(self._path)
        self._fs.makedirs(folder, exist_ok=True)
        self._temporary = f"{folder.rstrip('/')}/{self._name.__enter__()}"
        # autocommit: else the file joins a transaction that someone has open on this shared file system
        self._file = self._fs.open(self._temporary, "wb", autocommit=True)
        if hasattr(self._file, "set_pipelined"):  # SFTP: do not wait for an answer after each 32 KiB
            self._file.set_pipelined(True)
        return LARGEST_PIECE

    @override
    def write_part(self, part: memoryview | bytearray) -> None:
        self._size += len(part)
        write_all(self._file, bytes(part))  # a client may keep it beyond the call

    @override
    def commit(self) -> None:
        self._file.close()
        self._fs.invalidate_cache(self._fs._parent(self._temporary))
        found = self._fs.info(self._temporary)["size"]
        if found is not None and found != self._size:  # before it takes the place of a file that is whole
            raise OSError(f"{found} bytes arrived of {self._size} that were sent")
        with room_for(self._fs, self._path), _replacing:
            _replace(self._fs, self._temporary, self._path)
        self._name.__exit__(None, None, None)

    @override
    def abort(self) -> None:
        if not self._temporary:
            return
        try:
            if self._file is not None:
                self._file.close()
        finally:
            _clean_up(self._fs, self._temporary)
            self._name.__exit__(None, None, None)


class PipeUpload(UploadBackend):
    """An object that is collected in memory, and stored with one call, which uploads parts as the client sees fit."""

    def __init__(self, fs: AbstractFileSystem, path: str, parts: multipart.Parts) -> None:
        self._fs = fs
        self._path = path
        self._parts = parts
        self._buffer = io.BytesIO()

    @override
    def begin(self, size: int, idle: Callable[[], None]) -> int:
        return LARGEST_PIECE

    @override
    def write_part(self, part: memoryview | bytearray) -> None:
        self._buffer.write(part)

    @override
    def commit(self) -> None:
        with room_for(self._fs, self._path):
            self._store(self._buffer.getvalue())  # which shares the memory, it does not copy

    @override
    def abort(self) -> None:
        self._buffer.close()

    def _store(self, data: bytes) -> None:
        fs, path = self._fs, self._path
        what, size = f"The upload of {path!r}", multipart.part_size(len(data), self._parts.smallest)
        pipe_file = getattr(fs, "_pipe_file", fs.pipe_file)
        sized = {"chunksize": size} if "chunksize" in inspect.signature(pipe_file).parameters else {}
        if "adlfs" in clients_of(fs) and (len(data) > _AZURE_PIPE_LIMIT or _confuses_adlfs(fs, path)):
            with uploading(StreamUpload(fs, path, size)) as stream:
                stream.write(data)
        elif isinstance(fs, AsyncFileSystem):
            run_in_loop(fs, retrying_async(what, lambda: fs._pipe_file(path, data, **sized)))
        else:
            retrying(what, lambda: fs.pipe_file(path, data, **sized))


class StreamUpload(UploadBackend):
    """An object through a file of its client, which sends all that it has been given since the last part as one.

    Used as a context manager, such a file completes the upload whatever happens: it commits a truncated object.

    Args:
        fs: The file system.
        path: The object's path there.
        smallest: The size of the parts, in bytes, unless the object needs larger ones.
    """

    def __init__(self, fs: AbstractFileSystem, path: str, smallest: int) -> None:
        self._fs = fs
        self._path = path
        self._smallest = smallest
        self._position = 0
        self._file: Any = None

    @override
    def begin(self, size: int, idle: Callable[[], None]) -> int:
        # autocommit: not in anyone's transaction
        self._file = self._fs.open(self._path, "wb", block_size=self._smallest, autocommit=True)
        self._file.blocksize = multipart.part_size(size, self._file.blocksize)
        return int(self._file.blocksize)

    @override
    def write_part(self, part: memoryview | bytearray) -> None:
        self._position += len(part)
        multipart.check_count(self._position, self._file.blocksize)
        self._file.write(part)

    @override
    def commit(self) -> None:
        self._file.close()

    @override
    def abort(self) -> None:
        if self._file is None:
            return
        self._file.closed = True  # or its finalizer completes the upload
        try:
            self._file.discard()
        except Exception as error:
            multipart.warn_of_unfinished(self._path, error)


def _confuses_adlfs(fs: Any, path: str) -> bool:
    """Returns whether adlfs fails after the upload: it takes brackets in the first folder for an address (IPv6)."""
    try:
        fs._parent(fs.split_path(path)[1])
    except ValueError:
        return True
    return False


@contextmanager
def room_for(fs: AbstractFileSystem, path: str) -> Iterator[None]:
    """Sets a sharded checkpoint at ``path`` aside while the body puts a file there, and removes it at the end.

    Raises:
        IsADirectoryError: Another folder is there.
    """
    if not has_folders(fs) or kind_of(fs, path) != "directory":
        yield
    elif is_shard_folder(names_inside(fs, path)):
        with set_aside(fs, path):
            yield
    else:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)


def _replace(fs: AbstractFileSystem, temporary: str, path: str) -> None:
    """Renames ``temporary`` to ``path``, over an existing file also where the file system refuses that.

    Where it does (HDFS, and its gateway even without an error), the old file is set aside under another name until the
    new one has taken its place, so that no moment lacks a complete file.
    """
    try:
        if "webhdfs" in protocols_of(fs):  # whose client has no way to say so
            fs._call("RENAME", method="put", path=temporary, destination=path, renameoptions="OVERWRITE")
        else:
            move(fs, temporary, path)
    except Exception:
        if kind_of(fs, temporary) != "file" or kind_of(fs, path) != "file":
            raise  # it is not the old file that was in the way
    if kind_of(fs, temporary) == "nothing":
        return
    with set_aside(fs, path):
        move(fs, temporary, path)


def _clean_up(fs: AbstractFileSystem, path: str) -> None:
    """Removes what nobody needs. Whether the save succeeded is decided by then, so a failure here is only logged."""
    try:
        if kind_of(fs, path) == "file":
            fs.rm_file(path)
    except Exception as error:
        log.warning(f"Could not remove the left-over {path!r} ({type(error).__name__}: {redact(str(error))})")
