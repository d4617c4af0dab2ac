"""Objects of S3, GCS and Azure through obstore, whose engine moves many parts at a time and holds the GIL for none."""

import concurrent.futures
import logging
import queue
import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fsspec import AbstractFileSystem
from typing_extensions import override

from lightning.fabric.storage.transport import multipart, progress
from lightning.fabric.storage.transport.backends.obstore_config import leave_to_client
from lightning.fabric.storage.transport.backends.obstore_errors import is_unsupported, may_be_for_metadata, translated
from lightning.fabric.storage.transport.sink import GivenUp, uploading
from lightning.fabric.storage.transport.threads import awaited, in_thread
from lightning.fabric.storage.transport.upload import Handover, UploadBackend

if TYPE_CHECKING:
    from obstore import WritableFile
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

#: Uploads that an interrupted save has not waited for to the end.
_left_alone: dict[str, concurrent.futures.Future[None]] = {}

#: Seconds that an interrupted save waits for its upload to end before it logs that, and then at most.
_PATIENCE_S = 2
_LONGEST_WAIT_S = 60
#: Seconds after which a thread that waits for room looks whether the upload goes on at all.
_POLL_S = 0.1
#: Messages of the system about a request that did not reach a server.
_NEVER_SENT = "Connection refused|failed to lookup"
#: Names of the stores, by obstore's classes.
_STORES = {"S3Store": "S3", "GCSStore": "GCS", "AzureStore": "Azure"}


