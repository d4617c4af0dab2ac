"""Work that a waiting thread can turn away from."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_IDLE_S = 0.5
#: How long a crew that is given up waits for its tasks before the log says so.
_PATIENCE_S = 2


def in_thread(name: str, function: Callable[..., _T], *arguments: object) -> "Future[_T]":
    """Calls ``function`` in a thread of its own.

    Its caller can be interrupted while it waits for the result. obstore's calls cannot be, and last minutes where a
    store does not answer. For that reason it is no executor's thread either: the interpreter waits for those when it
    ends.
    """
    future: Future[_T] = Future()
    start(name, future, function, *arguments)
    return future


def start(name: str, future: "Future[_T]", function: Callable[..., _T], *arguments: object) -> None:
    """As :func:`in_thread`, for a caller that has the outcome also if it is interrupted here."""

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()


def wait_until_done(outcome: "Future[_T]", idle: Callable[[], None], timeout: float = math.inf) -> None:
    """Waits until there is an outcome, or ``timeout`` seconds have passed, and calls ``idle`` twice a second."""
    end = time.monotonic() + timeout
    while not wait([outcome], min(_IDLE_S, max(0.0, end - time.monotonic()))).done and time.monotonic() < end:
        idle()


class Task(Protocol):
    """What a :class:`TaskPool` does."""

    #: Bytes of memory that it takes.
    cost: int

    def run(self) -> None:
        """The part that is done in a thread."""

    def finish(self) -> int:
        """The part that is done after that in the thread that waits. Returns how many bytes of memory it let go."""


class TaskPool:
    """Does tasks in threads, a few at a time.

    Args:
        name: Of the threads.
        most_tasks: How many to have going, or done and not finished, at a time.
        most_bytes: What these take at most in all. A task that costs more has to wait until it is alone.
    """

    def __init__(self, name: str, most_tasks: int, most_bytes: int) -> None:
        self._name = name
        self._most_tasks = most_tasks
        self._most_bytes = most_bytes
        self._bytes = 0
        self._pending: dict[Future[None], Task] = {}
        self._running = 0
        self._given_up = False
        self._changed = threading.Condition()

    @property
    def is_idle(self) -> bool:
        """Whether no task is running."""
        return self._running == 0

    def run(self, tasks: Iterable[Task]) -> None:
        """Returns when all are finished.

        Raises:
            BaseException: What a task raised, or an interruption. No task is running any more by then: those that were
                have been waited for, and no other was begun. Only another interruption ends this waiting.
        """
        try:
            for task in tasks:
                while self._pending and not self._has_room_for(task):
                    self._finish_some()
                self._bytes += task.cost
                self._pending[in_thread(self._name, self._work, task)] = task
            while self._pending:
                self._finish_some()
        except BaseException:
            self._give_up()
            raise

    def _has_room_for(self, task: Task) -> bool:
        return len(self._pending) < self._most_tasks and self._bytes + task.cost <= self._most_bytes

    def _finish_some(self) -> None:
        for future in wait(self._pending, return_when=FIRST_COMPLETED).done:
            task = self._pending.pop(future)
            future.result()
            self._bytes -= task.finish()

    def _work(self, task: Task) -> None:
        with self._changed:
            if self._given_up:
                return
            self._running += 1
        try:
            task.run()
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _give_up(self) -> None:
        self._pending.clear()
        with self._changed:
            self._given_up = True
            if not self._changed.wait_for(lambda: self.is_idle, _PATIENCE_S):
                log.warning(f"Waiting for {self._running} requests to end ({self._name})")
                self._changed.wait_for(lambda: self.is_idle)
