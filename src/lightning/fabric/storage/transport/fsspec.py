"""Any fsspec file system."""

import asyncio
import inspect
import io
import logging
import secrets
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from typing_extensions import override

from lightning.fabric.storage.location import display, filesystem, is_object_store, kind_of
from lightning.fabric.storage.namespace import move
from lightning.fabric.storage.transport.sink import Sink

log = logging.getLogger(__name__)

_MIB = 2**20
#: S3 and GCS allow 10,000 parts of an object. With 9,000 planned, no rounding comes near that.
_PLANNED_PARTS = 9_000
#: s3fs's and gcsfs's own default. Smaller parts mean more requests, larger ones more memory in flight.
_SMALLEST_PART = 50 * _MIB
#: adlfs uploads with the blocks of 4 MiB that the Azure client is set to, and a blob has at most 50,000 of them.
_AZURE_PIPE_LIMIT = 45_000 * 4 * _MIB
#: How long to wait until a cancelled upload has let go of its connection.
_CANCELLATION_S = 10


def part_size(size: int) -> int:
    """The size of the parts, in bytes and a multiple of 1 MiB, in which an object of ``size`` bytes is uploaded.

    Any object that S3 and GCS can hold (5 TiB) stays under their limit of 10,000 parts, and each part under 5 GiB.
    """
    return max(_SMALLEST_PART, -(-size // (_PLANNED_PARTS * _MIB)) * _MIB)


def streamed_part_size(position: int) -> int:
    """The size of the part that starts at byte ``position`` of an object whose size is known only at its end.

    It starts small and grows with what has been sent, so that 5 TiB fit into 10,000 parts here too.
    """
    return part_size(8 * position)


@contextmanager
def open_writer(url: str, streaming: bool) -> Iterator[Sink]:
    """See :func:`lightning.fabric.storage.transport.open_writer`."""
    fs, path = filesystem(url)
    clients = _clients(fs) & {"s3fs", "gcsfs", "adlfs"}
    if clients and not is_object_store(fs):
        raise ImportError(f"This release of {clients.pop()} is too old to save checkpoints with: upgrade it with pip")
    if not is_object_store(fs):
        fs.makedirs(fs._parent(path), exist_ok=True)
        temporary = f"{path}.{secrets.token_hex(6)}.tmp"
        try:
            # autocommit: else the file joins a transaction that someone has open on this shared file system
            with fs.open(temporary, "wb", autocommit=True) as file:
                yield Sink(file, copies=True)
            _replace(fs, temporary, path)
        except BaseException:
            _clean_up(fs, temporary)
            raise
    elif streaming and clients:  # others cannot take back what a stream has written
        with _stream(fs, path, _SMALLEST_PART) as file:
            yield _GrowingParts(file)
    else:
        buffer = io.BytesIO()
        yield Sink(buffer)
        _pipe(fs, path, buffer.getvalue())  # getvalue() shares the memory, it does not copy


def open_reader(url: str) -> IO[bytes]:
    """See :func:`lightning.fabric.storage.transport.open_reader`."""
    fs, path = filesystem(url)
    try:
        return cast(IO[bytes], fs.open(path, "rb"))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"There is no file {display(url)}") from error


def _pipe(fs: AbstractFileSystem, path: str, data: bytes) -> None:
    """Stores ``data`` with as many parts at a time as the file system sees fit."""
    size = part_size(len(data))
    pipe_file = getattr(fs, "_pipe_file", fs.pipe_file)
    sized = {"chunksize": size} if "chunksize" in inspect.signature(pipe_file).parameters else {}
    if "adlfs" in _clients(fs) and len(data) > _AZURE_PIPE_LIMIT:
        with _stream(fs, path, size) as file:
            file.write(data)
    elif isinstance(fs, AsyncFileSystem):
        _finish_or_cancel(fs._pipe_file(path, data, **sized), fs.loop)
    else:
        fs.pipe_file(path, data, **sized)


def _finish_or_cancel(upload: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
    """Runs ``upload`` in the loop of fsspec's thread. If this thread is interrupted, the upload does not go on alone.

    With fsspec's own way to wait it would: it could replace the object long after the caller has been told that it did
    not.
    """
    ended = threading.Event()

    async def run() -> None:
        try:
            await upload
        finally:
            ended.set()

    result = asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        result.result()
    except BaseException:
        if result.cancel():
            ended.wait(_CANCELLATION_S)
        raise


class _GrowingParts(Sink):
    """Sets the size of the next part before each write; an fsspec file sends one as soon as it is full."""

    @override
    def write(self, data: Any) -> int:
        self._file.blocksize = streamed_part_size(self.tell())
        return super().write(data)


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
            log.warning(
                f"Could not abort the unfinished upload of {path!r} ({type(error).__name__}: {display(str(error))})."
                " Nothing is visible under that name, but the store may keep and bill the parts uploaded so far until"
                " a lifecycle rule of the bucket removes them."
            )
        raise


def _clients(fs: AbstractFileSystem) -> set[str]:
    """The packages that the file system's class and its bases come from."""
    return {base.__module__.partition(".")[0] for base in type(fs).__mro__}


def _replace(fs: AbstractFileSystem, temporary: str, path: str) -> None:
    """Renames ``temporary`` to ``path``, over an existing file also where the file system refuses that.

    Where it does (WebHDFS even without an error), the old file is set aside under another name until the new one has
    taken its place, so that no moment lacks a complete file.
    """
    try:
        move(fs, temporary, path)
    except Exception:
        if kind_of(fs, temporary) != "file" or kind_of(fs, path) != "file":
            raise  # it is not the old file that was in the way
    if kind_of(fs, temporary) == "nothing":
        return
    aside = f"{path}.{secrets.token_hex(6)}.old"
    move(fs, path, aside)
    try:
        move(fs, temporary, path)
    except BaseException:
        move(fs, aside, path)
        raise
    _clean_up(fs, aside)


def _clean_up(fs: AbstractFileSystem, path: str) -> None:
    """Removes what nobody needs. Whether the save succeeded is decided by then, so a failure here is only told."""
    try:
        if kind_of(fs, path) == "file":
            fs.rm_file(path)
    except Exception as error:
        log.warning(f"Could not remove the left-over {path!r} ({type(error).__name__}: {display(str(error))})")
