"""Objects of S3, GCS and Azure, whose ranges are read through obstore."""

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from fsspec import AbstractFileSystem
from typing_extensions import override

from lightning.fabric.storage.transport import retry
from lightning.fabric.storage.transport.backends import fsspec_reader
from lightning.fabric.storage.transport.backends.obstore_config import leave_to_client
from lightning.fabric.storage.transport.backends.obstore_errors import is_unsupported, translated
from lightning.fabric.storage.transport.ranged_file import REPLACED, Source
from lightning.fabric.storage.transport.threads import awaited, in_thread

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CHUNK = 2**20


class _Replaced(OSError):
    """Another version is there, which no answer of the store has shown by itself."""


class ObstoreSource(Source):
    """An object to read ranges of: through the client of its file system, where the store does not answer as it should.

    Args:
        fs: The file system that the store stands for.
        path: The object's path there.
        store: Its bucket.
        name: Its name in that.
    """

    parallel = True

    def __init__(self, fs: AbstractFileSystem, path: str, store: "ObjectStore", name: str) -> None:
        self._fs = fs
        self._path = path
        self._store = store
        self._name = name
        self._turning = threading.Lock()
        self._client: fsspec_reader.FsspecSource | None = None
        try:
            self._version = self._ask()
        except Exception as error:
            reason = translated(error)
            if not is_unsupported(reason):
                raise reason from error
            self._client = fsspec_reader.FsspecSource(fs, path)
            leave_to_client(fs, path, reason, reading=True)
            self.size = self._client.size
            return
        self.size, etag, _ = self._version
        #: A weak ETag does not distinguish versions, and some stores have none.
        self._etag = None if etag is None or etag.startswith("W/") else etag

    def _ask(self) -> tuple[int, str | None, Any]:
        import obstore

        meta = awaited(in_thread("checkpoint-read", obstore.head, self._store, self._name), self._name)
        return meta["size"], meta["e_tag"], meta["last_modified"]

    @override
    def read_into(self, start: int, view: memoryview) -> None:
        if self._client is None:
            try:
                self._read_into(start, view)
                return
            except _Replaced:
                raise
            except Exception as error:
                reason = translated(error)
                if retry.status_of(reason) == retry.NO_SUCH_RANGE:
                    self._check_version()  # a shorter one
                if not is_unsupported(reason):
                    raise reason from error
            self._turn_to_client(reason)
        assert self._client is not None
        self._client.read_into(start, view)

    def _read_into(self, start: int, view: memoryview) -> None:
        import obstore

        answer = obstore.get(self._store, self._name, options={"range": (start, start + len(view))})
        # looked at rather than asked for: with a condition a plain request would be one that some stores do not know
        if answer.meta["e_tag"] != self._etag and self._etag is not None:
            self._check_version()
            self._etag = None  # it is another one in answers to HEAD
        target, at = np.frombuffer(view, np.uint8), 0
        for chunk in answer.stream(min_chunk_size=_CHUNK):
            piece = np.frombuffer(chunk, np.uint8)[: len(target) - at]
            target[at : at + len(piece)] = piece
            at += len(chunk)
        if at != len(target):
            raise ConnectionError(f"{at} bytes came instead of {len(target)}")

    def _turn_to_client(self, reason: Exception) -> None:
        with self._turning:
            if self._client is None:
                client = fsspec_reader.FsspecSource(self._fs, self._path)
                self._check_version()  # so the client has opened the same one
                self._client = client
                leave_to_client(self._fs, self._path, reason, reading=True)

    @override
    def check(self) -> None:
        if self._client is not None:
            self._client.check()
        elif self._etag is None:
            try:
                self._check_version()
            except Exception as error:
                raise translated(error) from error

    def _check_version(self) -> None:
        if self._ask() != self._version:
            raise _Replaced(REPLACED)

    @override
    def close(self) -> None:
        if self._client is not None:
            self._client.close()
