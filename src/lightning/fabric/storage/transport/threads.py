"""Work that a waiting thread can turn away from."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


def in_thread(name: str, function: Callable[..., _T], *arguments: object) -> "Future[_T]":
    """Calls ``function`` in a thread of its own.

    Its caller can be interrupted while it waits for the result. obstore's calls cannot be, and last minutes where a
    store does not answer. For that reason it is no executor's thread either: the interpreter waits for those when it
    ends.
    """
    future: Future[_T] = Future()

    def run() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
