"""Reports of saves, stage by stage, and of transfers of one file: seconds, bytes and retries.

Whoever saves makes a :class:`SaveReport` the current one with :func:`reporting`, and what is called from there adds to
it. Where no report is the current one, nothing is recorded.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from lightning.fabric.storage.paths.place import Place
from lightning.fabric.utilities.rank_zero import rank_zero_only

log = logging.getLogger(__name__)

_MIB = 2**20
#: The stages in which bytes move to where they are durable.
_MOVING = ("upload", "commit")
#: Seconds of a save, beside training or not, from which on its line is logged as info.
_LONG_S = 1.0


class _File(Protocol):
    """A file that is being written."""

    #: Bytes that are known to come, as far as is known by now.
    announced: int

    def tell(self) -> int: ...


@dataclass(eq=False)
class SaveReport:
    """The seconds, bytes and retries of one save.

    Args:
        place: The place of the checkpoint.
        size: Bytes that this process has written, and on rank zero those of the other ranks of a sharded save.
        stages: Seconds in the training thread: ``wait`` for what is in the background, ``stage`` for the copy to host
            memory that it needs. Of a synchronous save: ``plan``, in which ranks agree who saves what; ``upload``; and
            ``commit`` from the last byte that was handed over until the checkpoint is durable. Of a copy of the last
            checkpoint: ``link``.
        background: Seconds in another thread, likewise.
        retries: Requests of this process that were sent again, as far as the client of the store reports them.
        retries_unknown: A part went through a client that sends requests again without reporting that.
    """

    place: Place
    size: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    background: dict[str, float] = field(default_factory=dict)
    retries: int = 0
    retries_unknown: bool = False
    _files: "list[_File]" = field(default_factory=list, repr=False)

    @property
    def stalled(self) -> float:
        """Seconds for which training waited."""
        return sum(self.stages.values())

    @property
    def seconds_in_background(self) -> float:
        """Seconds of work beside training."""
        return sum(self.background.values())

    def progress(self) -> tuple[int, int]:
        """Returns the bytes that have been written, and those of the whole save as far as is known by now."""
        with _lock:
            written = [file.tell() for file in self._files]
            expected = [max(file.announced, done) for file, done in zip(self._files, written, strict=True)]
            return self.size + sum(written), self.size + sum(expected)

    def line(self) -> str:
        """Returns the save in one line, without credentials, and without counts of zero."""
        moving = sum(seconds.get(stage, 0.0) for seconds in (self.stages, self.background) for stage in _MOVING)
        parts = [f"{self.size / _MIB:.1f} MiB", f"training stalled for {self.stalled:.2f} s"]
        if self.background:
            parts.append(f"{self.seconds_in_background:.2f} s in the background")
        if moving > 0:
            parts.append(f"{self.size / _MIB / moving:.0f} MiB/s")
        if self.retries:
            parts.append(f"{'at least ' if self.retries_unknown else ''}{self.retries} retries")
        return f"Saved {self.place}: {', '.join(parts)}"


class Listener(Protocol):
    """An observer of the saves of this process, called in the training thread."""

    def begin(self, report: SaveReport, name: str) -> None:
        """Handles the begin of a stage. One within another begins while that goes on."""

    def end(self, report: SaveReport, name: str) -> None:
        """Handles the end of a stage, or its failure."""

    def finished(self, report: SaveReport) -> AbstractContextManager[None]:
        """Handles a save that is complete and durable. Its line is logged within the context that this returns."""


@dataclass
class _Current:
    report: SaveReport
    background: bool
    #: Seconds that stages within each stage that goes on have taken, outermost first.
    inner: list[float] = field(default_factory=list)


# A context variable, since an event loop runs a call in the context of the thread that asked for it, and retries there.
_current: ContextVar[_Current | None] = ContextVar("current_save_report", default=None)
_listeners: list[Listener] = []
_in_flight: list[SaveReport] = []
_lock = threading.Lock()


@contextmanager
def reporting(report: SaveReport, background: bool = False) -> Iterator[None]:
    """Makes ``report`` the current one of the body; within another one's, the inner one counts.

    Args:
        report: The report. It can be the current one of several threads, but of one that is not in the background.
        background: The body runs beside training.
    """
    token = _current.set(_Current(report, background))
    _in_flight.append(report)
    try:
        yield
    finally:
        _in_flight.remove(report)
        _current.reset(token)


@contextmanager
def reported(place: Place) -> Iterator[None]:
    """Reports the body, which saves at ``place``, as a save of its own, unless a report is the current one already."""
    if _current.get() is not None:
        yield
        return
    report = SaveReport(place)
    with reporting(report):
        yield
    finished(report)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Adds the seconds of the body, without those of stages in it, to the current report.

    Listeners are notified of stages in the training thread.
    """
    current = _current.get()
    if current is None:
        yield
        return
    seconds = current.report.background if current.background else current.report.stages
    listeners = [] if current.background else list(_listeners)
    for listener in listeners:
        listener.begin(current.report, name)
    current.inner.append(0.0)
    started = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - started
        seconds[name] = seconds.get(name, 0.0) + took - current.inner.pop()
        if current.inner:
            current.inner[-1] += took
        for listener in listeners:
            listener.end(current.report, name)


