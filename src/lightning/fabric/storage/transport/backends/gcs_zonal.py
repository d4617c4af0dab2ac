"""Objects of Google's zonal buckets (Rapid Storage), which are written and read over gRPC, with gcsfs's own clients.

An object there can be seen while it is being written, and a new one takes the place of an old one at its first byte. So
it gets a temporary name, is finalized, compared with what was sent, and renamed, which the store does in one step.

The client's way to try again an append loses data without an error: it looks up where the store has got to in the
object, and goes on from there in the memory of this one append. Here each append is tried once, and what to send next
is found out anew. The client's way to close does not see failures either, so it is the store that is asked for the
size and the checksum at the end.
"""

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from lightning.fabric.storage.paths.filesystem import forget
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.paths.replace import temporary_beside
from lightning.fabric.storage.transport.multipart import check_size, note_unknown_outcome, take_back
from lightning.fabric.storage.transport.retry import is_transient, retrying_async
from lightning.fabric.storage.transport.threads import Call
from lightning.fabric.storage.transport.upload import Handover, UploadBackend

if TYPE_CHECKING:
    from gcsfs.extended_gcsfs import ExtendedGcsFileSystem

_T = TypeVar("_T")

#: Bytes that are sent, and asked for, at a time. The client makes messages of 2 MiB of them.
SLICE = 16 * 2**20
#: Seconds that the store may take for one slice, or to finalize an object.
_PATIENCE_S = 120


def client_module(name: str) -> Any:
    """Imports a module of Google's client for zonal buckets.

    Raises:
        ImportError: The client has none.
    """
    try:
        return importlib.import_module(f"google.cloud.storage.asyncio.{name}")
    except ImportError as error:
        raise ImportError(
            "Zonal buckets need gcsfs 2026.2 and google-cloud-storage 3.9, or newer:"
            " pip install --upgrade gcsfs google-cloud-storage"
        ) from error


class ZonalUpload(UploadBackend):
    """An object with a temporary name, of which one slice is sent while the next one is being written."""

    handover = Handover.WHOLE_PARTS

    def __init__(self, fs: "ExtendedGcsFileSystem", path: str) -> None:
        client_module("async_appendable_object_writer")
        self._fs = fs
        self._path = path
        self._name = temporary_beside(path.rpartition("/")[2])
        self._checksum: Any = importlib.import_module("google_crc32c").Checksum()
        self._temporary = ""
        self._size = 0
        self._running: Call | None = None

    @override
    def begin(self, size: int, idle: Callable[[], None]) -> int:
        check_size("GCS", size)
        self._idle = idle
        self._temporary = f"{self._fs._parent(self._path)}/{self._name.__enter__()}"
        self._appendable = _Appendable(self._fs, self._temporary)
        return SLICE

    @override
    def write_part(self, part: memoryview | bytearray) -> None:
        self._await_running()
        data = bytes(part)
        self._running = self._call("An append to", lambda: self._appendable.append(data))
        self._size += len(data)
        self._checksum.update(data)

    @override
    def commit(self) -> None:
        if not self._size:
            self.write_part(bytearray())  # there is no object before the first append
        self._await_running()
        checksum = int.from_bytes(self._checksum.digest(), "big")
        self._running = self._call("Finalizing", lambda: self._appendable.finalize(self._size, checksum))
        self._await_running()
        self._running = self._call("Renaming", self._move)
        try:
            self._await_running()
        except Exception as error:
            if is_transient(error):
                note_unknown_outcome(error)
            raise
        self._end()

    async def _move(self) -> None:
        """Moves the object like gcsfs's ``mv_file``, which copies if that fails; zonal buckets have no copies."""
        bucket, name, _ = self._fs.split_path(self._temporary)
        target = self._fs.split_path(self._path)[1]
        try:
            await self._fs._call(
                "POST", "b/{}/o/{}/moveTo/o/{}", bucket, name, target, headers={"Content-Type": "application/json"}
            )
        except FileNotFoundError:
            if not await self._appendable.is_at(target):  # moved by an attempt whose answer was lost
                raise

    @override
    def abort(self) -> None:
        if self._running is not None:
            self._running.cancel()
            take_back(self._fs, self._appendable.remove(), self._temporary)
        if self._temporary:
            self._end()

    def _end(self) -> None:
        self._name.__exit__(None, None, None)
        forget(self._fs, self._path)

    def _await_running(self) -> None:
        if self._running is not None:
            self._running.result(idle=self._idle)

    def _call(self, what: str, operation: Callable[[], Awaitable[None]]) -> Call:
        return Call(self._fs, retrying_async(f"{what} gs://{redact(self._temporary)}", operation))


