"""Files of any fsspec file system, of which ranges are read."""

import weakref
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from typing_extensions import override

from lightning.fabric.storage.paths.client_options import protocols_of
from lightning.fabric.storage.paths.filesystem import forget, has_own, info_of
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport.ranged_file import REPLACED, Source
from lightning.fabric.storage.transport.retry import NO_SUCH_RANGE, chain, retrying, status_of
from lightning.fabric.storage.transport.threads import run_in_loop

#: Bytes that are asked for at once where requests are small.
_LARGEST_SPAN = 4 * 2**20
#: The name of botocore's error about a body.
_WRONG_CHECKSUM = "FlexibleChecksumError"
#: Attributes of a file that file systems report: if one of these changes, it is another file.
_IDENTITY = (
    *("size", "ETag", "etag", "generation", "LastModified", "last_modified", "mtime", "modify", "created"),
    *("fileId", "modificationTime"),  # of WebHDFS
)

#: Files that are being read, with their reader and file system. The collector would have one closed that nobody else
#: holds, perhaps in the midst of its client's own work: paramiko would wait for ever for a lock that it has itself.
_open_files: dict[int, "tuple[weakref.ref[FsspecSource], AbstractFileSystem, Any]"] = {}


def close_abandoned(fs: AbstractFileSystem) -> None:
    """Closes files that nobody reads any more, where their client is not at work: before it is asked for another."""
    for key, (source, of, file) in list(_open_files.items()):
        if of is fs and source() is None:
            del _open_files[key]
            file.close()


class FsspecSource(Source):
    """A file to read ranges of."""

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        close_abandoned(fs)
        self._fs = fs
        self._path = path
        #: True if ranges can be read from many threads at a time.
        self.parallel = isinstance(fs, AsyncFileSystem) and has_own(fs, "cat_file")
        self._file: Any = None
        self._info: dict[str, Any] | None = None
        self._whole = _whole_website(fs, path) if "http" in protocols_of(fs) else None
        if self._whole is not None:
            self.size = len(self._whole)
            return
        self._info = retrying(f"Asking about {redact(path)}", lambda: info_of(fs, path))
        if self._info["type"] != "file":
            raise (IsADirectoryError if self._info["type"] == "directory" else FileNotFoundError)(path)
        self.size = int(self._info["size"])
        if not self.parallel:
            self._file = fs.open(path, "rb")
            _open_files[id(self._file)] = (weakref.ref(self), fs, self._file)

    @override
    def read_into(self, start: int, view: memoryview) -> None:
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
        try:
            data: bytes = run_in_loop(fs, fs._cat_file(self._path, start=start, end=end))
            return data
        except Exception as error:
            if end - start == self.size or all(type(cause).__name__ != _WRONG_CHECKSUM for cause in chain(error)):
                raise
        # some servers send a range with the checksum of the whole object, which the client compares
        settings = {**fs.config_kwargs, "response_checksum_validation": "when_required"}
        self._fs = type(fs)(*fs.storage_args, **{**fs.storage_options, "config_kwargs": settings})
        data = run_in_loop(self._fs, self._fs._cat_file(self._path, start=start, end=end))
        return data

    @override
    def check(self) -> None:
        if self._info is None:
            return
        forget(self._fs, self._path)
        now = retrying(f"Asking about {redact(self._path)}", lambda: info_of(self._fs, self._path))
        if now["type"] == "nothing" and "http" in protocols_of(self._fs):
            _whole_website(self._fs, self._path)  # raises the reason, which that lacks
        if any(now.get(key) != self._info.get(key) for key in _IDENTITY):
            raise OSError(REPLACED)

    @override
    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            _open_files.pop(id(self._file), None)


def _whole_website(fs: Any, path: str) -> memoryview | None:
    """Returns the file, if its server serves no ranges, but all when asked for one byte; headers may not show that.

    Raises:
        Exception: aiohttp's own error. That of ``fs.info`` is a FileNotFoundError, whatever the reason is.
    """
    what = f"Reading {redact(path)}"
    try:
        data = retrying(what, lambda: fs.cat_file(path, start=0, end=1))
    except Exception as error:
        if status_of(error) != NO_SUCH_RANGE:  # there is no first byte
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
