"""Objects of S3, GCS and Azure, whose ranges are read through obstore."""

import concurrent.futures
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lightning.fabric.storage.transport.obstore_errors import translated
from lightning.fabric.storage.transport.reader import REPLACED
from lightning.fabric.storage.transport.stores.common import RETRY_DEADLINE_S
from lightning.fabric.storage.transport.threads import in_thread, wait_until_done

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: How long a store may take before the log says so.
_PATIENCE_WITH_STORES_S = 10
_CHUNK = 2**20


class Source:
    """An object to read ranges of.

    Args:
        store: Its bucket.
        name: Its name.
    """

    parallel = True

    def __init__(self, store: "ObjectStore", name: str) -> None:
        self._store = store
        self._name = name
        try:
            self._version = self._ask()
        except Exception as error:
            raise translated(error) from error
        self.size, etag, _ = self._version
        #: A weak ETag is no condition for ranges, and some stores have none.
        self._etag = None if etag is None or etag.startswith("W/") else etag

    def _ask(self) -> tuple[int, str | None, Any]:
        import obstore

        meta = awaited(in_thread("checkpoint-read", obstore.head, self._store, self._name), self._name)
        return meta["size"], meta["e_tag"], meta["last_modified"]

    def read_into(self, start: int, view: memoryview) -> None:
        """Fills ``view`` with the bytes from ``start`` on.

        Raises:
            OSError: The object has changed since it was opened, or another number of bytes came.
        """
        import obstore

        options: Any = {"range": (start, start + len(view))}
        if self._etag is not None:
            options["if_match"] = self._etag
        target, at = np.frombuffer(view, np.uint8), 0
        try:
            for chunk in obstore.get(self._store, self._name, options=options).stream(min_chunk_size=_CHUNK):
                piece = np.frombuffer(chunk, np.uint8)[: len(target) - at]
                target[at : at + len(piece)] = piece
                at += len(chunk)
        except Exception as error:
            raise translated(error) from error
        if at != len(target):
            raise ConnectionError(f"{at} bytes came instead of {len(target)}")

    def check(self) -> None:
        """Looks whether the object is the one that was opened, unless every request has asked for that version.

        Raises:
            OSError: It is not.
        """
        try:
            replaced = self._etag is None and self._ask() != self._version
        except Exception as error:
            raise translated(error) from error
        if replaced:
            raise OSError(REPLACED)

    def close(self) -> None:
        """Does nothing: the store's connections are those of all its objects."""


def awaited(outcome: concurrent.futures.Future[_T], name: str, idle: Callable[[], None] = lambda: None) -> _T:
    """What a call returns, which may go on for minutes without a word where a store does not answer."""
    wait_until_done(outcome, idle, _PATIENCE_WITH_STORES_S)
    if not outcome.done():
        log.warning(
            f"Still waiting for the store of {name!r} after {_PATIENCE_WITH_STORES_S} s. If it does not answer, is the"
            f" endpoint right? Requests are tried again for up to {RETRY_DEADLINE_S} s"
        )
    wait_until_done(outcome, idle)
    return outcome.result()