class ObstoreUpload(UploadBackend):
    """Hands pieces to obstore in a thread of its own, for its calls cannot be interrupted, and the training thread can.

    obstore cuts the pieces into parts without a copy, and keeps those in flight alive. It commits the object when it is
    closed, and takes the upload back if its context ends with an exception.

    Args:
        fs: The file system that the store stands for.
        path: The object's path there.
        store: The bucket.
        name: The object's name in it.
        parts: Its parts.
        client: Makes the upload by the client of the file system, for a store that does not know what obstore asks for.
        disposable: Nobody will look for the object if the upload fails: then one that cannot be stopped is left alone.
    """

    handover = Handover.LASTING

    def __init__(
        self,
        fs: AbstractFileSystem,
        path: str,
        store: "ObjectStore",
        name: str,
        parts: multipart.Parts,
        client: Callable[[], UploadBackend],
        disposable: bool,
    ) -> None:
        self._fs = fs
        self._path = path
        self._store = store
        self._name = name
        self._parts = parts
        self._client = client
        self._disposable = disposable
        self._pieces: queue.Queue[memoryview | None] = queue.Queue(maxsize=2)
        self._position = 0
        self._part_size = 0
        self._token = multipart.new_token()
        self._held: list[memoryview] | None = None
        self._is_whole = False
        self._key = f"{type(store).__name__} {path}"  # of `_left_alone`
        self._given_up = threading.Event()
        self._is_closing = threading.Event()
        self._has_begun = threading.Event()
        self._outcome: concurrent.futures.Future[None] = concurrent.futures.Future()

    @override
    def begin(self, size: int, idle: Callable[[], None]) -> int:
        self._wait_for_the_one_before()
        multipart.check_size(_STORES[type(self._store).__name__], size)
        self._size, self._idle = size, idle
        self._part_size = multipart.part_size(size, self._parts.smallest)
        in_thread("checkpoint-upload", self._send, outcome=self._outcome)
        return self._part_size

    @override
    def write_part(self, part: memoryview | bytearray) -> None:
        self._position += len(part)
        multipart.check_count(self._position, self._part_size)
        self._put(memoryview(part))

    @override
    def commit(self) -> None:
        self._put(None)
        awaited(self._outcome, self._name, self._idle)
        self._fs.invalidate_cache(self._path)

    @override
    def abort(self) -> None:
        """Takes the upload back. One that is being committed cannot be stopped, and is waited for, if that matters."""
        self._given_up.set()
        if not self._part_size or concurrent.futures.wait([self._outcome], _PATIENCE_S).done:
            return
        if not self._has_begun.is_set():  # interrupted in the midst of starting it, which was in vain
            return
        _left_alone[self._key] = self._outcome  # also if the wait is interrupted
        self._outcome.add_done_callback(lambda _: _left_alone.pop(self._key, None))
        if self._disposable or not self._is_closing.is_set():
            multipart.warn_of_unfinished(self._name)
            return
        log.warning(f"Waiting until the upload of {self._name!r} has ended. Interrupt again to leave it alone")
        if not concurrent.futures.wait([self._outcome], _LONGEST_WAIT_S).done:
            log.warning(f"The upload of {self._name!r} goes on, and may still replace what is there")

    def _wait_for_the_one_before(self) -> None:
        """Waits for an upload of the same name that was left to itself: it could still replace what comes now.

        There is no limit but those of its requests, which end it in minutes: to go on earlier could lose what comes
        now.
        """
        before = _left_alone.get(self._key)
        if before is not None and not before.done():
            log.warning(f"Waiting until an interrupted upload of {self._name!r} has ended")
            concurrent.futures.wait([before])

    def _put(self, piece: memoryview | None) -> None:
        while True:
            if self._outcome.done():
                self._outcome.result()  # raises: it cannot be complete yet
            try:
                self._pieces.put(piece, timeout=_POLL_S)
                return
            except queue.Full:
                self._idle()

    def _send(self) -> None:
        self._has_begun.set()
        self._hold_first_pieces()
        refusal = None
        if not self._is_whole and multipart.takes_metadata(self._fs):
            refusal = self._refusal_of_obstore({multipart.TOKEN: self._token})
            if refusal is None:
                return
        if refusal is None or may_be_for_metadata(refusal):
            again = self._refusal_of_obstore({})
            if again is None:
                if refusal is not None:
                    multipart.leave_unmarked(self._fs, refusal)
                return
            refusal = again
        if not is_unsupported(refusal):
            raise refusal
        self._send_by_client(refusal)

    def _refusal_of_obstore(self, mark: dict[str, str]) -> Exception | None:
        """Sends all, or returns the reason why the store did not take the first request: nothing is lost yet then."""
        try:
            self._send_by_obstore(mark)
        except Exception as error:
            if self._held is not None and not isinstance(error, GivenUp):
                return error
            if is_unsupported(error):
                leave_to_client(self._fs, self._path, error)
                error.args = (f"{error}. The next save there goes through fsspec and not through obstore",)
            raise
        return None

    def _hold_first_pieces(self) -> None:
        """Keeps the pieces of the first request, or all: if the store refuses that one, nothing is lost."""
        held: list[memoryview] = []
        size = 0
        while size < self._part_size and (piece := self._next()) is not None:
            held.append(piece)
            size += len(piece)
        self._held, self._is_whole = held, size < self._part_size

    def _send_by_obstore(self, mark: dict[str, str]) -> None:
        import obstore

        failure = None
        try:
            with obstore.open_writer(
                self._store,
                self._name,
                attributes=mark or None,
                buffer_size=self._part_size,
                max_concurrency=self._parts.in_flight(self._part_size),
            ) as writer:
                try:
                    self._write_all(writer)
                except Exception as error:
                    failure = error
                    raise
                self._is_closing.set()
        except Exception as error:
            reason = translated(error)
            if self._is_in_doubt(reason):
                # perhaps an attempt succeeded whose answer was lost: then there is no such upload any more
                if not isinstance(reason, ConnectionError) and mark and self._is_committed():
                    return
                multipart.note_unknown_outcome(reason)
            if failure not in (None, error) or "performing DELETE" in str(reason):
                # the attempt to take the upload back has failed, too, and obstore raises that alone
                multipart.warn_of_unfinished(self._name, reason)
            raise (reason if failure is None else translated(failure)) from error

    def _send_by_client(self, reason: Exception) -> None:
        with uploading(self._client(), self._check_given_up) as sink:
            sink.expect(self._size)
            for piece in self._all_pieces():
                sink.write(piece)
            self._is_closing.set()
        leave_to_client(self._fs, self._path, reason)

    def _is_in_doubt(self, reason: Exception) -> bool:
        """Returns whether the request that commits the object may have done so, and failed all the same."""
        text = str(reason)
        if not self._is_closing.is_set() or re.search(_NEVER_SENT, text):
            return False
        if self._is_whole:  # one request in all
            return isinstance(reason, ConnectionError)
        if "performing DELETE" in text:  # to take the upload back, after a failure that obstore does not raise
            return True
        commits = "performing POST" in text and "uploadId=" in text
        unclear = type(reason) is OSError and "status code" not in text
        return (commits and isinstance(reason, (ConnectionError, FileNotFoundError))) or unclear

    def _is_committed(self) -> bool:
        import obstore

        try:
            found = obstore.get(self._store, self._name, options={"head": True})
        except FileNotFoundError:
            return False
        return found.attributes.get(multipart.TOKEN) == self._token

    def _write_all(self, writer: "WritableFile") -> None:
        for piece in self._all_pieces():
            self._check_given_up()  # which ends obstore's context, and that the upload
            writer.write(piece)
            progress.made()

    def _all_pieces(self) -> Iterator[memoryview]:
        assert self._held is not None
        yield from self._held
        if not self._is_whole:
            self._held = None
            while (piece := self._next()) is not None:
                yield piece

    def _check_given_up(self) -> None:
        if self._given_up.is_set():
            raise GivenUp

    def _next(self) -> memoryview | None:
        while not self._given_up.is_set():
            try:
                return self._pieces.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        raise GivenUp
