"""What a run ends with: the error that came first, whatever fails in saving, logging and cleaning up after it."""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.fabric.storage.paths.redact import redact

log = logging.getLogger(__name__)

_NO_CONTEXT = nullcontext()
#: The reason of errors of one run that come in groups: of its checkpoints, and of each of its loggers.
_NO_BUCKET = re.compile(r"There is no (?:bucket|container) '[^']*'")


@contextmanager
def behind(exception: BaseException) -> Iterator[None]:
    """For a body that is run since ``exception`` was raised, which will be raised again: errors of the body are logged.

    A note of ``exception`` refers to that, where Python has notes. A reason that ``exception`` has given already is not
    given again. What interrupts the body, such as Ctrl-C, goes on.
    """
    try:
        yield
    except Exception as error:
        if error is exception:  # a callback raises it once more
            return
        text = redact(str(error))
        brief = f"{type(error).__name__}: {text.partition(': ')[0]}"
        after = f"After {type(exception).__name__} there was another error"
        if (reason := _NO_BUCKET.search(text)) is not None and reason[0] in str(exception):
            log.error(f"{after} of the same reason: {brief}")
            return
        # of what a store or the system refuses, the message says all; else it may be a fault in a callback
        log.error(f"{after}: {type(error).__name__}: {text}", exc_info=None if isinstance(error, OSError) else error)
        if hasattr(exception, "add_note"):
            exception.add_note(f"{after}, of which the log says more: {brief}")


def in_turn(hook_name: str, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
    """For a callback's hook: one that fails after an exception leaves the others their turn.

    Args:
        hook_name: Its name.
        arguments: What it is called with, beside the trainer and the module.
    """
    if hook_name == "on_exception" and arguments and isinstance(arguments[0], BaseException):
        return behind(arguments[0])
    return _NO_CONTEXT
