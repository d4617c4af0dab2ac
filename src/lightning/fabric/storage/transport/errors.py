"""Errors that name the place and what to do, whatever client or file system raised the reason."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.storage.paths.credentials import place_of
from lightning.fabric.storage.paths.filesystem import filesystem, lacks_bucket
from lightning.fabric.storage.paths.hints import about_bucket, about_endpoint, about_expiry
from lightning.fabric.storage.paths.location import Location, display, display_about
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
def failures_named(verb: str, location: Location) -> Iterator[None]:
    """For a body that does something with the file at ``location``: its errors name that, see :func:`failure`."""
    with context_kept():
        try:
            yield
        except Exception as error:
            raise failure(verb, location, error) from unexplained(error)


@contextmanager
def questions_named(location: Location, verb: str = "look at") -> Iterator[None]:
    """For a body that asks what is at ``location``: its errors name that, unless they say that nothing is there."""
    with context_kept():
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, ImportError, ValueError, NotImplementedError):
            raise
        except Exception as error:
            if isinstance(location, Path):
                raise
            raise failure(verb, location, error) from unexplained(error)


def failure(verb: str, location: Location, cause: BaseException) -> OSError:
    """Returns the error that names the place, the reason and, where something can be done, what.

    Args:
        verb: The action that failed, such as "read".
        location: The place.
        cause: The error of a client or of the system.
    """
    status = next((status for error in chain(cause) if (status := status_of(error)) is not None), 0)
    by_status = PermissionError if have_expired(cause) else _KINDS_BY_STATUS.get(status, OSError)
    kind: type[OSError] = next((kind for kind in _KINDS if isinstance(cause, kind)), by_status)
    if status == _UNKNOWN_METHOD:
        kind = OSError  # which s3fs takes for a lack of permission
    reason = display_about(str(cause), location).rstrip(".")
    if not isinstance(cause, OSError) or not reason:
        reason = f"{type(cause).__name__}: {reason}"
    if attempts_of(cause):
        reason += f" ({display(attempts_of(cause))})"
    end = ". What was there before, if anything, is unchanged." if verb == "write" else "."
    if multipart.has_unknown_outcome(cause):
        end = (
            ". It may have been written all the same: look at what is there. It is whole, be it the old one or the new."
        )
    failure = kind(f"Could not {verb} {display(location)}: {reason}{end}{_advice(verb, kind, location, cause)}")
    failure.errno = getattr(cause, "errno", None)
    return failure


def unexplained(cause: BaseException) -> BaseException | None:
    """Returns ``cause`` if its traceback says more than its message, which :func:`failure` repeats.

    What a store or the system refuses does not depend on the lines of code that asked.
    """
    return cause if type(cause).__module__ == "builtins" and not isinstance(cause, OSError) else None


def _advice(verb: str, kind: type[OSError], location: Location, cause: BaseException) -> str:
    """Advice, where the cause is not a passing one, or one of this machine's."""
    if isinstance(location, Path):
        return ""
    if have_expired(cause):
        return about_expiry(location, place_of(filesystem(location)[0]))
    if kind is PermissionError or lacks_credentials(cause):
        return about_refusal(location, verb, cause)
    if kind is FileNotFoundError:
        return f" {about_bucket(location)}." if lacks_bucket(location) else ""
    if is_transient(cause) and not any(status_of(error) for error in chain(cause)):
        return about_endpoint(location)
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
