"""Any fsspec file system."""

import errno
import inspect
import io
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem

from lightning.fabric.storage.paths.filesystem import has_folders, info_of, is_object_store, kind_of, names_inside
from lightning.fabric.storage.paths.layout import is_shard_folder
from lightning.fabric.storage.paths.location import display
from lightning.fabric.storage.paths.remove import move
from lightning.fabric.storage.paths.replace import set_aside, temporary_beside
from lightning.fabric.storage.transport import multipart
from lightning.fabric.storage.transport.calls import Call
from lightning.fabric.storage.transport.ranged_file import REPLACED
from lightning.fabric.storage.transport.retry import chain, retrying, retrying_async, status_of
from lightning.fabric.storage.transport.sink import Sink

log = logging.getLogger(__name__)

#: adlfs uploads with the blocks of 4 MiB that the Azure client is set to, and a blob has at most 50,000 of them.
_AZURE_PIPE_LIMIT = 45_000 * 4 * 2**20
#: How much is asked for at once where requests are small.
_LARGEST_SPAN = 4 * 2**20
#: What botocore's error about a body is called.
_WRONG_CHECKSUM = "FlexibleChecksumError"
#: What an object is, as far as file systems tell: if one of these is another, so is the object.
_IDENTITY = (
    *("size", "ETag", "etag", "generation", "LastModified", "last_modified", "mtime", "modify", "created"),
    *("fileId", "modificationTime"),  # of WebHDFS
)


@contextmanager
def open_writer(fs: AbstractFileSystem, path: str, lean: bool, parts: multipart.Parts) -> Iterator[Sink]:
    """See :func:`lightning.fabric.storage.transport.open.open_writer`, and the one of obstore for ``parts``."""
    clients = multipart.clients_of(fs) & {"s3fs", "gcsfs", "adlfs"}
    if clients and not is_object_store(fs):
        raise ImportError(f"This release of {clients.pop()} is too old to save checkpoints with: upgrade it with pip")
    if not is_object_store(fs):
        _close_abandoned(fs)
        fs.makedirs(fs._parent(path), exist_ok=True)
        with temporary_beside(path.rpartition("/")[2]) as name:
            temporary = f"{fs._parent(path).rstrip('/')}/{name}"
            try:
                # autocommit: else the file joins a transaction that someone has open on this shared file system
                with fs.open(temporary, "wb", autocommit=True) as file:
                    if hasattr(file, "set_pipelined"):  # SFTP: do not wait for an answer after each 32 KiB
                        file.set_pipelined(True)
                    sink = Sink(file, copies=True)
                    yield sink
                _check_size(fs, temporary, sink.tell())
                with room_for(fs, path):
                    _replace(fs, temporary, path)
            except BaseException:
                _clean_up(fs, temporary)
                raise
    elif lean and clients:  # others cannot take back what a stream has written
        with _stream(fs, path, parts.smallest) as file:
            sized = _EqualParts(file)
            sink = Sink(sized)
            sized.expected_size = lambda: sink.announced
            yield sink
    else:
        buffer = io.BytesIO()
        yield Sink(buffer)
        with room_for(fs, path):
            _pipe(fs, path, buffer.getvalue(), parts)  # getvalue() shares the memory, it does not copy


#: Files that are being read, with their file system and who reads. The collector would have one closed that nobody else
#: holds, perhaps in the midst of its client's own work: paramiko would wait for ever for a lock that it has itself.
_open_files: dict[int, "tuple[weakref.ref[Source], AbstractFileSystem, Any]"] = {}


def _close_abandoned(fs: AbstractFileSystem) -> None:
    """Closes files that nobody reads any more, where their client is not at work: before it is asked for another."""
    for key, (source, of, file) in list(_open_files.items()):
        if of is fs and source() is None:
            del _open_files[key]
            file.close()


