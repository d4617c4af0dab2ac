"""Objects of S3 through s3fs: parts go up while the file is still being written."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsspec import AbstractFileSystem
from typing_extensions import override

from lightning.fabric.storage.save_report import count_retry
from lightning.fabric.storage.transport import multipart
from lightning.fabric.storage.transport.retry import is_transient, retrying_async
from lightning.fabric.storage.transport.threads import Call
from lightning.fabric.storage.transport.upload import Handover, UploadBackend

if TYPE_CHECKING:
    from s3fs import S3FileSystem


def can_write(fs: AbstractFileSystem) -> bool:
    """Returns whether ``fs`` is s3fs's, as it is: what a subclass does otherwise is its own."""
    return f"{type(fs).__module__}.{type(fs).__qualname__}" == "s3fs.core.S3FileSystem"


class MultipartUpload:
    """The requests of a multipart upload, each of which is tried again. Its coroutines run in the loop of ``fs``."""

    def __init__(self, fs: "S3FileSystem", path: str) -> None:
        bucket, key, _ = fs.split_path(path)
        self._fs = fs
        self._path = path
        self._object = {"Bucket": bucket, "Key": key}
        self._token = multipart.new_token()
        self._id: dict[str, str] = {}
        self._is_marked = False

    async def create(self) -> None:
        """Begins the upload, marked if the store takes metadata."""
        own = self._fs.s3_additional_kwargs.get("Metadata", {})  # for what is given takes the place of that
        refusal = None
        if multipart.takes_metadata(self._fs):
            try:
                await self._create({**own, multipart.TOKEN: self._token})
                self._is_marked = True
                return
            except Exception as error:
                if is_transient(error) or isinstance(error, FileNotFoundError):
                    raise
                refusal = error
        await self._create(own)
        if refusal is not None:
            multipart.leave_unmarked(self._fs, refusal)

    async def _create(self, metadata: dict[str, str]) -> None:
        self._id = {"UploadId": (await self._ask("create_multipart_upload", Metadata=metadata))["UploadId"]}

    async def send(self, method: str, number: int, **content: Any) -> dict[str, Any]:
        """Makes a part by ``upload_part`` or ``upload_part_copy``. Returns the answer."""
        return await self._ask(method, PartNumber=number, **content, **self._id)

    async def complete(self, parts: list[dict[str, Any]]) -> None:
        """Makes the parts the object. An error whose outcome is not known is marked as such."""
        try:
            await self._ask("complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._id)
        except Exception as error:
            no_such_upload = isinstance(error, FileNotFoundError)
            if not (no_such_upload and self._is_marked and await self._is_committed()):
                if no_such_upload or is_transient(error):
                    multipart.note_unknown_outcome(error)
                raise

    async def abort(self) -> None:
        """Removes the parts."""
        await self._ask("abort_multipart_upload", **self._id)

    async def _is_committed(self) -> bool:
        """Returns whether an attempt has succeeded whose answer was lost: then there is no such upload any more."""
        try:
            return bool(self._token == (await self._ask("head_object"))["Metadata"].get(multipart.TOKEN))
        except FileNotFoundError:
            return False

    async def _ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        what = "".join(word.title() for word in method.split("_"))
        if "PartNumber" in arguments:
            what += f" {arguments['PartNumber']}"
        return await retrying_async(f"{what} of s3://{self._path}", lambda: self._request(method, **arguments))

    async def _request(self, method: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = await self._fs._call_s3(method, **self._object, **arguments)
        count_retry(answer["ResponseMetadata"].get("RetryAttempts", 0))  # botocore's own
        return answer


class S3Upload(UploadBackend):
    """A multipart upload, or a single request if the file is small."""

    handover = Handover.WHOLE_PARTS

    def __init__(self, fs: "S3FileSystem", path: str, parts: multipart.Parts) -> None:
        self._fs = fs
        self._path = path
        self._parts = parts
        self._upload = MultipartUpload(fs, path)
        self._creation: Call | None = None
        self._number = 0
        self._last: bytearray | memoryview = bytearray()
        self._running: deque[Call] = deque()
        self._sent: list[dict[str, Any]] = []

    @override
    def begin(self, size: int, idle: Callable[[], None]) -> int:
        multipart.check_size("S3", size)
        self._idle = idle
        self._part_size = multipart.part_size(size, self._parts.smallest)
        return self._part_size

    @override
    def write_part(self, part: memoryview | bytearray) -> None:
        multipart.check_count(self._number * self._part_size + len(part), self._part_size)
        if len(part) < self._part_size:  # the last one, and perhaps the only one
            self._last = part
        else:
            self._send(part)

    def _send(self, part: memoryview | bytearray) -> None:
        if self._creation is None:
            self._creation = Call(self._fs, self._upload.create())
        self._creation.result(idle=self._idle)
        while len(self._running) >= self._parts.in_flight(self._part_size):
            self._await_oldest()
        self._number += 1
        self._running.append(Call(self._fs, self._upload.send("upload_part", self._number, Body=part)))

    def _await_oldest(self) -> None:
        answer = self._running[0].result(idle=self._idle)
        self._sent.append({"PartNumber": len(self._sent) + 1, **_tags_of(answer)})
        self._running.popleft()

    @override
    def commit(self) -> None:
        if self._creation is None:
            small = bytes(self._last)
            what = f"PutObject of s3://{self._path}"
            put = retrying_async(what, lambda: self._fs._pipe_file(self._path, small, chunksize=2**40))
            self._finish(Call(self._fs, put))
            return
        if self._last:
            self._send(self._last)
        while self._running:
            self._await_oldest()
        self._finish(Call(self._fs, self._upload.complete(self._sent)))
        self._fs.invalidate_cache(self._path)

    def _finish(self, call: Call) -> None:
        self._running.append(call)  # where an interruption finds it
        call.result(idle=self._idle)

    @override
    def abort(self) -> None:
        for call in self._running:
            call.cancel()
        if self._creation is None:
            return
        try:
            self._creation.result(multipart.ABORT_S)
        except Exception:  # the reason why the save fails: there is nothing to abort
            self._creation.cancel()
            return
        multipart.take_back(self._fs, self._upload.abort(), self._path)


def _tags_of(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns the entity tag and the checksums in the answer to a part, which the commit repeats."""
    return {name: value for name, value in answer.items() if name == "ETag" or name.startswith("Checksum")}
