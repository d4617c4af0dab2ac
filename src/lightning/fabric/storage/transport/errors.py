"""Errors that name the place and what to do, whatever client or file system raised the reason."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.storage.paths.credentials import place_of
from lightning.fabric.storage.paths.hints import about_bucket, about_endpoint, about_expiry
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport import multipart
from lightning.fabric.storage.transport.refusals import about_refusal, lacks_credentials
from lightning.fabric.storage.transport.retry import attempts_of, chain, have_expired, is_transient, status_of

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
_KINDS_BY_STATUS = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 410: FileNotFoundError}


@contextmanager
def failures_named(verb: str, place: Place) -> Iterator[None]:
    """For a body that does something with the file at ``place``: its errors name that, see :func:`failure`."""
    with context_kept():
        try:
            yield
        except Exception as error:
            raise failure(verb, place, error) from unexplained(error)


@contextmanager
def questions_named(place: Place, verb: str = "look at") -> Iterator[None]:
    """For a body that asks what is at ``place``: its errors name that, unless they say that nothing is there."""
    with context_kept():
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, ImportError, ValueError, NotImplementedError):
            raise
        except Exception as error:
            if place.is_local:
                raise
            raise failure(verb, place, error) from unexplained(error)


def failure(verb: str, place: Place, cause: BaseException) -> OSError:
    """Returns the error that names the place, the reason and, where something can be done, what.

    Args:
        verb: The action that failed, such as "read".
        place: The place.
        cause: The error of a client or of the system.
    """
    status = next((status for error in chain(cause) if (status := status_of(error)) is not None), 0)
    by_status = PermissionError if have_expired(cause) else _KINDS_BY_STATUS.get(status, OSError)
    kind: type[OSError] = next((kind for kind in _KINDS if isinstance(cause, kind)), by_status)
    if status == _UNKNOWN_METHOD:
        kind = OSError  # which s3fs takes for a lack of permission
    reason = redact(str(cause), place.raw).rstrip(".")
    if not isinstance(cause, OSError) or not reason:
        reason = f"{type(cause).__name__}: {reason}"
    if attempts_of(cause):
        reason += f" ({redact(attempts_of(cause))})"
    end = ". What was there before, if anything, is unchanged." if verb == "write" else "."
    if multipart.has_unknown_outcome(cause):
        end = (
            ". It may have been written all the same: look at what is there. It is whole, be it the old one or the new."
        )
    failure = kind(f"Could not {verb} {place}: {reason}{end}{_advice(verb, kind, place, cause)}")
    failure.errno = getattr(cause, "errno", None)
    return failure


def unexplained(cause: BaseException) -> BaseException | None:
    """Returns ``cause`` if its traceback says more than its message, which :func:`failure` repeats.

    What a store or the system refuses does not depend on the lines of code that asked.
    """
    return cause if type(cause).__module__ == "builtins" and not isinstance(cause, OSError) else None


def _advice(verb: str, kind: type[OSError], place: Place, cause: BaseException) -> str:
    """Advice, where the cause is not a passing one, or one of this machine's."""
    if place.is_local:
        return ""
    if have_expired(cause):
        return about_expiry(place.raw, place_of(place.resolve()[0]))
    if kind is PermissionError or lacks_credentials(cause):
        return about_refusal(place, verb, cause)
    if kind is FileNotFoundError:
        return f" {about_bucket(place.raw)}." if place.lacks_bucket() else ""
    if is_transient(cause) and not any(status_of(error) for error in chain(cause)):
        return about_endpoint(place.raw)
    return ""


@contextmanager
def context_kept() -> Iterator[None]:
    """For a body that hides the causes of its errors, which their messages name (``raise ... from None``).

    They go on to show what was being handled when the body began, such as the error of training after which something
    is saved. With ``from None`` that is hidden as well.
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
