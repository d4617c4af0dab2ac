"""Uploads in parts: their size and number, the mark of their object, and unfinished ones."""

import logging
import secrets
from collections.abc import Coroutine
from typing import Any, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem

from lightning.fabric.storage.paths.client_options import clients_of
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport.refusals import lacks_permission
from lightning.fabric.storage.transport.threads import Call

log = logging.getLogger(__name__)

_MIB = 2**20
#: S3 and GCS allow 10,000 parts of an object. With 9,000 planned, no rounding comes near that.
_PLANNED_PARTS = 9_000
MOST_PARTS = 10_000
#: Smaller parts mean more requests, larger ones more memory in flight.
SMALLEST_PART = 32 * _MIB
#: The same for a file that is to be written with little memory.
SMALLEST_LEAN_PART = 16 * _MIB
#: Parts in flight, while they are small.
_PARTS_IN_FLIGHT = 8
#: From so many files on that are written together, their parts are larger, and fewer are in flight: a store takes only
#: so many requests a second. The factor is that of the model of benchmarks/scale.
_MANY_FILES = 256
_LARGER = 3
#: Bounds of a part: S3 and GCS refuse smaller ones, Azure larger ones.
_ALLOWED_PARTS = (5 * _MIB, 4000 * _MIB)
#: The option of each client for the size of parts.
_OPTIONS_OF_SIZE = {"s3fs": "default_block_size", "gcsfs": "block_size", "adlfs": "blocksize"}
#: The metadata of an object of several parts in which its upload is marked. If the answer to the request that commits
#: it is lost, and the next attempt finds no such upload, the mark shows whether the object is that one.
#: Letters alone: proxies drop the header of a name with an underscore, and Azure knows no hyphens.
TOKEN = "lightningsave"
#: Seconds for which an interrupted save tries to take back what it has uploaded.
ABORT_S = 10

#: The largest object of a store, in bytes: the largest part times the number of parts, and GCS's own limit.
LARGEST_OBJECT = {"S3": MOST_PARTS * 5 * 2**30, "GCS": 5 * 2**40, "Azure": 50_000 * 4000 * _MIB}


def check_size(store: str, size: int) -> None:
    """Refuses what a store cannot hold, before hours are spent on sending it.

    Raises:
        ValueError: An object of ``size`` bytes is too large.
    """
    if size > LARGEST_OBJECT[store]:
        raise ValueError(
            f"{size} bytes are more than the {LARGEST_OBJECT[store]} that an object of {store} can have: save a sharded"
            " checkpoint"
        )


class Parts(NamedTuple):
    """The sizes and the number of the parts in which a file is uploaded.

    Attributes:
        smallest: Bytes of a part, unless the object needs larger ones.
        memory: Bytes that may be in flight.
        most: Parts that may be in flight.
    """

    smallest: int
    memory: int
    most: int = _PARTS_IN_FLIGHT

    @classmethod
    def of(cls, fs: AbstractFileSystem, lean: bool, files: int) -> "Parts":
        """Chooses them by the options of ``fs``, and by those of ``open_writer``."""
        options = [_OPTIONS_OF_SIZE[client] for client in clients_of(fs) if client in _OPTIONS_OF_SIZE]
        wanted = next((fs.storage_options[option] for option in options if fs.storage_options.get(option)), None)
        smallest = SMALLEST_LEAN_PART if lean else SMALLEST_PART
        if wanted is not None:
            smallest = sorted((*_ALLOWED_PARTS, int(wanted)))[1]
        most = requests_at_a_time(fs) or _PARTS_IN_FLIGHT
        memory = most * smallest
        return cls(smallest * (_LARGER if wanted is None and files >= _MANY_FILES else 1), memory, most)

    def in_flight(self, part: int) -> int:
        """Returns the number of parts of ``part`` bytes in flight: the larger they are the fewer, to bound memory."""
        return min(self.most, max(2, self.memory // part))


def requests_at_a_time(fs: AbstractFileSystem) -> int | None:
    """Returns the number of requests for one file that may be in flight, if an option of ``fs`` limits it."""
    most: int | None = fs.storage_options.get("max_concurrency")
    return most


def part_size(size: int, smallest: int) -> int:
    """Returns the size of the parts, in bytes, a multiple of 1 MiB, in which an object of ``size`` bytes is uploaded.

    It is ``smallest`` unless there would be too many: any object that S3 and GCS can hold stays under their limit of
    10,000 parts. All parts but the last have it, for there are stores that take no others (Cloudflare R2).
    """
    return max(smallest, -(-size // (_PLANNED_PARTS * _MIB)) * _MIB)


def check_count(end: int, part: int) -> None:
    """Refuses bytes up to ``end`` of an object in parts of ``part`` bytes, before the store does at its completion.

    Raises:
        ValueError: There are too many parts: the size of what is written was not announced, or too small.
    """
    if end > MOST_PARTS * part:
        raise ValueError(
            f"More than {MOST_PARTS} parts of {part} bytes are needed: what is saved beside tensors is too large. Keep"
            " such data in tensors."
        )


def new_token() -> str:
    """Returns a mark for the object of one upload, see :data:`TOKEN`."""
    return secrets.token_hex(16)


def takes_metadata(fs: AbstractFileSystem) -> bool:
    """Returns whether uploads can be marked, as far as is known."""
    return not getattr(fs, "_refuses_metadata", False)


def leave_unmarked(fs: AbstractFileSystem, reason: BaseException) -> None:
    """Remembers that the store has refused an upload with metadata, and has begun the same one without."""
    if takes_metadata(fs):
        fs.__dict__["_refuses_metadata"] = True
        log.info(
            f"A store of {type(fs).__name__} takes no metadata ({redact(str(reason))}): if the answer to the last"
            " request of an upload is lost, nothing will show whether that was committed."
        )


def note_unknown_outcome(error: BaseException) -> None:
    """Keeps with an error that the object may have been committed all the same: its message must not deny that."""
    error.__dict__["_unknown_outcome"] = True


def has_unknown_outcome(error: BaseException) -> bool:
    """Returns whether :func:`note_unknown_outcome` was called for it."""
    return bool(getattr(error, "_unknown_outcome", False))


def take_back(fs: AsyncFileSystem, request: Coroutine[Any, Any, Any], path: str) -> None:
    """Waits for the request that removes what was uploaded to ``path``, but not for long."""
    call = Call(fs, request)
    try:
        call.result(ABORT_S)
    except Exception as error:
        call.cancel()
        warn_of_unfinished(path, error)


def warn_of_unfinished(path: str, reason: BaseException | None = None) -> None:
    """Logs that an upload could not be aborted."""
    because = f" ({redact(f'{type(reason).__name__}: {reason}')})" if reason is not None else ""
    wanted = ""
    if reason is not None and lacks_permission(reason):
        wanted = " Grant the permission `s3:AbortMultipartUpload`, or Google's `storage.multipartUploads.abort`."
    log.warning(
        f"Could not abort the unfinished upload of {path!r}{because}. The store may keep and bill the parts uploaded so"
        f" far until a lifecycle rule of the bucket removes them.{wanted}"
    )
