"""What is said to all that is saved and removed in the background, by whichever engine of this process.

The thread that trains hears of what became of it at its next step boundary, in :func:`settle`.
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
    """Whether there will be a checkpoint at ``path`` when all is done; None if nothing is going to change there."""
    place = locate(path)
    answers = [queue.will_exist(place) for queue in tuple(busy)]
    return next((answer for answer in answers if answer is not None), None)


def settle() -> None:
    """Tells of what has ended: to be called by the thread that trains, between two steps.

    Raises:
        OSError: A checkpoint could not be saved or removed; or whatever else the reason was. It is raised once. What
            else has failed is logged.
    """
    if busy:
        _raise_one([error for queue in tuple(busy) for error in queue.settle()])


def news() -> int | None:
    """The number of the last save by all ranks of which there is to tell; 0 if of others only; None if of nothing."""
    return max((number for queue in tuple(busy) for number in queue.news), default=None)


def settle_up_to(number: int) -> None:
    """Tells of what has ended as :func:`settle` does, when the saves by all ranks have ended up to that number.

    So each rank tells of the same of them, at the same place.

    Raises:
        OSError: As for :func:`settle`.
    """
    for queue in tuple(busy):
        queue.wait_for_number(number)
    _raise_one([error for queue in tuple(busy) for error in queue.settle(number)])


def _raise_one(errors: list[BaseException]) -> None:
    _log(errors[1:])
    if errors:
        with context_kept():  # that of a store hides where it comes from
            raise errors[0]


def _log(errors: list[BaseException]) -> None:
    for error in errors:
        log.error(f"Saves in the background: {type(error).__name__}: {redact(str(error))}")


def wait() -> None:
    """Waits until nothing is on its way, from any thread. Nothing is settled."""
    for queue in tuple(busy):
        queue.wait_until_idle()


def drain() -> None:
    """Waits until everything that is on its way is done, and settles it.

    Ctrl-C ends the waiting at once, also if the signal was ignored before.

    Raises:
        KeyboardInterrupt: There was a Ctrl-C. What was not saved is logged.
        OSError: As for :func:`settle`.
    """
    errors: list[BaseException] = []
    try:
        while busy:  # those who wait for the end of a save may submit removals
            with _interruptible():
                for queue in tuple(busy):
                    queue.wait()
            errors += [error for queue in tuple(busy) for error in queue.settle()]
    except KeyboardInterrupt:
        _give_up()
        _log(errors)
        raise
    _raise_one(errors)


def _give_up() -> None:
    given_up = [save for queue in tuple(busy) for save in queue.give_up()]
    if given_up:
        lost = ", ".join(str(save.place) for save in given_up)
        log.error(f"Interrupted: {lost} {'was' if len(given_up) == 1 else 'were'} not saved")
    for save in given_up:
        save.settle()


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


# before the thread pools end, which clients of stores need
getattr(threading, "_register_atexit", atexit.register)(_drain_at_exit)
