"""Objects of S3 through s3fs: parts go up while the file is still being written."""

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fsspec import AbstractFileSystem

from lightning.fabric.storage.save_report import count_retry
from lightning.fabric.storage.transport.calls import Call
from lightning.fabric.storage.transport.multipart import (
    ABORT_S,
    TOKEN,
    Parts,
    check_count,
    check_size,
    leave_unmarked,
    new_token,
    note_unknown_outcome,
    part_size,
    parts_in_flight,
    takes_metadata,
    warn_of_unfinished,
)
from lightning.fabric.storage.transport.retry import is_transient, retrying_async
from lightning.fabric.storage.transport.sink import Sink

if TYPE_CHECKING:
    from s3fs import S3FileSystem


def can_write(fs: AbstractFileSystem) -> bool:
    """Whether ``fs`` is s3fs's, as it is: what a subclass does otherwise is its own."""
    return f"{type(fs).__module__}.{type(fs).__qualname__}" == "s3fs.core.S3FileSystem"


@contextmanager
def open_writer(fs: "S3FileSystem", path: str, parts: Parts) -> Iterator[Sink]:
    """See :func:`lightning.fabric.storage.transport.open.open_writer`, and the one of obstore for ``parts``."""
    upload = _Upload(fs, path, parts)
    sink = Sink(upload)
    upload.expected_size = lambda: sink.announced
    upload.idle = lambda: sink.idle()
    try:
        yield sink
        upload.finish()
    except BaseException:
        upload.abort()
        raise


async def begin_upload(
    fs: "S3FileSystem", token: str, ask: Callable[[dict[str, str]], Awaitable[dict[str, Any]]]
) -> tuple[str, bool]:
    """Begins an upload in parts, marked with ``token`` if the store takes metadata.

    Args:
        fs: The file system.
        token: See :data:`~lightning.fabric.storage.transport.multipart.TOKEN`.
        ask: Sends the request, with the metadata that it is given.

    Returns:
        The id of the upload, and whether its object will be marked.
    """
    own = fs.s3_additional_kwargs.get("Metadata", {})  # for what is given takes the place of that
    refusal = None
    if takes_metadata(fs):
        try:
            return (await ask({**own, TOKEN: token}))["UploadId"], True
        except Exception as error:
            if is_transient(error) or isinstance(error, FileNotFoundError):
                raise
            refusal = error
    answer = await ask(own)
    if refusal is not None:
        leave_unmarked(fs, refusal)
    return answer["UploadId"], False


class _Upload:
    """A multipart upload, or a single request if the file is small."""

    def __init__(self, fs: "S3FileSystem", path: str, parts: Parts) -> None:
        self.expected_size: Callable[[], int]
        self.idle: Callable[[], None]
        self._fs = fs
        self._path = path
        bucket, key, _ = fs.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._creation: Call | None = None
        self._token = new_token()
        self._position = 0
        self._part = bytearray()
        self._parts = parts
        self._part_size = 0
        self._running: deque[Call] = deque()
        self._sent: list[dict[str, Any]] = []

    def write(self, piece: memoryview) -> int:
        if not self._part_size:  # not earlier: only now have all storages been announced
            check_size("S3", self.expected_size())
            self._part_size = part_size(self.expected_size(), self._parts.smallest)
        taken = piece[: self._part_size - len(self._part)]
        self._position += len(taken)
        check_count(self._position, self._part_size)
        self._part += taken
        if len(self._part) == self._part_size:
            self._send_part()
        return len(taken)

    def _send_part(self) -> None:
        if self._creation is None:
            begin = begin_upload(
                self._fs, self._token, lambda own: self._tried("create_multipart_upload", Metadata=own)
            )
            self._creation = Call(self._fs, begin)
        upload, _ = self._creation.result(idle=self.idle)
        number = len(self._sent) + len(self._running) + 1
        while len(self._running) >= parts_in_flight(self._part_size, self._parts):
            self._await_oldest()
        self._running.append(self._call("upload_part", PartNumber=number, UploadId=upload, Body=self._part))
        self._part = bytearray()

    def _await_oldest(self) -> None:
        answer = self._running[0].result(idle=self.idle)
        told = {name: value for name, value in answer.items() if name == "ETag" or name.startswith("Checksum")}
        self._sent.append({"PartNumber": len(self._sent) + 1, **told})
        self._running.popleft()

    def finish(self) -> None:
        if self._creation is None:
            put = retrying_async(
                self._what("PutObject"), lambda: self._fs._pipe_file(self._path, bytes(self._part), chunksize=2**40)
            )
            self._running.append(Call(self._fs, put))
            self._running[0].result(idle=self.idle)
            return
        if self._part:
            self._send_part()
        while self._running:
            self._await_oldest()
        upload, is_marked = self._creation.result()
        try:
            self._ask("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": self._sent})
        except Exception as error:
            no_such_upload = isinstance(error, FileNotFoundError)
            if not (no_such_upload and is_marked and self._is_committed()):
                if no_such_upload or is_transient(error):
                    note_unknown_outcome(error)
                raise
        self._fs.invalidate_cache(self._path)

    def abort(self) -> None:
        for part in self._running:
            part.cancel()
        if self._creation is None:
            return
        try:
            upload, _ = self._creation.result(ABORT_S)
        except Exception:  # the reason why the save fails: there is nothing to abort
            self._creation.cancel()
            return
        abortion = self._call("abort_multipart_upload", UploadId=upload)
        try:
            abortion.result(ABORT_S)
        except Exception as error:
            abortion.cancel()
            warn_of_unfinished(self._path, error)

    def _is_committed(self) -> bool:
        """Whether an attempt has succeeded whose answer was lost: then there is no such upload any more."""
        try:
            return bool(self._token == self._ask("head_object")["Metadata"].get(TOKEN))
        except FileNotFoundError:
            return False

    def _ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        call = self._call(method, **arguments)
        self._running.append(call)  # where an interruption finds it
        answer: dict[str, Any] = call.result(idle=self.idle)
        self._running.remove(call)
        return answer

    def _call(self, method: str, **arguments: Any) -> Call:
        return Call(self._fs, self._tried(method, **arguments))

    async def _tried(self, method: str, **arguments: Any) -> dict[str, Any]:
        what = "".join(word.title() for word in method.split("_"))
        if "PartNumber" in arguments:
            what += f" {arguments['PartNumber']}"
        return await retrying_async(self._what(what), lambda: self._request(method, **arguments))

    async def _request(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._fs._call_s3(method, **self._object, **arguments)
        count_retry(answer["ResponseMetadata"].get("RetryAttempts", 0))  # botocore's own
        return answer

    def _what(self, operation: str) -> str:
        return f"{operation} of s3://{self._path}"
