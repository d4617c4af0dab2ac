"""Logs that grow on this machine while a store has copies of them, which follow at a bounded rate.

An object cannot be appended to: each copy is an upload of its own, of the whole. So files of events go in segments,
which TensorBoard reads one after the other, and any other file goes less often the larger it is.
"""

import atexit
import logging
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.growing_files import Events, WholeFile, holds_events
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport.open import open_writer

log = logging.getLogger(__name__)

#: Seconds that new content may wait.
INTERVAL_S = 30.0
#: The mirrors that are to be ended before the interpreter is.
_running: "set[_Copies]" = set()


class Mirror:
    """A folder of this machine, of whose files a store has copies.

    What is pickled is a mirror of the same place that begins with the files of this one, except for events.

    Args:
        place: The URL of the folder's copy.
        contents: Files that are there already, by name.

    Attributes:
        folder: The folder to write to. It is removed when the mirror is no longer used and all is copied.
    """

    def __init__(self, place: Place, contents: dict[str, bytes] | None = None) -> None:
        self._copies = _Copies(place)
        self.folder = self._copies.folder
        #: Held while a file is changed that must not be copied halfway.
        self.changing = self._copies.changing
        for name, content in (contents or {}).items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        weakref.finalize(self, self._copies.end).atexit = False

    def follow(self, writer: Any) -> None:
        """Copies what ``writer`` writes, every half a minute, also if nobody flushes it, as in a loop of one's own.

        Args:
            writer: A writer to the folder. Its method ``write_out`` is called when the interpreter ends.
        """
        self._copies.writer = weakref.ref(writer)
        self._copies.follow()

    def flush(self) -> None:
        """Copies what is new, in half a minute; a file above 120 KiB that holds no events, at 4 KiB a second.

        Raises:
            OSError: It is the first time, when all is copied before this returns, and that failed. Later on, a failure
                is a warning in the log, and copying is tried again.
        """
        self._copies.follow()
        self._copies.begin()

    def drain(self) -> None:
        """Copies all that is new before it returns. A failure is a warning in the log, unless it is the first.

        Until the next flush no thread looks for what is new.

        Raises:
            OSError: It is the first time, and copying failed.
        """
        self._copies.rest()

    def lacks(self, name: str) -> bool:
        """Returns whether the copy has no such file. It is asked once: the caller is expected to write one then.

        Raises:
            OSError: The store did not answer.
        """
        if name in self._copies.known:
            return False
        missing = not (self._copies.place / name).is_file()
        self._copies.known.add(name)
        return missing

    def __reduce__(self) -> tuple[Any, ...]:
        self._copies.send_or_log()  # else it would be sent later, over what the other one has sent
        contents = {name: path.read_bytes() for name, path in self._copies.found() if not holds_events(name)}
        return Mirror, (self._copies.place, contents)


class _Copies:
    """The state that a mirror shares with its thread, which goes on without it to the end."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.folder = Path(tempfile.mkdtemp(prefix="lightning-logs-"))
        self.changing = threading.RLock()
        self.known: set[str] = set()
        self.writer: Callable[[], Any] = lambda: None
        self._files: dict[str, Events | WholeFile] = {}
        self._process = os.getpid()
        self._has_begun = False
        self._sending = threading.RLock()  # a signal may come before its handler can know
        self._sender: int | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()  # of that thread
        self._reason = ""  # of the failures in a row
        #: The states of the files when all was copied and the thread was let go.
        self._copied: dict[str, tuple[int, int]] = {}

    def found(self) -> Iterator[tuple[str, Path]]:
        """Yields the files, in the order in which TensorBoard reads them."""
        for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
            yield path.relative_to(self.folder).as_posix(), path

    def begin(self) -> bool:
        """Copies everything, unless that was done before."""
        if self._has_begun and self._process == os.getpid():
            return False
        self._has_begun, self._process = True, os.getpid()
        _running.add(self)
        try:
            self._send(everything=True)
        except Exception as error:
            self._reason = _reason(error)
            raise
        return True

    def follow(self) -> None:
        """Starts the thread, unless it is there."""
        if self._thread is None or self._process != os.getpid():  # threads do not survive a fork
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._follow, args=(self._stop,), name="lightning-logs", daemon=True)
            self._thread.start()
            _running.add(self)

    def rest(self) -> None:
        """Copies everything, and lets the thread end; not if that failed, for the thread tries again."""
        found = self._states()
        if self.begin() or self.send_or_log():
            self._copied = found
            self._thread = None
            self._stop.set()  # and no more: in the handler of a signal it could wait for this thread
        else:
            self.follow()

    def _follow(self, stop: threading.Event) -> None:
        while not stop.wait(INTERVAL_S):
            self.send_or_log(everything=False)
        if self._thread is threading.current_thread():
            self._finish()

    def _finish(self) -> None:
        if self.send_or_log():
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            log.warning(f"What could not be copied stays in {self.folder}")
        _running.discard(self)

    def end(self) -> None:
        """Lets the thread come to its end: this may be called by the collector, amidst anything."""
        if self._process != os.getpid():
            return  # a fork's copy
        if self._thread is not None:
            self._stop.set()
        elif not self._has_begun or self._states() == self._copied:
            shutil.rmtree(self.folder, ignore_errors=True)
            _running.discard(self)
        # else it is finished when the interpreter ends

    def write_out(self) -> None:
        """Writes to the folder what the writer, if there is one, has in memory."""
        if self._process == os.getpid() and (writer := self.writer()) is not None:
            writer.write_out()

    def join(self) -> None:
        """Waits for the end, after :meth:`end`."""
        if self._process == os.getpid():
            if self._thread is not None:
                self._thread.join()
            else:
                self._finish()

    def _states(self) -> dict[str, tuple[int, int]]:
        return {name: (found.st_mtime_ns, found.st_size) for name, path in self.found() for found in [path.stat()]}

    def send_or_log(self, everything: bool = True) -> bool:
        """Returns whether it succeeded. Of failures in a row, the first one is logged, and one at the end."""
        try:
            self._send(everything)
        except Exception as error:
            if everything and self._reason == _reason(error):
                log.warning(f"Logs are still not up to date in {self.place} ({type(error).__name__})")
            elif everything or not self._reason:
                again = "" if everything else f" It is tried again every {INTERVAL_S:.0f} s."
                log.warning(f"Logs are not up to date in {self.place}. {redact(str(error))}{again}")
            self._reason = _reason(error)
            return False
        self._reason = ""
        return True

    def _send(self, everything: bool) -> None:
        if self._sender == threading.get_ident():
            return  # in a handler of a signal that came amidst this
        with self._sending:
            self._sender = threading.get_ident()
            try:
                for name, path in self.found():
                    if name not in self._files:
                        self._files[name] = Events(path) if holds_events(name) else WholeFile(path, self.changing)
                    for suffix, content in self._files[name].uploads(everything):
                        with open_writer(self.place / (name + suffix)) as file:
                            file.write(content)
            finally:
                self._sender = None


def _reason(error: Exception) -> str:
    """Returns the text of an error without the time that a client has tried, which differs each time."""
    return re.sub(r" in \d[\d.]*[^\s\d]*s\b", "", f"{type(error).__name__}: {error}")


def _end_all() -> None:
    for copies in tuple(_running):
        copies.write_out()
        copies.end()
    for copies in tuple(_running):
        copies.join()


# before the thread pools end, which clients of stores need
getattr(threading, "_register_atexit", atexit.register)(_end_all)
