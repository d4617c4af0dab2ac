"""The protocol of uploads, each of one file to a store."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, ClassVar

#: No single write is larger: HDFS refuses one above 2 GB, and its client dies of one above 1 GB.
LARGEST_PIECE = 16 * 2**20


class Handover(Enum):
    """Memory in which a backend gets the bytes of a file."""

    #: Views that are valid during the call. None crosses a multiple of the part size.
    BORROWED = auto()
    #: Views that stay valid and unchanged until the upload has ended. What is large and in host memory is not copied.
    LASTING = auto()
    #: A ``bytearray`` that nobody else has, of exactly one part; the last one may be shorter.
    WHOLE_PARTS = auto()


class UploadBackend(ABC):
    """The upload of one file to a store, driven by a :class:`~lightning.fabric.storage.transport.sink.Sink`.

    The calls are ``begin``, ``write_part`` as often as it takes, and ``commit``. Instead of any of them, or when one
    has raised, comes ``abort``. Nothing may be seen under the file's name before ``commit``, and all of it after that;
    an error of ``commit`` that may have come after the fact is marked by
    :func:`~lightning.fabric.storage.transport.multipart.note_unknown_outcome`. All calls are made by one thread, which
    can be interrupted anywhere. The constructor, which takes a file system and a path in it, asks the store nothing; it
    may raise an ``ImportError``.
    """

    handover: ClassVar[Handover] = Handover.BORROWED

    @abstractmethod
    def begin(self, size: int, idle: Callable[[], None]) -> int:
        """Prepares the upload; nothing that can be seen under the file's name.

        Args:
            size: Bytes that are going to be written, as far as is known.
            idle: To be called now and then in a long wait. It may raise an error, which ends the upload.

        Returns:
            The size of the parts in bytes.
        """

    @abstractmethod
    def write_part(self, part: memoryview | bytearray) -> None:
        """Takes the next bytes, in memory as by :attr:`handover`."""

    @abstractmethod
    def commit(self) -> None:
        """Makes what was written the file, at once. There may have been no part."""

    @abstractmethod
    def abort(self) -> None:
        """Takes the upload back, also one of which ``begin`` or ``commit`` was interrupted.

        A failure to do so is logged: the caller has an error of its own.
        """


def write_all(file: Any, data: memoryview | bytes | bytearray) -> None:
    """Writes all of ``data`` to a file of which a single ``write`` may take less."""
    while len(data):
        written = file.write(data)
        data = data[len(data) if written is None else written :]
