"""A queue of saves and removals, which a thread does one after the other."""

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

from lightning.fabric.storage import save_report
from lightning.fabric.storage.background.submissions import FollowUp, Save, submitted
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact

log = logging.getLogger(__name__)

OnError = Literal["raise", "warn"]

#: The queues of this process in which something is in flight, or has ended and is not settled. The plugin that made one
#: may be gone by then.
busy: "set[Queue]" = set()


if hasattr(os, "register_at_fork"):  # not on Windows
    # the parent goes on with what is in flight: a child that waited for it, such as a data loader's, would never end
    os.register_at_fork(after_in_child=busy.clear)


#: A job, the function that does it, and one that is called afterwards, or when the job is given up before it has begun.
_Job = tuple[Save | FollowUp, Callable[[], None], Callable[[], None]]


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
        self._doing: Save | FollowUp | None = None  # also if it was given up
        self._ended: deque[Save | FollowUp] = deque()
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
        submitted(save)

    def skip(self, save: Save) -> None:
        """Appends a save that is not to be done."""
        log.info(f"{save.place} is not saved, for an earlier save is still in flight")
        save.skipped = True
        submitted(save)
        self._append(save, _do_nothing)

    def submit_removal(self, place: Place, work: Callable[[], None], is_partial: bool = False) -> None:
        """Appends a removal, which is dropped if the save before it fails.

        Args:
            place: The place of what is removed.
            work: Removes it.
            is_partial: Whether what was saved there stays.
        """
        self._append(FollowUp(place, "removed", is_partial), work)

    def submit_copy(self, place: Place, work: Callable[[], None]) -> None:
        """Appends a copy of the last save to ``place``, which is dropped if that save fails."""
        self._append(FollowUp(place, "copied", leaves_something=True), work)

    def _append(
        self, job: Save | FollowUp, work: Callable[[], None], release: Callable[[], None] = _do_nothing
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

    def _end(self, job: Save | FollowUp) -> None:
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
