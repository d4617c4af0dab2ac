"""Saves and removals that are done one after the other, in a thread."""

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from lightning.fabric.storage import save_report
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.save_report import SaveReport

log = logging.getLogger(__name__)

OnError = Literal["raise", "warn"]

#: The queues of this process in which something is on its way, or has ended and is not settled: whoever made one may be
#: gone by then.
busy: "set[Queue]" = set()
_of_thread = threading.local()

if hasattr(os, "register_at_fork"):  # not on Windows
    # what is on its way goes on in the parent: a child that waited for it, a data loader's worker say, would never end
    os.register_at_fork(after_in_child=busy.clear)


class Save:
    """A save on its way.

    Attributes:
        place: Where to.
        report: What it takes.
        error: Why it failed, if it has.
        skipped: Whether it was not begun, since an earlier one was still on its way.
        was_given_up: Whether nobody waits for it any more.
        done: Whether it has come to its end, whatever that is.
        number: Of a save by all ranks, which is the same on all of them and grows; 0 for one by this rank alone.
    """

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
        """Whether the checkpoint is durable."""
        return self.done and self.error is None and not self.skipped and not self.was_given_up

    def when_settled(self, callback: "Callable[[Save], None]") -> None:
        """Has ``callback`` called, in the thread that settles, after the end of this save."""
        self._callbacks.append(callback)

    def settle(self) -> None:
        """Tells those who wait for the end of this save."""
        if self.succeeded:
            save_report.finished(self.report)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class _Removal:
    def __init__(self, place: Place, is_partial: bool) -> None:
        self.place = place
        self.is_partial = is_partial
        self.error: BaseException | None = None
        self.is_conditional = not getattr(_of_thread, "removes_unconditionally", False)


class _Copy(_Removal):
    """What makes a copy of the save before it. It is dropped when a removal would be."""


#: What is to be done, how, and what is called afterwards, or when it is given up before it has begun.
_Job = tuple[Save | _Removal, Callable[[], None], Callable[[], None]]


def _do_nothing() -> None:
    pass


