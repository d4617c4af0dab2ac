"""Copies of files that the store makes itself, so that their bytes do not pass through this machine."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem

from lightning.fabric.storage.paths.filesystem import forget, has_own, info_of, is_object_store
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport.backends.fsspec import room_for
from lightning.fabric.storage.transport.backends.s3fs import MultipartUpload
from lightning.fabric.storage.transport.errors import ask, failures_named
from lightning.fabric.storage.transport.multipart import part_size
from lightning.fabric.storage.transport.open import open_reader, open_writer
from lightning.fabric.storage.transport.refusals import is_refusal
from lightning.fabric.storage.transport.retry import retrying, retrying_async
from lightning.fabric.storage.transport.threads import run_in_loop
from lightning.fabric.storage.transport.upload import LARGEST_PIECE

if TYPE_CHECKING:
    from adlfs import AzureBlobFileSystem
    from s3fs import S3FileSystem

log = logging.getLogger(__name__)

#: S3 copies up to 5 GiB with one request, but many that copy a part each are faster.
_S3_PART = 256 * 2**20
_PARTS_IN_FLIGHT = 16
_POLL_S = 0.2
#: After that long without progress a copy that Azure makes has failed.
_STANDSTILL_S = 180.0


def copy_file(source: Place, target: Place) -> None:
    """Makes the file at ``target`` a copy of another one, whole or not at all. It can be read by whatever reads that.

    Object stores copy by themselves (S3 in parts of 256 MiB or more, 16 at a time). Between two stores, on file systems
    that have no such request, such as SFTP, and where the store cannot make the copy, the bytes pass through this
    machine in pieces.

    Raises:
        FileNotFoundError: There is no file at ``source``.
        OSError: The file could not be copied. What was at ``target`` is unchanged, except on Azure: there it is
            replaced when the copy begins.
    """
    copier = _copier(source, target)
    problem = ""
    if copier is not None:
        with failures_named("write", target):
            try:
                problem = copier()
            except Exception as error:
                if is_refusal(error):  # any other failure is one of the copy
                    raise
                log.info(f"The bytes of {target} pass through this machine: {redact(str(error))}")
            else:
                if not problem:
                    return
    try:
        with open_reader(source) as file, open_writer(target) as copy:
            copy.expect(file.seek(0, os.SEEK_END))
            file.seek(0)
            while piece := file.read(LARGEST_PIECE):
                copy.write(piece)
    except Exception as error:
        if not problem:
            raise
        raise OSError(f"{target} is no whole copy of {source}, and must not be used: {problem}") from error


def _copier(source: Place, target: Place) -> Callable[[], str] | None:
    """Returns a function that lets the store copy, if it can, and returns the fault of the copy."""
    (fs, path), (other, copy) = source.resolve(), target.resolve()
    if fs != other or not is_object_store(fs) or not has_own(fs, "cp_file"):
        return None
    info = ask(source, lambda: info_of(fs, path))
    if info["type"] != "file":
        raise FileNotFoundError(f"There is no file {source}")
    return lambda: _let_copy(fs, path, copy, int(info["size"]))


def _let_copy(fs: AbstractFileSystem, path: str, copy: str, size: int) -> str:
    with room_for(fs, copy):
        problem = ""
        if isinstance(fs, AsyncFileSystem):
            problem = run_in_loop(fs, _copied(fs, path, copy, size))
        else:
            retrying(f"The copy to {copy}", lambda: fs.cp_file(path, copy))
        forget(fs, copy)
    found = info_of(fs, copy).get("size")
    return problem or (f"it has {found} bytes, and not {size}" if found != size else "")


async def _copied(fs: Any, path: str, copy: str, size: int) -> str:
    what, client = f"The copy to {copy}", type(fs).__module__.partition(".")[0]
    if client == "s3fs" and size > _S3_PART:
        await _copied_in_parts(fs, path, copy, size)
        return ""
    await retrying_async(what, lambda: fs._cp_file(path, copy))
    return await _outcome(fs, copy) if client == "adlfs" else ""


async def _outcome(fs: "AzureBlobFileSystem", copy: str) -> str:
    """Waits until Azure has made a copy, which adlfs only asks for; returns why it has not."""
    container, name, _ = fs.split_path(copy)
    progress, grown_at = None, time.monotonic()
    async with fs.service_client.get_blob_client(container, name) as client:
        while True:
            state = (await client.get_blob_properties()).copy
            if state.status != "pending":
                break
            if state.progress != progress:
                progress, grown_at = state.progress, time.monotonic()
            elif time.monotonic() - grown_at > _STANDSTILL_S:
                return f"nothing has been copied for {_STANDSTILL_S:.0f} s, after {progress} bytes"
            await asyncio.sleep(_POLL_S)
    return "" if state.status in ("success", None) else f"{state.status}: {state.status_description}"


async def _copied_in_parts(fs: "S3FileSystem", path: str, copy: str, size: int) -> None:
    bucket, key, _ = fs.split_path(path)
    origin = {"Bucket": bucket, "Key": key}
    part = part_size(size, _S3_PART)
    room = asyncio.Semaphore(_PARTS_IN_FLIGHT)
    upload = MultipartUpload(fs, copy)
    await upload.create()

    async def copy_part(number: int) -> dict[str, Any]:
        start = (number - 1) * part
        span = f"bytes={start}-{min(start + part, size) - 1}"
        async with room:
            answer = await upload.send("upload_part_copy", number, CopySource=origin, CopySourceRange=span)
        return {"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]}

    try:
        await upload.complete(await _all([copy_part(number) for number in range(1, -(-size // part) + 1)]))
    except BaseException:
        await asyncio.shield(upload.abort())
        raise


async def _all(calls: list[Awaitable[Any]]) -> list[Any]:
    """Returns the results of all calls. If one fails, none goes on."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
