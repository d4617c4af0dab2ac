"""Text for messages and logs, in which no credential stands."""

import re

#: Parts of a URL in clear text that must not reach a log: a password, and the signature of a signed URL.
_SECRETS = (
    (re.compile(r"(?<=://)([^/\s:]*):[^/\s]+@"), r"\1:***@"),
    (re.compile(r"(?<=://)[^/\s:]+@"), r"***@"),
    (
        re.compile(
            # neither `max-keys` nor the place where a listing goes on
            r"([?&](?:sig|[\w-]*(?:signature|(?<!continuation-)(?<!page)token|credential|secret|password|key(?:id)?))=)"
            r"[^&\s'\"]+",
            re.IGNORECASE,
        ),
        r"\1***",
    ),
)


def redact(text: str, url: str = "") -> str:
    """Returns ``text`` without passwords and signatures.

    Args:
        text: A URL, or a message that holds one.
        url: The URL that the message is about, whose password a client may repeat without the rest of it.
    """
    if (found := re.search(r"://([^/\s]*)@", url)) is not None:
        text = text.replace(f"{found[1]}@", "***@")
    for pattern, hidden in _SECRETS:
        text = pattern.sub(hidden, text)
    return text