class Source:
    """A file to read ranges of.

    Args:
        fs: Its file system.
        path: Its path there.
    """

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        _close_abandoned(fs)
        self._fs = fs
        self._path = path
        #: Whether ranges can be read from many threads at a time.
        self.parallel = isinstance(fs, AsyncFileSystem) and type(fs)._cat_file is not AsyncFileSystem._cat_file
        self._file: Any = None
        self._info: dict[str, Any] | None = None
        self._whole = _whole_website(fs, path) if "http" in _protocols(fs) else None
        if self._whole is not None:
            self.size = len(self._whole)
            return
        self._info = retrying(f"Asking about {display(path)}", lambda: info_of(fs, path))
        if self._info["type"] != "file":
            raise (IsADirectoryError if self._info["type"] == "directory" else FileNotFoundError)(path)
        self.size = int(self._info["size"])
        if not self.parallel:
            self._file = fs.open(path, "rb")
            _open_files[id(self._file)] = (weakref.ref(self), fs, self._file)

    def read_into(self, start: int, view: memoryview) -> None:
        """Fills ``view`` with the bytes from ``start`` on.

        Raises:
            OSError: Another number of bytes came.
        """
        data: Any
        if self._whole is not None:
            data = self._whole[start : start + len(view)]
        elif self.parallel:
            data = self._range(start, start + len(view))
            if len(data) == self.size > len(view):  # it serves no ranges: one answer is kept, for all reads to come
                self._whole = memoryview(data) if self._whole is None else self._whole
                data = self._whole[start : start + len(view)]
        else:
            data = _read_whole(self._file, start, len(view))
        if len(data) != len(view):
            raise ConnectionError(f"{len(data)} bytes came instead of {len(view)}")
        view[:] = data

    def _range(self, start: int, end: int) -> bytes:
        fs: Any = self._fs
        data: bytes
        try:
            data = Call(fs, fs._cat_file(self._path, start=start, end=end)).result()
            return data
        except Exception as error:
            if end - start == self.size or all(type(cause).__name__ != _WRONG_CHECKSUM for cause in chain(error)):
                raise
        # some servers send a range with the checksum of the whole object, which the client compares
        settings = {**fs.config_kwargs, "response_checksum_validation": "when_required"}
        self._fs = type(fs)(*fs.storage_args, **{**fs.storage_options, "config_kwargs": settings})
        data = Call(self._fs, self._fs._cat_file(self._path, start=start, end=end)).result()
        return data

    def check(self) -> None:
        """Looks whether the file is still the one that was opened.

        Raises:
            OSError: It is not.
        """
        if self._info is None:
            return
        self._fs.invalidate_cache(self._path)
        self._fs.invalidate_cache(self._fs._parent(self._path))
        now = retrying(f"Asking about {display(self._path)}", lambda: info_of(self._fs, self._path))
        if now["type"] == "nothing" and "http" in _protocols(self._fs):
            _whole_website(self._fs, self._path)  # raises the reason, which that did not tell
        if any(now.get(key) != self._info.get(key) for key in _IDENTITY):
            raise OSError(REPLACED)

    def close(self) -> None:
        """Closes the file, where one was opened."""
        if self._file is not None:
            self._file.close()
            _open_files.pop(id(self._file), None)


def _whole_website(fs: Any, path: str) -> memoryview | None:
    """The file, if its server does not serve ranges: asked for one byte, it sends all of them. It may not tell before.

    Raises:
        Exception: aiohttp's own error. That of ``fs.info`` is a FileNotFoundError, whatever the reason is.
    """
    what = f"Reading {display(path)}"
    try:
        data = retrying(what, lambda: fs.cat_file(path, start=0, end=1))
    except Exception as error:
        if status_of(error) != 416:  # there is no first byte
            raise
        return memoryview(b"")
    if len(data) == 1:
        if fs.info(path).get("size") is not None:
            return None
        data = retrying(what, lambda: fs.cat_file(path))
    return memoryview(data)


