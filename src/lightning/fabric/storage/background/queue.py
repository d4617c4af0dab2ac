"""A queue of saves and removals, which a thread does one after the other."""

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from lightning.fabric.storage import save_report
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.save_report import SaveReport

log = logging.getLogger(__name__)

OnError = Literal["raise", "warn"]

#: The queues of this process in which something is in flight, or has ended and is not settled. The plugin that made one
#: may be gone by then.
busy: "set[Queue]" = set()


class _OfThread(threading.local):
    """Settings of a thread for what it submits, and the lists that collect that."""

    lists: tuple[list["Save"], ...] = ()
    removes_unconditionally = False
    may_skip = True


_of_thread = _OfThread()

if hasattr(os, "register_at_fork"):  # not on Windows
    # the parent goes on with what is in flight: a child that waited for it, such as a data loader's, would never end
    os.register_at_fork(after_in_child=busy.clear)


class Save:
    """A save in the background.

    Attributes:
        place: The place to save to.
        report: The report of its stages.
        error: The reason why it failed, if it has.
        skipped: Whether it was not begun, since as many saves were in flight as may be.
        was_given_up: Whether nobody waits for it any more.
        done: Whether it has come to its end, whatever that is.
        number: The number of a save by all ranks, which is the same on all of them and grows; 0 for one by this rank.
    """

    verb = "saved"
    is_conditional = False
    leaves_something = True

    def __init__(self, place: Place, number: int = 0) -> None:
        self.place = place
        self.number = number
        self.report = SaveReport(place)
        self.error: BaseException | None = None
        self.skipped = False
        self.was_given_up = False
        self.done = False
        self._callbacks: list[Callable[[Save], None]] = []

    @property
    def succeeded(self) -> bool:
        """Returns whether the checkpoint is durable."""
        return self.done and self.error is None and not self.skipped and not self.was_given_up

    def when_settled(self, callback: "Callable[[Save], None]") -> None:
        """Registers what the thread that settles calls after the end of this save."""
        self._callbacks.append(callback)

    def settle(self) -> None:
        """Reports the end of this save to the listeners, and calls the callbacks."""
        if self.succeeded:
            save_report.finished(self.report)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class _FollowUp:
    """A removal, or a copy of the save before it. It is dropped if that save fails.

    Args:
        place: The place where something is removed or made.
        verb: Its name in messages, such as "removed".
        leaves_something: Whether there is something at the place when it is done.
    """

    number = 0

    def __init__(self, place: Place, verb: str, leaves_something: bool) -> None:
        self.place = place
        self.verb = verb
        self.leaves_something = leaves_something
        self.error: BaseException | None = None
        self.is_conditional = not _of_thread.removes_unconditionally


#: A job, the function that does it, and one that is called afterwards, or when the job is given up before it has begun.
_Job = tuple[Save | _FollowUp, Callable[[], None], Callable[[], None]]


def _do_nothing() -> None:
    pass