@contextmanager
def stages(first: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that enters the stage of a name, and ends the one before; see :func:`stage`."""
    with ExitStack() as going_on:

        def enter(name: str) -> None:
            going_on.close()
            going_on.enter_context(stage(name))

        enter(first)
        yield enter


@contextmanager
def writing(file: _File) -> Iterator[None]:
    """Counts the bytes of ``file``, which the body writes, in the current report."""
    current = _current.get()
    if current is None:
        yield
        return
    report = current.report
    with _lock:
        report._files.append(file)
    try:
        yield
    finally:
        with _lock:
            report._files.remove(file)
            report.size += file.tell()


def count_bytes(size: int) -> None:
    """Adds ``size`` bytes, which another process has written, to the current report."""
    if (current := _current.get()) is not None:
        with _lock:
            current.report.size += size


def count_retry(times: int = 1) -> None:
    """Adds a request that was sent again, or is going to be, to the current report."""
    if (current := _current.get()) is not None:
        with _lock:
            current.report.retries += times


def note_unknown_retries() -> None:
    """Notes in the current report that a client is at work which sends requests again without reporting that."""
    if (current := _current.get()) is not None:
        current.report.retries_unknown = True


def listen(listener: Listener) -> Callable[[], None]:
    """Notifies ``listener`` of all saves of this process. Returns a function that ends that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


def in_flight() -> list[SaveReport]:
    """Returns the reports that are a thread's current one, each once."""
    return list(dict.fromkeys(_in_flight))


def finished(report: SaveReport) -> None:
    """Notifies listeners of a save that is durable, and logs it on rank zero. Call it in the training thread, once."""
    took = report.stalled + report.seconds_in_background
    with ExitStack() as contexts:
        for listener in list(_listeners):
            contexts.enter_context(listener.finished(report))
        _log(logging.INFO if took >= _LONG_S else logging.DEBUG, report.line())


@rank_zero_only
def _log(level: int, line: str) -> None:
    log.log(level, line)


@dataclass
class Transfer:
    """The transfer of a file.

    Args:
        verb: The action, in the past tense.
        place: The place of the file.
        size: Its bytes, when that is known.
        seconds: The time from the first byte that was asked for to the last that was committed or unpickled.
    """

    verb: str
    place: Place
    size: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        size, rate = self.size / _MIB, self.size / _MIB / max(self.seconds, 1e-9)
        return f"{self.verb} {self.place}: {size:.1f} MiB in {self.seconds:.2f} s, {rate:.0f} MiB/s"


@contextmanager
def timed(verb: str, place: Place) -> Iterator[Transfer]:
    """Logs what a body that moves a file took, if it succeeds; the body sets the size."""
    transfer = Transfer(verb, place)
    started = time.monotonic()
    yield transfer
    transfer.seconds = time.monotonic() - started
    log.debug(str(transfer))
