"""Tries again what failed for a reason that passes."""

import asyncio
import logging
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.save_report import count_retry

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: No attempt starts later than this many seconds after the first. obstore's own retries have the same limits.
DEADLINE_S = 180.0
#: Pauses between attempts grow from the one to the other, at random.
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 15.0
_STATUSES = (408, 429, 500, 502, 503, 504, 509, 529)
#: The status about bytes that an object does not have.
NO_SUCH_RANGE = 416
#: The built-in errors for statuses that do not pass.
KINDS_BY_STATUS: dict[int | None, type[OSError]] = {
    401: PermissionError,
    403: PermissionError,
    404: FileNotFoundError,
    410: FileNotFoundError,
}
#: Messages of obstore and of gcsfs, whose errors have no attribute for the status.
_STATUS_IN_TEXT = re.compile(r"status code: (\d{3})|^Forbidden: ")
#: Errors of clients that come without a status: the connection broke, or nothing came in time.
_BROKEN_CONNECTIONS = {
    "aiohttp": ("ClientConnectionError", "ClientPayloadError", "ServerTimeoutError"),
    "botocore": ("HTTPClientError", "ConnectionError", "IncompleteReadError", "ResponseStreamingError"),
    "azure": ("ServiceRequestError", "ServiceResponseError", "IncompleteReadError"),
    "requests": ("ConnectionError", "Timeout", "ChunkedEncodingError"),
    "fsspec": ("FSTimeoutError",),
    "http": ("IncompleteRead",),
}
#: Messages of stores and clients about credentials that are no longer valid. The answer to HEAD is but a status.
_EXPIRED = re.compile(
    r"ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|Invalid Credentials|RefreshError"
    r"|ExpiredAuthenticationToken|InvalidAuthenticationInfo|Signature not valid in the specified time frame"
    r"|\(400\) when calling the HeadObject|performing HEAD [^\n]* 400 Bad Request"
)
#: obstore does not ask for credentials more often than every 0.1 s.
_RENEWAL_PAUSE_S = 0.2


class Retry:
    """Decides after each failed attempt whether and when there is another one.

    Args:
        what: The name of the operation, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._attempts = 0
        self._renewed = False

    def pause_after(self, error: Exception) -> float:
        """Returns the seconds to wait before the next attempt.

        Raises:
            Exception: ``error``, if there is to be no other attempt, with what :func:`attempts_of` returns.
        """
        self._attempts += 1
        if not self._renewed and have_expired(error):  # they are read anew before each request
            self._renewed = True
            return _RENEWAL_PAUSE_S
        elapsed = time.monotonic() - self._started
        pause = min(FIRST_PAUSE_S * 2.0 ** (self._attempts - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)
        if not is_transient(error) or elapsed + pause > DEADLINE_S:
            count = f", tried {self._attempts} times in {elapsed:.1f} s" if self._attempts > 1 else ""
            error.__dict__["_attempts"] = self._what + count
            raise error
        count_retry()
        reason = redact(f"{type(error).__name__}: {error}")
        log.log(
            logging.WARNING if self._attempts == 1 else logging.DEBUG,
            f"{self._what} failed and is tried again for up to {DEADLINE_S:.0f} s ({reason})",
        )
        return pause


def retrying(what: str, operation: Callable[[], _T]) -> _T:
    """Returns the result of ``operation``, which is called again, after growing pauses, while it fails transiently.

    Args:
        what: The name of the operation, for messages.
        operation: The operation. It can be done twice without harm.
    """
    retry = Retry(what)
    while True:
        try:
            return operation()
        except Exception as error:
            time.sleep(retry.pause_after(error))


async def retrying_async(what: str, operation: Callable[[], Awaitable[_T]]) -> _T:
    """Returns the result of a coroutine function that is called again as by :func:`retrying`."""
    retry = Retry(what)
    while True:
        try:
            return await operation()
        except Exception as error:
            await asyncio.sleep(retry.pause_after(error))


def attempts_of(error: BaseException) -> str:
    """Returns the number of attempts before ``error`` was raised, and their name, or nothing."""
    return str(getattr(error, "_attempts", ""))


def have_expired(error: BaseException) -> bool:
    """Returns whether a store has refused credentials because they are no longer valid, as far as it gives a reason."""
    return any(_EXPIRED.search(f"{type(cause).__name__}: {cause}") for cause in chain(error))


def is_of_tls(error: BaseException) -> bool:
    """Returns whether https failed for the server's certificate, or because the server speaks plain HTTP."""
    reasons = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")
    return any(isinstance(cause, ssl.SSLError) and getattr(cause, "reason", "") in reasons for cause in chain(error))


def is_transient(error: BaseException) -> bool:
    """Returns whether the same request may succeed a moment later."""
    if is_of_tls(error):
        return False
    for cause in chain(error):
        if (status := _own_status(cause)) is not None:
            return status in _STATUSES
        if isinstance(cause, (ConnectionError, TimeoutError)):
            return True
        for base in type(cause).__mro__:
            if base.__name__ in _BROKEN_CONNECTIONS.get(base.__module__.partition(".")[0], ()):
                return True
    return False


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error and its causes: clients of stores wrap the error with the reason."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def status_of(error: BaseException) -> int | None:
    """Returns the HTTP status that a client's error, or else the first of its causes, carries."""
    return next((status for cause in chain(error) if (status := _own_status(cause)) is not None), None)


def _own_status(error: BaseException) -> int | None:
    if isinstance(error, OSError) and (found := _STATUS_IN_TEXT.search(str(error))) is not None:
        return int(found[1] or 403)
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    candidates: list[Any] = [metadata.get("HTTPStatusCode")]
    candidates += [getattr(error, name, None) for name in ("status_code", "status", "code")]
    for candidate in candidates:
        if isinstance(candidate, int) and 100 <= candidate < 600:
            return candidate
        if isinstance(candidate, str) and candidate.isdigit() and len(candidate) == 3:
            return int(candidate)
    return None
