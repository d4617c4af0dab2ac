"""Uploads in parts: of which size, how many, and what is left of one that could not be taken back."""

import logging
import secrets
from typing import NamedTuple

from fsspec import AbstractFileSystem

from lightning.fabric.storage.location import display

log = logging.getLogger(__name__)

_MIB = 2**20
#: S3 and GCS allow 10,000 parts of an object. With 9,000 planned, no rounding comes near that.
_PLANNED_PARTS = 9_000
MOST_PARTS = 10_000
#: Smaller parts mean more requests, larger ones more memory in flight.
SMALLEST_PART = 32 * _MIB
#: Of a file whose writer wants little memory used.
SMALLEST_LEAN_PART = 16 * _MIB
#: How many parts are on their way at a time, while they are small.
_PARTS_IN_FLIGHT = 8
#: From so many files on that are written together, their parts are larger, and fewer are on their way: a store takes
#: only so many requests a second. How much larger the model of benchmarks/scale has told.
_MANY_FILES = 256
_LARGER = 3
#: The metadata of an object of several parts in which its upload is marked. If the answer to the request that commits
#: it is lost, and the next attempt is told that there is no such upload, it tells whether the object is that one.
#: Letters alone: proxies drop the header of a name with an underscore, and Azure knows no hyphens.
TOKEN = "lightningsave"
#: How long, in seconds, an interrupted save tries to take back what it has uploaded.
ABORT_S = 10


#: The largest object of a store, in bytes: the largest part times the number of parts, and what GCS says.
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
    """In what parts a file is uploaded.

    Attributes:
        smallest: Their size in bytes, unless the object needs larger ones.
        memory: The bytes that may be on their way at a time.
    """

    smallest: int
    memory: int

    @classmethod
    def of(cls, lean: bool, files: int) -> "Parts":
        """See :func:`lightning.fabric.storage.transport.open_writer`."""
        smallest = SMALLEST_LEAN_PART if lean else SMALLEST_PART
        return cls(_LARGER * smallest if files >= _MANY_FILES else smallest, _PARTS_IN_FLIGHT * smallest)


def part_size(size: int, smallest: int) -> int:
    """The size of the parts, in bytes and a multiple of 1 MiB, in which an object of ``size`` bytes is uploaded.

    It is ``smallest`` unless there would be too many: any object that S3 and GCS can hold stays under their limit of
    10,000 parts.
    """
    return max(smallest, -(-size // (_PLANNED_PARTS * _MIB)) * _MIB)


def streamed_part_size(position: int, smallest: int) -> int:
    """The size of the part that starts at byte ``position`` of an object whose size is known only at its end.

    It starts small and grows with what has been sent, so that 5 TiB fit into 10,000 parts here too.
    """
    return part_size(8 * position, smallest)


def parts_in_flight(part: int, memory: int) -> int:
    """How many parts of ``part`` bytes are on their way at a time: the larger they are the fewer, to bound memory."""
    return max(2, min(_PARTS_IN_FLIGHT, memory // part))


def new_token() -> str:
    """What marks the object of one upload, see :data:`TOKEN`."""
    return secrets.token_hex(16)


def takes_metadata(fs: AbstractFileSystem) -> bool:
    """Whether uploads can be marked, as far as is known."""
    return not getattr(fs, "_refuses_metadata", False)


def leave_unmarked(fs: AbstractFileSystem, reason: BaseException) -> None:
    """Remembers that the store has refused an upload with metadata, and has begun the same one without."""
    if takes_metadata(fs):
        fs.__dict__["_refuses_metadata"] = True
        log.info(
            f"A store of {type(fs).__name__} takes no metadata ({display(str(reason))}): if the answer to the last"
            " request of an upload is lost, nothing will tell whether that was committed."
        )


def note_unknown_outcome(error: BaseException) -> None:
    """Keeps with an error that the object may have been committed all the same: its message must not deny that."""
    error.__dict__["_unknown_outcome"] = True


def has_unknown_outcome(error: BaseException) -> bool:
    """Whether :func:`note_unknown_outcome` was called for it."""
    return bool(getattr(error, "_unknown_outcome", False))


def warn_of_unfinished(path: str, reason: BaseException | None = None) -> None:
    """Tells that an upload could not be aborted."""
    because = f" ({display(f'{type(reason).__name__}: {reason}')})" if reason is not None else ""
    log.warning(
        f"Could not abort the unfinished upload of {path!r}{because}. The store may keep and bill the parts uploaded so"
        " far until a lifecycle rule of the bucket removes them."
    )