def _read_whole(file: Any, start: int, count: int) -> bytes:
    if hasattr(file, "readv"):  # SFTP: do not wait for an answer before asking for the next 32 KiB
        spans = [(at, min(_LARGEST_SPAN, start + count - at)) for at in range(start, start + count, _LARGEST_SPAN)]
        return b"".join(file.readv(spans, max_concurrent_prefetch_requests=_LARGEST_SPAN // 2**15))
    file.seek(start)
    parts = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _protocols(fs: AbstractFileSystem) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _pipe(fs: AbstractFileSystem, path: str, data: bytes, parts: multipart.Parts) -> None:
    """Stores ``data`` with as many parts at a time as the file system sees fit."""
    size = multipart.part_size(len(data), parts.smallest)
    pipe_file = getattr(fs, "_pipe_file", fs.pipe_file)
    sized = {"chunksize": size} if "chunksize" in inspect.signature(pipe_file).parameters else {}
    if "adlfs" in multipart.clients_of(fs) and (len(data) > _AZURE_PIPE_LIMIT or _confuses_adlfs(fs, path)):
        with _stream(fs, path, size) as file:
            file.write(data)
    elif isinstance(fs, AsyncFileSystem):
        upload = Call(fs, retrying_async(f"The upload of {path!r}", lambda: fs._pipe_file(path, data, **sized)))
        try:
            upload.result()
        except BaseException:
            upload.cancel()
            raise
    else:
        retrying(f"The upload of {path!r}", lambda: fs.pipe_file(path, data, **sized))


class _EqualParts:
    """Ends a write where a part is full: an fsspec file sends all that it has been given by then as one."""

    def __init__(self, file: Any) -> None:
        self.expected_size: Callable[[], int]
        self._file = file
        self._position = 0

    def write(self, piece: memoryview) -> int:
        if not self._position:
            self._file.blocksize = multipart.part_size(self.expected_size(), self._file.blocksize)
        part: int = self._file.blocksize
        taken = piece[: part - self._position % part]
        self._position += len(taken)
        multipart.check_count(self._position, part)
        self._file.write(taken)
        return len(taken)


def _confuses_adlfs(fs: Any, path: str) -> bool:
    """Whether adlfs raises an error after the upload: it takes brackets in the first folder for an address (IPv6)."""
    try:
        fs._parent(fs.split_path(path)[1])
    except ValueError:
        return True
    return False


@contextmanager
def _stream(fs: AbstractFileSystem, path: str, part: int) -> Iterator[Any]:
    """A file that sends parts of ``part`` bytes as they fill up, and is given up if the body raises.

    Used as a context manager itself, an fsspec file completes the upload then: it commits a truncated object.
    """
    file = fs.open(path, "wb", block_size=part, autocommit=True)  # not in anyone's transaction
    try:
        yield file
        file.close()
    except BaseException:
        file.closed = True  # or its finalizer completes the upload
        try:
            file.discard()
        except Exception as error:
            multipart.warn_of_unfinished(path, error)
        raise


def _check_size(fs: AbstractFileSystem, path: str, size: int) -> None:
    """Sees that everything arrived, before it takes the place of a file that is whole."""
    fs.invalidate_cache(fs._parent(path))
    found = fs.info(path)["size"]
    if found is not None and found != size:
        raise OSError(f"{found} bytes arrived of {size} that were sent")


@contextmanager
def room_for(fs: AbstractFileSystem, path: str) -> Iterator[None]:
    """For a body that puts a file at ``path``. A sharded checkpoint there gives way, and goes when the body has ended.

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
        if "webhdfs" in _protocols(fs):  # whose client has no way to say so
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
    """Removes what nobody needs. Whether the save succeeded is decided by then, so a failure here is only told."""
    try:
        if kind_of(fs, path) == "file":
            fs.rm_file(path)
    except Exception as error:
        log.warning(f"Could not remove the left-over {path!r} ({type(error).__name__}: {display(str(error))})")
