"""The data plane: moves the bytes of one file into a store, or nothing at all, and back.

What goes to S3, GCS or Azure takes obstore's engine if it is installed and can be given the options in force; all else
goes through the fsspec client of the store.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import BoundedSemaphore
from typing import IO, cast

from fsspec import AbstractFileSystem
from typing_extensions import override

from lightning.fabric.storage.paths.credentials import keep_current, refuse_missing
from lightning.fabric.storage.paths.filesystem import has_folders, is_object_store, is_zonal
from lightning.fabric.storage.paths.place import LocalPlace, Place
from lightning.fabric.storage.save_report import note_unknown_retries, writing
from lightning.fabric.storage.transport import multipart, progress
from lightning.fabric.storage.transport.backends import (
    fsspec,
    fsspec_reader,
    gcs_zonal,
    gcs_zonal_reader,
    local,
    obstore,
    obstore_reader,
    s3fs,
)
from lightning.fabric.storage.transport.backends.obstore_config import native_store
from lightning.fabric.storage.transport.errors import (
    ask,
    context_kept,
    failure,
    failures_named,
    questions_named,
    unexplained,
)
from lightning.fabric.storage.transport.ranged_file import RangedFile, Source
from lightning.fabric.storage.transport.retry import NO_SUCH_RANGE, is_transient, retrying, status_of
from lightning.fabric.storage.transport.sink import GivenUp, Sink, uploading
from lightning.fabric.storage.transport.upload import UploadBackend


@contextmanager
def open_writer(
    place: Place,
    lean: bool = False,
    files: int = 1,
    idle: Callable[[], None] = lambda: None,
    disposable: bool = False,
) -> Iterator[Sink]:
    """Yields a file to write to, which becomes the file at ``place`` when the context ends without an exception.

    Whatever happens before that, ``KeyboardInterrupt`` included, leaves the previous file as it was.

    Args:
        place: The place of the file. Missing folders are made.
        lean: Use less than 256 MiB of memory, whatever the size of the file. Else speed comes first: parts are
            larger, and stores that are fast only when they are given all of an object at once (GCS and Azure without
            obstore) are.
        files: The number of files that all ranks write together, beside each other in a store.
        idle: Called now and then in long waits. It may raise a
            :class:`~lightning.fabric.storage.transport.sink.GivenUp`, which ends the upload.
        disposable: Nobody will look for the file if its upload fails: then one that cannot be stopped is left alone.

    Raises:
        OSError: On leaving the context, if the file could not be written or committed. The message names the file and
            the reason, and the type is the reason's where that is a common kind of ``OSError``.
    """
    sink = callers = None
    with context_kept():
        try:
            with uploading(_backend(place, lean, files, disposable), idle) as sink, writing(sink):
                try:
                    yield sink
                except Exception as error:
                    if sink.error is None:  # an object that cannot be pickled, say
                        callers = error
                    raise
        except Exception as error:
            if error is callers or (sink is None and isinstance(error, (ImportError, ValueError))):
                raise  # an unknown protocol, or a client library that is not installed: its message has what to do
            cause = (sink and sink.error) or error
            if isinstance(cause, GivenUp):
                raise cause from None
            if not isinstance(cause, Exception):
                raise cause from None  # an interruption, which torch shows as an error of its own
            raise failure("write", place, cause) from unexplained(cause)


def _backend(place: Place, lean: bool, files: int, disposable: bool) -> UploadBackend:
    if isinstance(place, LocalPlace):  # each backend takes what it works with: a path, or a file system and a path
        return local.LocalUpload(place.path)
    fs, path = place.resolve()
    if not has_folders(fs) and "/" not in path.strip("/"):
        raise ValueError(f"{place} is a bucket, and not a place in one")
    parts = multipart.Parts.of(fs, lean, files)
    if is_object_store(fs):
        note_unknown_retries()
    client = partial(_client_backend, fs, path, lean, parts)
    keep_current(fs, connect=True)
    refuse_missing(fs)
    native = native_store(fs, path)
    return client() if native is None else obstore.ObstoreUpload(fs, path, *native, parts, client, disposable)


def _client_backend(fs: AbstractFileSystem, path: str, lean: bool, parts: multipart.Parts) -> UploadBackend:
    if is_zonal(fs, path):
        return gcs_zonal.ZonalUpload(fs, path)
    if s3fs.can_write(fs):
        return s3fs.S3Upload(fs, path, parts)
    return fsspec.client_upload(fs, path, lean, parts)


def open_reader(place: Place) -> IO[bytes]:
    """Opens the file at ``place`` to read and to seek in: a :class:`RangedFile`, unless it is a local file.

    Raises:
        FileNotFoundError: There is no such file.
        IsADirectoryError: There is a folder.
        OSError: The store did not answer, or refused. Reads raise it as well, also when the file is not what it was
            when it was opened.
    """
    if place.is_local:
        return open(place.raw, "rb")
    return cast(IO[bytes], RangedFile(open_source(place)))


@context_kept()
def open_source(place: Place) -> Source:
    """Opens the file at ``place``, whose ranges can be read in any order, into memory that the caller has.

    What fails for a moment is tried again. Close it when no read goes on any more.

    Raises:
        FileNotFoundError: There is no such file.
        IsADirectoryError: There is a folder.
        OSError: It could not be opened. The source's methods raise it as well. The message names the file.
    """
    with questions_named(place, "read"):
        open_it = _opener(place)
    try:
        return _Named(place, open_it())
    except (FileNotFoundError, IsADirectoryError) as error:
        if isinstance(error, IsADirectoryError) or ask(place, place.kind) == "directory":
            raise IsADirectoryError(f"{place} is a folder") from error
        raise FileNotFoundError(f"There is no file {place}") from error
    except Exception as error:
        raise failure("read", place, error) from unexplained(error)


def _opener(place: Place) -> Callable[[], Source]:
    """Returns what opens it; an unknown protocol, or a missing client library, is an error before that."""
    if isinstance(place, LocalPlace):  # as in _backend
        return partial(local.LocalSource, place.path)
    fs, path = place.resolve()
    keep_current(fs, connect=True)
    native = native_store(fs, path, reading=True)
    if native is not None:
        return partial(obstore_reader.ObstoreSource, fs, path, *native)
    if is_zonal(fs, path):
        gcs_zonal.client_module("async_multi_range_downloader")
        return partial(gcs_zonal_reader.ZonalSource, fs, path)
    return partial(fsspec_reader.FsspecSource, fs, path)


class _Named(Source):
    """A source whose errors name the file, and which tries again what fails for a moment."""

    def __init__(self, place: Place, source: Source) -> None:
        self._place = place
        self._source = source
        self.size = source.size
        self.parallel = source.parallel
        most = multipart.requests_at_a_time(place.resolve()[0])
        self._room: AbstractContextManager[object] = nullcontext() if most is None else BoundedSemaphore(most)

    @override
    def read_into(self, start: int, view: memoryview) -> None:
        what = f"Reading {len(view)} bytes at {start} of {self._place}"
        with failures_named("read", self._place):
            retrying(what, lambda: self._read_into(start, view))

    def _read_into(self, start: int, view: memoryview) -> None:
        try:
            with self._room:
                self._source.read_into(start, view)
            progress.made()
            return
        except Exception as error:
            failed = error
        if is_transient(failed) or status_of(failed) == NO_SUCH_RANGE:
            self._source.check()  # a range of another, shorter version would be tried again for minutes
        raise failed

    @override
    def check(self) -> None:
        with failures_named("read", self._place):
            self._source.check()

    @override
    def close(self) -> None:
        self._source.close()
