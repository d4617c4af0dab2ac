"""Objects of Google's zonal buckets, whose ranges are read over one stream, with the client that gcsfs uses."""

import asyncio
import importlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning.fabric.storage.transport.backends.gcs_zonal import SLICE, client_module, in_time, once
from lightning.fabric.storage.transport.ranged_file import REPLACED, Source
from lightning.fabric.storage.transport.retry import retrying_async
from lightning.fabric.storage.transport.threads import Call, run_in_loop

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from gcsfs.extended_gcsfs import ExtendedGcsFileSystem


class ZonalSource(Source):
    """An object to read ranges of, always of the version that it had when it was opened."""

    parallel = True

    def __init__(self, fs: "ExtendedGcsFileSystem", path: str) -> None:
        self._fs = fs
        self._path = path
        self._bucket, self._name, _ = fs.split_path(path)
        self._generation: int | None = None
        #: The stream, while there is one. It is closed with the source, or when the collector finds that.
        self._streams: list[Any] = []
        weakref.finalize(self, _end, fs, self._streams).atexit = False
        self._opening = asyncio.Lock()
        self.size: int = run_in_loop(fs, retrying_async(f"Opening gs://{path}", self._open))

    async def _open(self) -> int:
        from google.api_core.exceptions import NotFound

        try:
            downloader = await self._stream()
        except NotFound as error:
            raise FileNotFoundError(self._path) from error
        self._generation = downloader.generation
        return int(downloader.persisted_size or 0)

    async def _stream(self) -> Any:
        kind = client_module("async_multi_range_downloader").AsyncMultiRangeDownloader
        async with self._opening:
            if not self._streams:
                client = await self._fs._get_grpc_client()
                created = kind.create_mrd(client, self._bucket, self._name, self._generation)
                self._streams.append(await in_time(created))
            return self._streams[0]

    @override
    def read_into(self, start: int, view: memoryview) -> None:
        for at in range(0, len(view), SLICE):
            run_in_loop(self._fs, self._read_range(start + at, view[at : at + SLICE]))

    async def _read_range(self, start: int, view: memoryview) -> None:
        from google.api_core.exceptions import Aborted, NotFound

        damaged = importlib.import_module("google.cloud.storage.exceptions").DataCorruption
        target = _Target(view)
        downloader = await self._stream()
        try:
            await in_time(downloader.download_ranges([(start, len(view), target)], retry_policy=once()))
        except BaseException as error:
            if downloader in self._streams:
                self._streams.remove(downloader)  # another read opens a new one
                await _close(downloader)
            if isinstance(error, NotFound):
                raise OSError(REPLACED) from error
            if isinstance(error, (Aborted, damaged)) or not downloader.is_stream_open:
                raise ConnectionError(str(error)) from error
            raise
        if target.filled != len(view):
            raise ConnectionError(f"{target.filled} bytes came instead of {len(view)}")

    @override
    def check(self) -> None:
        """Does nothing: every request has asked for the version that was opened."""

    @override
    def close(self) -> None:
        _end(self._fs, self._streams)


def _end(fs: "ExtendedGcsFileSystem", streams: list[Any]) -> None:
    """Does not wait: the collector may call it in any thread, in the midst of anything."""
    for downloader in streams:
        Call(fs, _close(downloader))
    streams.clear()


async def _close(downloader: Any) -> None:
    """Closes a stream on which nothing depends any more, so that a failure is of interest to debuggers only."""
    if downloader.is_stream_open:
        try:
            await in_time(downloader.close())
        except Exception as error:
            log.debug(f"A stream that was read from did not close ({type(error).__name__}: {error})")


class _Target:
    """A buffer for a range, which the client writes to."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.filled = 0

    def write(self, data: bytes) -> int:
        self._view[self.filled : self.filled + len(data)] = data  # raises if it is more than was asked for
        self.filled += len(data)
        return len(data)
