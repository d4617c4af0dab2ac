"""Waits for all saves and removals in the background of this process, whichever plugin they are of.

The training thread settles them between two steps: callbacks are called, and errors raised.
"""

import atexit
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.storage.background.queue import busy
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport.errors import context_kept

log = logging.getLogger(__name__)


def will_exist(path: str | os.PathLike[str]) -> bool | None:
    """Returns whether a checkpoint will be at ``path`` when all is done; None if nothing is going to change there."""
    place = locate(path)
    answers = [queue.will_exist(place) for queue in tuple(busy)]
    return next((answer for answer in answers if answer is not None), None)


def settle() -> None:
    """Reports what has ended, in the training thread between two steps.

    Raises:
        OSError: A checkpoint could not be saved or removed; or an error of another type that was the reason. It is
            raised once. Other failures are logged.
    """
    if busy:
        _raise_one([error for queue in tuple(busy) for error in queue.settle()])


def news() -> int | None:
    """Returns the number of the last save by all ranks to report; 0 if there are others only; None if there is none."""
    return max((number for queue in tuple(busy) for number in queue.news), default=None)


def settle_up_to(number: int) -> None:
    """Settles the saves by all ranks up to a number, when they have ended: the same on every rank.

    Raises:
        OSError: See :func:`settle`.
    """
    for queue in tuple(busy):
        queue.wait_for_number(number)
    _raise_one([error for queue in tuple(busy) for error in queue.settle(number)])


def _raise_one(errors: list[BaseException]) -> None:
    _log(errors[1:])
    if errors:
        with context_kept():  # an error of a store hides its context
            raise errors[0]


def _log(errors: list[BaseException]) -> None:
    for error in errors:
        log.error(f"Saves in the background: {type(error).__name__}: {redact(str(error))}")


def wait() -> None:
    """Waits until nothing is in flight, from any thread. Nothing is settled."""
    for queue in tuple(busy):
        queue.wait_until_idle()


def drain() -> None:
    """Waits until nothing is in flight, and settles all.

    Ctrl-C ends the waiting at once, also if the signal was ignored before.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed. The saves that were not done are logged.
        OSError: See :func:`settle`.
    """
    errors: list[BaseException] = []
    try:
        while busy:  # callbacks of a save may submit removals
            with _interruptible():
                for queue in tuple(busy):
                    queue.wait()
            errors += [error for queue in tuple(busy) for error in queue.settle()]
    except KeyboardInterrupt:
        given_up = [save for queue in tuple(busy) for save in queue.give_up()]
        if given_up:
            lost = ", ".join(str(save.place) for save in given_up)
            log.error(f"Interrupted: {lost} {'was' if len(given_up) == 1 else 'were'} not saved")
        for save in given_up:
            save.settle()
        _log(errors)
        raise
    _raise_one(errors)


@contextmanager
def _interruptible() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


def _drain_at_exit() -> None:
    try:
        drain()
    except Exception as error:
        _log([error])


# runs before the thread pools end, which clients of stores use
getattr(threading, "_register_atexit", atexit.register)(_drain_at_exit)
