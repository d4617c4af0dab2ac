"""Errors of obstore as built-in ones."""

import re

from lightning.fabric.storage.transport.reader import REPLACED


def translated(error: Exception) -> Exception:
    """The built-in error that says the same, in as many words as it takes."""
    from obstore import exceptions

    if isinstance(error, exceptions.PreconditionError):
        return OSError(REPLACED)
    if not isinstance(error, (exceptions.BaseError, OSError)):
        return error
    text = _shortened(str(error))
    status = re.search(r"status code: (\d+)", text)  # all that an error of a writer has
    if status is not None and status[1] in ("401", "403"):
        return PermissionError(text)
    if status is not None and status[1] == "404":
        return FileNotFoundError(text)
    return ConnectionError(text) if "HTTP error" in text else OSError(text)


def _shortened(text: str) -> str:
    """Obstore's message without the internals that follow on it, but for the system's own words among them."""
    message, _, internals = text.partition("\n\nDebug source")
    message = re.sub(r", max_retries: \d+, retry_timeout: \w+", "", message)
    message, found, answer = message.partition("<?xml")
    if not found:
        message, found, answer = message.partition("<Error>")
    said = re.findall(r"<(?:Code|Message)>(.*?)</", answer) or ([answer] if found else [])
    said += re.findall(r'(?:message|error): "(.*?)"', internals)
    return " ".join([message.strip(), *said]).strip()