class Queue:
    """Saves and removals in the order in which they were submitted, in a thread that lives as long as there are any.

    A removal is for a checkpoint that an earlier save replaces. If the last save before it has failed, or was skipped,
    it is dropped, until that has been settled.

    Args:
        max_in_flight: How many saves may be on their way at a time.
        on_error: Whether :func:`settle` raises what failed, or logs a warning and lets training go on.
    """

    def __init__(self, max_in_flight: int, on_error: OnError) -> None:
        self._max_in_flight = max_in_flight
        self._on_error = on_error
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()  # the first is being done
        self._doing: Save | _Removal | None = None  # also if it was given up
        self._ended: deque[Save | _Removal] = deque()
        self._last_failed = False
        self._is_running = False

    @property
    def has_room(self) -> bool:
        """Whether a save can be submitted now."""
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
        """Has ``work`` done, which saves, and ``release`` in any case, which lets go of what it saves.

        Raises:
            RuntimeError: There can be no more threads.
        """
        self._append(save, lambda: _do_save(save, work), release)
        _submitted(save)

    def skip(self, save: Save) -> None:
        """Remembers a save that is not done."""
        log.info(f"{save.place} is not saved, for an earlier save is still on its way")
        save.skipped = True
        _submitted(save)
        self._append(save, lambda: None)

    def submit_removal(self, place: Place, work: Callable[[], None], is_partial: bool = False) -> None:
        """Has ``work`` done, which removes what is at ``place``, unless the save before it fails.

        Args:
            place: Where.
            work: Removes it.
            is_partial: Whether what was saved there stays.
        """
        self._append(_Removal(place, is_partial), work)

    def submit_copy(self, place: Place, work: Callable[[], None]) -> None:
        """Has ``work`` done, which copies what was saved last to ``place``, unless the save before it fails."""
        self._append(_Copy(place, is_partial=False), work)

    def _append(
        self, job: Save | _Removal, work: Callable[[], None], release: Callable[[], None] = _do_nothing
    ) -> None:
        busy.add(self)
        with self._changed:
            self._jobs.append((job, work, release))
            if self._is_running:
                return
            self._is_running = True
            try:
                threading.Thread(target=self._run, name="checkpoints", daemon=True).start()
            except RuntimeError:  # nobody would ever do it
                self._is_running = False
                self._jobs.pop()
                release()
                raise

    def _run(self) -> None:
        _of_thread.is_of_queue = True
        while True:
            with self._changed:
                if not self._jobs:
                    self._is_running = False
                    return
                job, work, release = self._jobs[0]
                self._doing = job
            if isinstance(job, Save) or not (job.is_conditional and self._last_failed):
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

    def _end(self, job: Save | _Removal) -> None:
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
        """Tells whether the last job that is about ``place`` leaves something there; None if there is no such job."""
        with self._changed:
            for job, *_ in reversed(self._jobs):
                if job.place == place:
                    return isinstance(job, (Save, _Copy)) or job.is_partial
            return None

    def wait(self) -> None:
        """Waits until everything is done. What that takes is in the reports of the saves that are waited for.

        Raises:
            RuntimeError: What is being done waits for itself.
        """
        if getattr(_of_thread, "is_of_queue", False):
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
        """Waits until everything is done, from any thread and untold."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    def give_up(self) -> list[Save]:
        """Forgets what is not done; returns the saves among it, which have failed as far as anybody is told."""
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
        """The numbers of saves of which :meth:`settle` would tell, and 0 for a removal that has failed."""
        with self._changed:
            return [getattr(job, "number", 0) for job in self._ended if isinstance(job, Save) or job.error is not None]

    def wait_for_number(self, number: int) -> None:
        """Waits for the saves by all ranks up to that one."""
        with self._changed:
            self._changed.wait_for(
                lambda: not any(isinstance(job, Save) and 0 < job.number <= number for job, *_ in self._jobs)
            )

    def settle(self, up_to: float = math.inf) -> list[BaseException]:
        """Tells of what has ended since the last call; returns the errors that are to be raised.

        Args:
            up_to: Of the saves by all ranks, the number of the last.
        """
        errors: list[BaseException] = []
        while self._ended and getattr(self._ended[0], "number", 0) <= up_to:
            job = self._ended.popleft()
            if isinstance(job, Save):
                try:
                    job.settle()
                except Exception as error:  # of a logger, say; what else there is to tell must not get lost
                    errors.append(error)
            if job.error is None:
                continue
            if self._on_error == "raise" or not isinstance(job.error, Exception):
                errors.append(job.error)
            else:
                log.warning(_told(job))
        with self._changed:
            if not self._jobs and not self._ended:
                self._last_failed = False
                busy.discard(self)
        return errors


def _told(job: Save | _Removal) -> str:
    verb = "saved" if isinstance(job, Save) else "copied" if isinstance(job, _Copy) else "removed"
    reason = f"{type(job.error).__name__}: {redact(str(job.error), job.place.raw)}"
    return f"The checkpoint {job.place} was not {verb} ({reason})"


def _do_save(save: Save, work: Callable[[], None]) -> None:
    with save_report.reporting(save.report, background=True):
        work()


def _submitted(save: Save) -> None:
    for saves in getattr(_of_thread, "lists", []):
        saves.append(save)


@contextmanager
def watching() -> Iterator[list[Save]]:
    """Collects the saves that this thread submits in the body."""
    lists = _of_thread.lists = getattr(_of_thread, "lists", [])
    saves: list[Save] = []
    lists.append(saves)
    try:
        yield saves
    finally:
        lists.pop()


@contextmanager
def unconditionally() -> Iterator[None]:
    """For a body that submits removals which are to be done whatever becomes of the saves before them."""
    _of_thread.removes_unconditionally = True
    try:
        yield
    finally:
        _of_thread.removes_unconditionally = False


@contextmanager
def without_skipping() -> Iterator[None]:
    """For a body whose saves wait for room, whatever the user says of those that come too early."""
    before = may_skip()
    _of_thread.may_skip = False
    try:
        yield
    finally:
        _of_thread.may_skip = before


def may_skip() -> bool:
    """Whether a save of this thread may be skipped."""
    return getattr(_of_thread, "may_skip", True)
