"""Errors that name the place and what to do, whatever client or file system raised the reason."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lightning.fabric.storage.paths.credentials import place_of
from lightning.fabric.storage.paths.hints import about_bucket, about_endpoint, about_expiry
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport import multipart
from lightning.fabric.storage.transport.refusals import about_refusal, lacks_credentials
from lightning.fabric.storage.transport.retry import (
    KINDS_BY_STATUS,
    attempts_of,
    chain,
    have_expired,
    is_of_tls,
    is_transient,
    retrying,
    status_of,
)

_T = TypeVar("_T")

_KINDS = (
    PermissionError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    TimeoutError,
    ConnectionError,
)
_UNKNOWN_METHOD = 405
_FAILED = 500


@contextmanager
def failures_named(verb: str, place: Place) -> Iterator[None]:
    """Raises the errors of the body, which works on the file at ``place``, as :func:`failure` words them."""
    with context_kept():
        try:
            yield
        except Exception as error:
            raise failure(verb, place, error) from unexplained(error)


@contextmanager
def questions_named(place: Place, verb: str = "look at") -> Iterator[None]:
    """Raises the errors of the body, which asks what is at ``place``, with its name, unless that nothing is there."""
    with context_kept():
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, ImportError, ValueError, NotImplementedError):
            raise
        except Exception as error:
            if place.is_local:
                raise
            raise failure(verb, place, error) from unexplained(error)


def ask(place: Place, question: Callable[[], _T]) -> _T:
    """Returns the answer to a question about what is at ``place``, which is asked again if it fails for a moment.

    Raises:
        Exception: As by :func:`questions_named`.
    """
    with questions_named(place):
        return retrying(f"Asking about {place}", question)


def failure(verb: str, place: Place, cause: BaseException) -> OSError:
    """Returns the error that names the place, the reason and, where something can be done, what.

    Args:
        verb: The action that failed, such as "read".
        place: The place.
        cause: The error of a client or of the system.
    """
    kind = _kind_of(cause)
    reason = redact(str(cause), place.raw).rstrip(".")
    if not isinstance(cause, OSError) or not reason:
        reason = f"{type(cause).__name__}: {reason}"
    if attempts_of(cause):
        reason += f" ({redact(attempts_of(cause))})"
    if kind is FileNotFoundError and not place.is_local and place.lacks_bucket():
        end = f" {about_bucket(place.raw)}."
    else:
        end = _what_is_there(verb, cause) + _advice(verb, kind, place, cause)
    error = kind(f"Could not {verb} {place}: {reason}.{end}")
    error.errno = getattr(cause, "errno", None)
    return error


def _kind_of(cause: BaseException) -> type[OSError]:
    status = status_of(cause)
    if status == _UNKNOWN_METHOD:  # which s3fs takes for a lack of permission
        return OSError
    by_status = PermissionError if have_expired(cause) else KINDS_BY_STATUS.get(status, OSError)
    return next((kind for kind in _KINDS if isinstance(cause, kind)), by_status)


def _what_is_there(verb: str, cause: BaseException) -> str:
    if multipart.has_unknown_outcome(cause):
        return (
            " It may have been written all the same: look at what is there. It is whole, be it the old one or the new."
        )
    return " What was there before, if anything, is unchanged." if verb == "write" else ""


def unexplained(cause: BaseException) -> BaseException | None:
    """Returns ``cause`` if its traceback says more than its message, which :func:`failure` repeats.

    What a store or the system refuses does not depend on the lines of code that asked.
    """
    return cause if type(cause).__module__ == "builtins" and not isinstance(cause, OSError) else None


def _advice(verb: str, kind: type[OSError], place: Place, cause: BaseException) -> str:
    """Returns advice, where the cause is neither a passing one nor one of this machine's."""
    if place.is_local:
        return ""
    if have_expired(cause):
        return about_expiry(place.raw, place_of(place.resolve()[0]))
    if kind is PermissionError or lacks_credentials(cause):
        return about_refusal(place, verb, cause)
    if verb == "write" and status_of(cause) == _FAILED and _has_name_in_the_way(place):
        return (
            " In this path a file and a folder have one name, which a store that keeps objects as files cannot do: save"
            " to another path, or remove what is there."
        )
    is_unanswered = kind is not FileNotFoundError and is_transient(cause) and status_of(cause) is None
    return about_endpoint(place.raw) if is_unanswered or is_of_tls(cause) else ""


def _has_name_in_the_way(place: Place) -> bool:
    try:
        return place.kind() == "directory" or place.parent.kind() == "file"
    except Exception:  # is of no help to an error about something else
        return False


@contextmanager
def context_kept() -> Iterator[None]:
    """Keeps what was being handled before the body as the context of its errors that are raised ``from None``.

    Such as the error of training after which something is saved: ``from None`` hides that together with the cause.
    """
    before = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        is_hidden = error.__suppress_context__ and error.__cause__ is None
        if before is not None and is_hidden and all(shown is not error for shown in chain(before)):
            error.__context__ = before
            error.__suppress_context__ = False
        raise
