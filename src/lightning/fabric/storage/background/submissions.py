"""Saves, and what follows on them, as a thread submits them to a queue, and how that thread wants it done."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.fabric.storage import save_report
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.save_report import SaveReport


class _OfThread(threading.local):
    """Settings of a thread for what it submits, and the lists that collect that."""

    lists: tuple[list["Save"], ...] = ()
    removes_unconditionally = False
    may_skip = True


_of_thread = _OfThread()


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


class FollowUp:
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


def submitted(save: Save) -> None:
    """Adds a save to the lists of :func:`watching`."""
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
