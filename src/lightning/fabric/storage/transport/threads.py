"""Work in threads and in event loops, from which a waiting thread can be interrupted."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any, Protocol, TypeVar

from fsspec.asyn import AsyncFileSystem

from lightning.fabric.storage.transport import progress, retry

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_IDLE_S = 0.5
#: Seconds that a store may take to answer before that is logged.
_PATIENCE_WITH_STORES_S = 10
#: Seconds to wait until a cancelled call has let go of its connection.
_CANCELLATION_S = 10
#: Seconds that a pool which is given up waits for its tasks before it logs that.
_PATIENCE_S = 2


def in_thread(
    name: str, function: Callable[..., _T], *arguments: object, outcome: "Future[_T] | None" = None
) -> "Future[_T]":
    """Calls ``function`` in a thread of its own.

    Its caller can be interrupted while it waits for the result. obstore's calls cannot be, and last minutes where a
    store does not answer. For that reason it is no executor's thread either: the interpreter waits for those when it
    ends. A caller that must have the outcome also if it is interrupted here brings its own.
    """
    future: Future[_T] = Future() if outcome is None else outcome

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def wait_until_done(outcome: "Future[_T]", idle: Callable[[], None], timeout: float = math.inf) -> None:
    """Waits until there is an outcome, or ``timeout`` seconds have passed, and calls ``idle`` twice a second."""
    end = time.monotonic() + timeout
    while not wait([outcome], min(_IDLE_S, max(0.0, end - time.monotonic()))).done and time.monotonic() < end:
        idle()


def awaited(outcome: "Future[_T]", name: str, idle: Callable[[], None] = lambda: None) -> _T:
    """Returns the result of a request for an object, and logs that a store takes long to answer, perhaps minutes."""
    wait_until_done(outcome, idle, _PATIENCE_WITH_STORES_S)
    if not outcome.done():
        log.warning(
            f"Still waiting for the store of {name!r} after {_PATIENCE_WITH_STORES_S} s. If it does not answer, is the"
            f" endpoint right? Requests are tried again for up to {retry.DEADLINE_S:.0f} s"
        )
    wait_until_done(outcome, idle)
    return outcome.result()


class Call:
    """A call in the loop of a file system.

    fsspec's own way to wait for one lets it go on when the waiting thread is interrupted: it could replace an object
    long after its caller has seen the failure. This one can be cancelled.

    Args:
        fs: The file system.
        call: One of its coroutines.
    """

    def __init__(self, fs: AsyncFileSystem, call: Coroutine[Any, Any, Any]) -> None:
        self._loop: asyncio.AbstractEventLoop = fs.loop
        self._outcome: Future[Any] = Future()
        self._task: asyncio.Task[Any] | None = None
        self._loop.call_soon_threadsafe(self._start, call)

    def _start(self, call: Coroutine[Any, Any, Any]) -> None:
        self._task = self._loop.create_task(call)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._outcome.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self._outcome.set_exception(error)
        else:
            progress.made()
            self._outcome.set_result(task.result())

    def result(self, timeout: float | None = None, idle: Callable[[], None] | None = None) -> Any:
        """Returns the result of the call.

        Args:
            timeout: Seconds to wait for it.
            idle: Called meanwhile, if there is no timeout. An error of it ends the wait.

        Raises:
            concurrent.futures.TimeoutError: There is no outcome after ``timeout`` seconds.
        """
        if idle is not None:
            wait_until_done(self._outcome, idle)
        return self._outcome.result(timeout)

    def cancel(self) -> None:
        """Returns when the call has ended, or does not end in reasonable time."""
        self._loop.call_soon_threadsafe(self._cancel)
        wait([self._outcome], _CANCELLATION_S)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def run_in_loop(fs: AsyncFileSystem, call: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of a call in the loop of a file system, which is cancelled if the wait is interrupted."""
    running = Call(fs, call)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise


class Task(Protocol):
    """A piece of work for a :class:`TaskPool`."""

    #: Bytes of memory that it takes.
    cost: int

    def run(self) -> None:
        """Does the part that belongs into a thread."""

    def finish(self) -> int:
        """Does the rest, in the thread that waits. Returns the bytes of memory that it has let go."""


class TaskPool:
    """Does tasks in threads, a few at a time.

    Args:
        name: The name of the threads.
        most_tasks: The number of tasks that may be running, or done and not finished, at a time.
        most_bytes: The memory that these may take in all. A task that costs more has to wait until it is alone.
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
        """Returns whether no task is running."""
        return self._running == 0

    def run(self, tasks: Iterable[Task]) -> None:
        """Returns when all are finished.

        Raises:
            BaseException: The first error of a task, or an interruption. No task is running any more by then: those
                that were have been waited for, and no other was begun. Only another interruption ends this waiting.
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
