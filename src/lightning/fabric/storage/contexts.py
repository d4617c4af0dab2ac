"""What an error shows of the exceptions that were there before it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def context_kept() -> Iterator[None]:
    """For a body that hides what its errors come from, for their message tells it (``raise ... from None``).

    They go on to show what was being handled when the body began, such as the error of training after which something
    is saved. With ``from None`` that is hidden as well.
    """
    before = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        is_hidden = error.__suppress_context__ and error.__cause__ is None
        if before is not None and is_hidden and not _leads_to(before, error):
            error.__context__ = before
            error.__suppress_context__ = False
        raise


def _leads_to(error: BaseException | None, other: BaseException) -> bool:
    """Whether ``other`` is among what ``error`` shows, so that it must not show that again."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if error is other:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
