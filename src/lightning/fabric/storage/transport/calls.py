"""Calls that run in the event loop of fsspec's thread."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any

from fsspec.asyn import AsyncFileSystem

from lightning.fabric.storage.transport import progress
from lightning.fabric.storage.transport.threads import wait_until_done

#: How long to wait until a cancelled call has let go of its connection.
_CANCELLATION_S = 10


class Call:
    """A call in the loop of a file system.

    fsspec's own way to wait for one lets it go on when the waiting thread is interrupted: it could replace an object
    long after the caller has been told that it did not. This one can be cancelled.

    Args:
        fs: The file system.
        call: One of its coroutines.
    """

    def __init__(self, fs: AsyncFileSystem, call: Coroutine[Any, Any, Any]) -> None:
        self._loop: asyncio.AbstractEventLoop = fs.loop
        self._outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._task: asyncio.Task[Any] | None = None
        self._loop.call_soon_threadsafe(self._start, call)

    def _start(self, call: Coroutine[Any, Any, Any]) -> None:
        self._task = self._loop.create_task(call)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self._outcome.set_exception(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self._outcome.set_exception(error)
        else:
            progress.made()
            self._outcome.set_result(task.result())

    def result(self, timeout: float | None = None, idle: Callable[[], None] | None = None) -> Any:
        """What the call returns or raises.

        Args:
            timeout: How many seconds to wait for it.
            idle: Called meanwhile, if there is no timeout. What it raises ends the wait.

        Raises:
            concurrent.futures.TimeoutError: There is no outcome after ``timeout`` seconds.
        """
        if idle is not None:
            wait_until_done(self._outcome, idle)
        return self._outcome.result(timeout)

    def cancel(self) -> None:
        """Returns when the call has ended, or does not end in reasonable time."""
        self._loop.call_soon_threadsafe(self._cancel)
        concurrent.futures.wait([self._outcome], _CANCELLATION_S)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