class Queue:
    """Saves and removals in the order in which they were submitted, in a thread that lives as long as there are any.

    A removal is for a checkpoint that an earlier save replaces. If the last save before it has failed, or was skipped,
    it is dropped, until that has been settled.

    Args:
        max_in_flight: The number of saves that may be in flight at a time.
        on_error: Whether :func:`settle` raises the error of a save, or logs a warning and lets training go on.
    """

    def __init__(self, max_in_flight: int, on_error: OnError) -> None:
        self._max_in_flight = max_in_flight
        self._on_error = on_error
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()  # the first is being done
        self._doing: Save | _FollowUp | None = None  # also if it was given up
        self._ended: deque[Save | _FollowUp] = deque()
        self._last_failed = False
        self._thread: threading.Thread | None = None

    @property
    def has_room(self) -> bool:
        """Returns whether a save can be submitted now."""
        with self._changed:
            jobs = {self._doing, *(job for job, *_ in self._jobs)}
            return sum(isinstance(job, Save) for job in jobs) < self._max_in_flight

    def wait_for_room(self, place: Place) -> None:
        """Waits until a save to ``place`` can be submitted: there is room, and none to the same place before it."""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room and not self._saves_to(place))

    def _saves_to(self, place: Place) -> bool:
        return any(isinstance(job, Save) and job.place == place for job, *_ in self._jobs)

    def submit(self, save: Save, work: Callable[[], None], release: Callable[[], None] = _do_nothing) -> None:
        """Appends a save.

        Args:
            save: The save.
            work: Saves.
            release: Called in any case in the end, to let go of what is saved.

        Raises:
            RuntimeError: No thread can be started.
        """

        def work_with_report() -> None:
            with save_report.reporting(save.report, background=True):
                work()

        self._append(save, work_with_report, release)
        _submitted(save)

    def skip(self, save: Save) -> None:
        """Appends a save that is not to be done."""
        log.info(f"{save.place} is not saved, for an earlier save is still in flight")
        save.skipped = True
        _submitted(save)
        self._append(save, _do_nothing)

    def submit_removal(self, place: Place, work: Callable[[], None], is_partial: bool = False) -> None:
        """Appends a removal, which is dropped if the save before it fails.

        Args:
            place: The place of what is removed.
            work: Removes it.
            is_partial: Whether what was saved there stays.
        """
        self._append(_FollowUp(place, "removed", is_partial), work)

    def submit_copy(self, place: Place, work: Callable[[], None]) -> None:
        """Appends a copy of the last save to ``place``, which is dropped if that save fails."""
        self._append(_FollowUp(place, "copied", leaves_something=True), work)

    def _append(
        self, job: Save | _FollowUp, work: Callable[[], None], release: Callable[[], None] = _do_nothing
    ) -> None:
        busy.add(self)
        with self._changed:
            self._jobs.append((job, work, release))
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # nobody would ever do it
                self._thread = None
                self._jobs.pop()
                release()
                raise

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                job, work, release = self._jobs[0]
                self._doing = job
            if not (job.is_conditional and self._last_failed):
                try:
                    try:
                        work()
                    finally:
                        release()
                except BaseException as error:
                    job.error = error
            else:
                log.info(f"{job.place} is kept, for the checkpoint after it was not saved")
            del work, release  # and what they hold
            self._end(job)

    def _end(self, job: Save | _FollowUp) -> None:
        with self._changed:
            self._doing = None
            if isinstance(job, Save):
                self._last_failed = job.error is not None or job.skipped
                job.done = True
            if self._jobs and self._jobs[0][0] is job:  # else it was given up
                self._jobs.popleft()
                self._ended.append(job)
            self._changed.notify_all()

    def will_exist(self, place: Place) -> bool | None:
        """Returns whether the last job at ``place`` leaves something there; None if there is no such job."""
        with self._changed:
            return next((job.leaves_something for job, *_ in reversed(self._jobs) if job.place == place), None)

    def wait(self) -> None:
        """Waits until everything is done. The reports of the saves that are waited for have the time of that.

        Raises:
            RuntimeError: A job of this queue waits for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "A checkpoint cannot be loaded through AsyncCheckpointIO while it saves one in the same thread: use the"
                " plugin that it was made with."
            )
        with self._changed:
            saves = [job for job, *_ in self._jobs if isinstance(job, Save)]
        for save in saves:
            with save_report.reporting(save.report), save_report.stage("wait"), self._changed:
                self._changed.wait_for(lambda save=save: save.done or not self._jobs)  # type: ignore[misc]
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """Waits until everything is done, from any thread, and reports nothing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    def give_up(self) -> list[Save]:
        """Forgets what is not done, and returns the saves among it, which count as failed."""
        with self._changed:
            saves = [job for job, *_ in self._jobs if isinstance(job, Save)]
            for job, _, release in self._jobs:
                if job is not self._doing:
                    release()
            self._jobs.clear()
            for save in saves:
                save.was_given_up = save.done = True
            if not self._ended:
                busy.discard(self)
            self._changed.notify_all()
        return saves

    @property
    def news(self) -> list[int]:
        """Returns the numbers of saves that :meth:`settle` would report, and 0 for a removal that has failed."""
        with self._changed:
            return [job.number for job in self._ended if isinstance(job, Save) or job.error is not None]

    def wait_for_number(self, number: int) -> None:
        """Waits for the saves by all ranks up to that number."""
        with self._changed:
            self._changed.wait_for(lambda: not any(0 < job.number <= number for job, *_ in self._jobs))

    def settle(self, up_to: float = math.inf) -> list[BaseException]:
        """Reports what has ended since the last call, and returns the errors that are to be raised.

        Args:
            up_to: The number of the last save by all ranks to report.
        """
        errors: list[BaseException] = []
        while self._ended and self._ended[0].number <= up_to:
            job = self._ended.popleft()
            if isinstance(job, Save):
                try:
                    job.settle()
                except Exception as error:  # of a logger, say; the other reports must not get lost
                    errors.append(error)
            if job.error is None:
                continue
            if self._on_error == "raise" or not isinstance(job.error, Exception):
                errors.append(job.error)
            else:
                reason = f"{type(job.error).__name__}: {redact(str(job.error), job.place.raw)}"
                log.warning(f"The checkpoint {job.place} was not {job.verb} ({reason})")
        with self._changed:
            if not self._jobs and not self._ended:
                self._last_failed = False
                busy.discard(self)
        return errors


def _submitted(save: Save) -> None:
    for saves in _of_thread.lists:
        saves.append(save)


@contextmanager
def _thread_with(name: str, value: Any) -> Iterator[None]:
    before = getattr(_of_thread, name)
    setattr(_of_thread, name, value)
    try:
        yield
    finally:
        setattr(_of_thread, name, before)


@contextmanager
def watching() -> Iterator[list[Save]]:
    """Yields a list of the saves that this thread submits in the body."""
    saves: list[Save] = []
    with _thread_with("lists", (*_of_thread.lists, saves)):
        yield saves


def unconditionally() -> AbstractContextManager[None]:
    """Makes removals that the body submits independent of the saves before them."""
    return _thread_with("removes_unconditionally", True)


def without_skipping() -> AbstractContextManager[None]:
    """Makes saves of the body wait for room, also where the user has early ones skipped."""
    return _thread_with("may_skip", False)


def may_skip() -> bool:
    """Returns whether a save of this thread may be skipped."""
    return _of_thread.may_skip
