"""The first error of a run, which ends with that whatever fails in saving, logging and cleaning up after it."""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.fabric.storage.paths.redact import redact

log = logging.getLogger(__name__)

#: A reason that several errors of one run have: of its checkpoints, and of each of its loggers.
_NO_BUCKET = re.compile(r"There is no (?:bucket|container) '[^']*'")


@contextmanager
def behind(exception: BaseException) -> Iterator[None]:
    """Logs errors of a body that runs because ``exception`` was raised, which will be raised again.

    A note of ``exception`` refers to them, where Python has notes. A reason that ``exception`` has given already is not
    given again. Interruptions of the body, such as Ctrl-C, are raised.
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
    """Gives the other callbacks their turn if one's hook fails after an exception.

    Args:
        hook_name: The name of the hook.
        arguments: The arguments of the hook, beside the trainer and the module.
    """
    is_after_exception = hook_name == "on_exception" and arguments and isinstance(arguments[0], BaseException)
    return behind(arguments[0]) if is_after_exception else nullcontext()