class _Appendable:
    """An object that grows, and the stream to it. All methods can be called again after they have failed."""

    def __init__(self, fs: "ExtendedGcsFileSystem", path: str) -> None:
        self._fs = fs
        self._path = path
        self._bucket, self._name, _ = fs.split_path(path)
        self._writer: Any = None
        self._generation: int | None = None
        self._handle: Any = None
        self._confirmed = 0
        self._content: tuple[int, int] | None = None

    async def append(self, data: bytes) -> None:
        """Has the store confirm that it keeps ``data``, after all that it has confirmed before."""
        end = self._confirmed + len(data)
        async with self._stream() as writer:
            kept = writer.persisted_size - self._confirmed  # of an attempt before this one
            if not 0 <= kept <= len(data):
                raise _lost(writer.persisted_size, self._confirmed)
            if kept < len(data):
                await in_time(writer.append(data[kept:], retry_policy=once()))
                if writer.persisted_size != end:  # it has asked only at the end of full slices
                    await in_time(writer.flush())
            if writer.persisted_size != end:
                raise _lost(writer.persisted_size, end)
        self._confirmed = end

    async def finalize(self, size: int, checksum: int) -> None:
        """Ends the object, which has to be of ``size`` bytes with the CRC-32C ``checksum``."""
        try:
            async with self._stream() as writer:
                if writer.persisted_size != self._confirmed:
                    raise _lost(writer.persisted_size, self._confirmed)
                await in_time(writer.finalize(retry_policy=once()))
        except Exception:
            if not (await self._look(self._name, self._generation)).finalize_time:
                raise
            # else an attempt has done it whose answer was lost
        finally:
            self._writer = None
        found = await self._look(self._name, self._generation)
        self._content = found.size, found.checksums.crc32c
        if not found.finalize_time or self._content != (size, checksum):
            raise OSError(
                f"the store has {found.size} bytes with the CRC-32C {found.checksums.crc32c:08x}, and {size} with"
                f" {checksum:08x} were sent"
            )

    async def is_at(self, name: str) -> bool:
        """Returns whether the finalized object is called ``name`` by now."""
        from google.api_core.exceptions import NotFound

        try:
            found = await self._look(name)
        except NotFound:
            return False
        return (found.size, found.checksums.crc32c) == self._content

    async def remove(self) -> None:
        """Removes the object, unless it has not come into being, or has been moved."""
        await self._end_stream()
        with suppress(FileNotFoundError):
            await self._fs._rm_file(self._path)

    async def _look(self, name: str, generation: int | None = None) -> Any:
        client = await self._fs._get_grpc_client()
        return await in_time(client.get_object(self._bucket, name, generation=generation))

    @asynccontextmanager
    async def _stream(self) -> AsyncIterator[Any]:
        """Yields a stream that knows how much the store keeps. After a failure, the next one is a new one."""
        from google.api_core.exceptions import Aborted

        try:
            if self._writer is None:
                self._writer = await self._open()
            yield self._writer
        except BaseException as error:
            await self._end_stream()
            if isinstance(error, Aborted):  # the store wants to be asked again, perhaps elsewhere
                raise ConnectionError(str(error)) from error
            raise

    async def _end_stream(self) -> None:
        """Ends the call, which the writer's own method would make again first, for as long as that fails."""
        writer, self._writer = self._writer, None
        if writer is not None and (call := writer.write_obj_stream.socket_like_rpc) is not None:
            await call.close()

    async def _open(self) -> Any:
        client = await self._fs._get_grpc_client()
        writer = client_module("async_appendable_object_writer").AsyncAppendableObjectWriter(
            client, self._bucket, self._name, generation=self._generation, write_handle=self._handle
        )
        await in_time(writer.open())
        self._generation, self._handle = writer.generation, writer.write_handle
        return writer


def once() -> Any:
    """Returns a retry policy that leaves retries to us: it has none, and no time for any where only that counts."""
    from google.api_core.retry_async import AsyncRetry

    return AsyncRetry(predicate=lambda error: False, timeout=0)


def _lost(found: int, expected: int) -> OSError:
    return OSError(f"the store keeps {found} bytes of {expected} that it had been sent, or should have been")


async def in_time(operation: Awaitable[_T]) -> _T:
    """Returns what an operation of the store does, or raises a ``TimeoutError`` if that takes minutes."""
    try:
        return await asyncio.wait_for(operation, _PATIENCE_S)
    except asyncio.TimeoutError as error:  # another class in Python 3.10
        raise TimeoutError(f"the store did not answer within {_PATIENCE_S} s") from error
