"""The data plane: moves the bytes of one file into a store, or nothing at all, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from lightning.fabric.storage.location import Location, display
from lightning.fabric.storage.transport import fsspec, local

_KINDS = (
    PermissionError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    TimeoutError,
    ConnectionError,
)


@contextmanager
def open_writer(location: Location, streaming: bool = False) -> Iterator[IO[bytes]]:
    """A file to write to, which becomes the file at ``location`` when the context ends without an exception.

    Whatever happens before that, ``KeyboardInterrupt`` included, leaves the previous file as it was.

    Args:
        location: Where the file is to be. Missing folders are made.
        streaming: Send the bytes as they come, one part after the other, in bounded memory. By default they are
            collected and sent at the end with many parts at a time, which is faster.

    Raises:
        OSError: On leaving the context, if the file could not be written or committed. The message names the file and
            the reason, and the type is the reason's where that is a common kind of ``OSError``.
    """
    backend = local.open_writer(location) if isinstance(location, Path) else fsspec.open_writer(location, streaming)
    sink = callers = None
    try:
        with backend as sink:
            try:
                yield cast(IO[bytes], sink)
            except Exception as error:
                if sink.error is None:  # an object that cannot be pickled, say
                    callers = error
                raise
    except Exception as error:
        if error is callers or (sink is None and isinstance(error, (ImportError, ValueError))):
            raise  # an unknown protocol, or a client library that is not installed: fsspec says what to do
        raise _failure(location, (sink and sink.error) or error) from error


def open_reader(location: Location) -> IO[bytes]:
    """The file at ``location``, to read from and seek in.

    Raises:
        FileNotFoundError: There is no such file.
    """
    return open(location, "rb") if isinstance(location, Path) else fsspec.open_reader(location)


def _failure(location: Location, cause: Exception) -> OSError:
    kind: type[OSError] = next((kind for kind in _KINDS if isinstance(cause, kind)), OSError)
    reason = display(str(cause)).rstrip(".")
    if kind is OSError or not reason:
        reason = f"{type(cause).__name__}: {reason}"
    failure = kind(f"Could not write {display(location)}: {reason}. What was there before, if anything, is unchanged.")
    failure.errno = getattr(cause, "errno", None)
    return failure
