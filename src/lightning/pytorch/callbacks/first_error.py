"""What a run ends with: the error that came first, whatever fails in saving, logging and cleaning up after it."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.fabric.storage.paths.location import display

log = logging.getLogger(__name__)

_NO_CONTEXT = nullcontext()


@contextmanager
def behind(exception: BaseException) -> Iterator[None]:
    """For a body that is run since ``exception`` was raised, which will be raised again: errors of the body are logged.

    They are added to ``exception`` as notes, too, where Python has them. What interrupts the body, such as Ctrl-C, goes
    on.
    """
    try:
        yield
    except Exception as error:
        if error is exception:  # a callback raises it once more
            return
        told = (
            f"After {type(exception).__name__} there was another error: {type(error).__name__}: {display(str(error))}"
        )
        # of what a store or the system refuses, the message says all; else it may be a fault in a callback
        log.error(told, exc_info=None if isinstance(error, OSError) else error)
        if hasattr(exception, "add_note"):
            exception.add_note(told)


def in_turn(hook_name: str, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
    """For a callback's hook: one that fails after an exception leaves the others their turn.

    Args:
        hook_name: Its name.
        arguments: What it is called with, beside the trainer and the module.
    """
    if hook_name == "on_exception" and arguments and isinstance(arguments[0], BaseException):
        return behind(arguments[0])
    return _NO_CONTEXT
