"""Errors of obstore as built-in ones."""

import re

from lightning.fabric.storage.transport.retry import KINDS_BY_STATUS, status_of

#: Codes that come with the same statuses, for reasons that pass.
_OF_THE_MOMENT = (
    r"\b(ExpiredToken|InvalidToken|TokenRefreshRequired|RequestExpired|RequestTimeTooSkewed|RequestTimeout)\b"
)
#: Statuses of requests that a store does not know, or not as they were sent.
_UNKNOWN = (400, 405, 411, 415, 501)
#: Statuses that are not about metadata.
_NOT_FOR_METADATA = (401, 404, 405, 408, 411, 429)


def is_unsupported(error: Exception) -> bool:
    """Returns whether a store does not know what obstore asks for, or answers in a way that obstore does not take.

    Args:
        error: An error as of :func:`translated`.
    """
    text = str(error)
    if type(error) is not OSError or re.search(_OF_THE_MOMENT, text):
        return False
    status = status_of(error)
    # an answer to HEAD has no text, and so no reason
    return status is None or (status in _UNKNOWN and not re.search(r"performing HEAD .* 400 Bad Request", text))


def may_be_for_metadata(error: Exception) -> bool:
    """Returns whether a store may have refused a request for the metadata in it; ``error`` is as :func:`translated`."""
    status = status_of(error) or 0
    return 400 <= status < 500 and status not in _NOT_FOR_METADATA and not re.search(_OF_THE_MOMENT, str(error))


def translated(error: Exception) -> Exception:
    """Returns the built-in error for one of obstore, with its message shortened."""
    from obstore import exceptions

    if not isinstance(error, (exceptions.BaseError, OSError)):
        return error
    text = _shortened(str(error))
    # all that an error of a writer has of the status is in its text
    kind = KINDS_BY_STATUS.get(status_of(OSError(text)), ConnectionError if "HTTP error" in text else OSError)
    return kind(text)


def _shortened(text: str) -> str:
    """Returns obstore's message without the internals that follow on it, but for the system's own words among them."""
    message, _, internals = text.partition("\n\nDebug source")
    message = re.sub(r", max_retries: \d+, retry_timeout: \w+", "", message)
    message, found, answer = message.partition("<?xml")
    if not found:
        message, found, answer = message.partition("<Error>")
    words = re.findall(r"<(?:Code|Message)>(.*?)</", answer) or ([answer] if found else [])
    words += re.findall(r'(?:message|error): "(.*?)"', internals)
    return " ".join([message.strip(), *words]).strip()
