"""Advice after a refusal of a store: other credentials, or a permission for those that it knows."""

import re

from lightning.fabric.storage.paths.hints import about_credentials, about_permission
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.transport.retry import chain, have_expired, status_of

_LACK_OF_CREDENTIALS = (
    *("NoCredentialsError", "PartialCredentialsError"),
    *("DefaultCredentialsError", "RefreshError"),
    *("ClientAuthenticationError", "CredentialUnavailableError"),
)
#: Messages of stores about unknown or missing credentials. Those that have expired are found elsewhere.
_NOT_VALID = re.compile(
    r"SignatureDoesNotMatch|signature we calculated does not match|InvalidSecurity|InvalidAccessKeyId"
    r"|AuthenticationFailed|NoAuthenticationInformation|Anonymous caller"
)
_OF_THE_CLOCK = re.compile(r"RequestTimeTooSkewed")
#: Messages with the missing permission and its lacking owner: of AWS, of Google, and of Google with conditions.
_PERMISSIONS = (
    re.compile(r"User: (?P<who>\S+) is not authorized to perform: (?P<permission>\w+:\w+)"),
    re.compile(r"(?P<who>\S+@\S+) does not have (?P<permission>[\w.]+) access"),
    re.compile(r"(?P<who>)Permission '(?P<permission>[\w.]+)' denied"),
)
#: The actions behind the names of a client's operations on S3, and behind the methods of HTTP.
_ACTIONS = {
    **{"PutObject": "write", "CreateMultipartUpload": "write", "UploadPart": "write"},
    **{"CompleteMultipartUpload": "write", "CopyObject": "write", "UploadPartCopy": "write"},
    **{"AbortMultipartUpload": "abort", "DeleteObject": "remove", "DeleteObjects": "remove"},
    **{"GetObject": "read", "HeadObject": "read", "ListObjectsV2": "look at", "HeadBucket": "look at"},
    **{"PUT": "write", "POST": "write", "DELETE": "remove", "GET": "read", "HEAD": "read"},
}


def about_refusal(place: Place, action: str, cause: BaseException) -> str:
    """Returns advice about a store's refusal: to set credentials only where there are none, or wrong ones.

    Args:
        place: The place that was asked for.
        action: The action: ``"write"``, ``"read"``, ``"look at"``, ``"remove"`` or ``"abort"``. The request
            that was refused, if it is known, goes before that.
        cause: The client's error.
    """
    text = _text_of(cause)
    if _OF_THE_CLOCK.search(text):
        return " Set the clock of this machine."
    if "Partial credentials found in explicit" in text:  # of s3fs, which then takes none from elsewhere
        return " Give the storage options `key` and `secret` together, or neither, to use those of the environment."
    if are_invalid(cause) or getattr(place.resolve()[0], "anon", False) is True:
        return about_credentials(place.raw)
    found = next((match for pattern in _PERMISSIONS if (match := pattern.search(text)) is not None), None)
    if found is not None:
        return f" The credentials are valid. Grant {found['who'] or 'them'} the permission `{found['permission']}`."
    is_unexplained = re.search(r"HeadObject|HeadBucket|performing HEAD", text) is not None
    return about_permission(place.raw, _action(text) or action, is_unexplained)


def lacks_credentials(error: BaseException) -> bool:
    """Returns whether a client has found no credentials, or could not get any."""
    return any(type(cause).__name__ in _LACK_OF_CREDENTIALS for cause in chain(error))


def are_invalid(error: BaseException) -> bool:
    """Returns whether a store does not know the credentials, or got none."""
    return lacks_credentials(error) or status_of(error) == 401 or _NOT_VALID.search(_text_of(error)) is not None


def is_refusal(error: BaseException) -> bool:
    """Returns whether a store refuses what it was asked for, for whatever reason."""
    status = status_of(error)
    return any(isinstance(cause, PermissionError) for cause in chain(error)) if status is None else status in (401, 403)


def lacks_permission(error: BaseException) -> bool:
    """Returns whether a store refuses what it was asked for, and not the credentials."""
    of_clock = _OF_THE_CLOCK.search(_text_of(error)) is not None
    return is_refusal(error) and not (of_clock or have_expired(error) or are_invalid(error))


def _text_of(error: BaseException) -> str:
    return "\n".join(f"{getattr(cause, 'error_code', '')} {cause}" for cause in chain(error))


def _action(text: str) -> str | None:
    """Returns the action of the request that was refused; what is listed by GET is asked of a bucket."""
    if re.search(r"performing GET \S*[?&](list-type|comp=list|prefix)", text):
        return "look at"
    found = re.search(r"when calling the (\w+) operation|Error performing (\w+) ", text)
    return _ACTIONS.get(found[1] or found[2]) if found is not None else None
