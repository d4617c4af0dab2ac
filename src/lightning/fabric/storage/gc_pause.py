"""Python's search for garbage, which no thread can run beside."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keeps Python from looking for garbage while many objects are made that are none.

    It would look through all objects of the process now and then, for tenths of a second in which no thread can run.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
