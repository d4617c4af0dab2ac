"""Where a checkpoint is: a :class:`~pathlib.Path` on this machine, or the string URL of a place in a store.

A URL never becomes a ``Path``: that would turn ``s3://bucket/x`` into a local folder called ``s3:``.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec import available_protocols
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

Location = Path | str

#: LocalFileSystem.protocol, which is but a string in older releases of fsspec.
LOCAL_PROTOCOLS = ("file", "local")
#: A name with a colon where a path begins, or a folder of that name in it, as is left of a URL that has lost a slash.
_MANGLED = re.compile(r"(?:^|(?<=[/\\]))(\w[\w.+-]+):[/\\](?![/\\])")
#: What may stand in a URL in clear text and must not reach a log: a password, and the signature of a signed URL.
_SECRETS = (
    (re.compile(r"(?<=://)([^/\s:]*):[^/\s]+@"), r"\1:***@"),
    (re.compile(r"(?<=://)[^/\s:]+@"), r"***@"),
    (
        re.compile(
            # neither `max-keys` nor what says where a listing goes on
            r"([?&](?:sig|[\w-]*(?:signature|(?<!continuation-)(?<!page)token|credential|secret|password|key(?:id)?))=)"
            r"[^&\s'\"]+",
            re.IGNORECASE,
        ),
        r"\1***",
    ),
)


class Url(str):
    """A URL that comes with options for fsspec's file system. They are no part of the text, for they hold secrets."""

    options: Mapping[str, Any]

    def __new__(cls, text: str, options: Mapping[str, Any] | None = None) -> "Url":
        """Joins a text and its options."""
        url = super().__new__(cls, text)
        url.options = options or {}
        return url


def locate(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Location:
    """Tells a local path from a URL.

    ``file:`` URLs are local paths. A ``Path`` that was made from a URL of another protocol known to fsspec, and lost a
    slash by that, is taken for the URL.

    Args:
        path: A local path or a URL.
        options: What fsspec's file system is made with (``endpoint_url``, ``key``, ...), on top of its configuration.
            They mean nothing to a local path.

    Returns:
        A ``Path``, or a URL that fsspec understands.

    Raises:
        TypeError: ``options`` is not a mapping.
        ValueError: ``path`` is a string that was a URL until it lost a slash.
    """
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            "Storage options are a dictionary of what fsspec's file system takes, such as"
            f" {{'endpoint_url': 'http://127.0.0.1:9000'}}, not {type(options).__name__!r}"
        )
    location = _locate(path)
    return location if options is None or isinstance(location, Path) else Url(location, options)


def _locate(path: str | os.PathLike[str]) -> Location:
    text = os.fspath(path)
    if (mangled := _MANGLED.search(text)) is not None and mangled[1] in _remote_protocols():
        if isinstance(path, Path) and mangled.start() == 0:
            text = f"{mangled[1]}://{Path(text[mangled.end() :]).as_posix()}"
        elif not os.path.isdir(text[: mangled.end()]):
            raise ValueError(
                f"{text!r} would be in a local folder called `{mangled[1]}:`. A URL begins with {mangled[1]}://, and is"
                " kept as a string: pathlib.Path and functions of os.path take a slash away"
            )
    if get_protocol(text) not in LOCAL_PROTOCOLS:
        return text
    return Path(LocalFileSystem._strip_protocol(text) if _is_local_url(text) else os.path.expanduser(text))


def _remote_protocols() -> set[str]:
    return set(available_protocols()).difference(LOCAL_PROTOCOLS)


def only_local(path: str | os.PathLike[str], what: str) -> str | os.PathLike[str]:
    """``path``, where nothing but a local folder will do.

    Raises:
        ValueError: It is a URL. The message says so of ``what``.
    """
    location = locate(path)
    if isinstance(location, Path):
        return path
    raise ValueError(f"{display(location)!r} is a URL, and {what} can only use a local folder: give it one")


def _is_local_url(text: str) -> bool:
    return any(text.startswith(f"{protocol}:") for protocol in LOCAL_PROTOCOLS)


def text_of_folder(path: str | os.PathLike[str]) -> str:
    """The text of a folder's place, to which names are joined: a local path as it is, a URL without slashes at its end.

    A ``file:`` URL becomes a path, and a ``Path`` that was made from a URL becomes that again.
    """
    location = locate(path)
    if isinstance(location, Path):
        text = os.fspath(path)
        return str(location) if _is_local_url(text) else text
    return re.sub(r"(?<!:)(?<!:/)/+$", "", location)


def display(location: Location) -> str:
    """``location`` for messages: passwords and signatures are hidden."""
    text = str(location)
    for pattern, hidden in _SECRETS:
        text = pattern.sub(hidden, text)
    return text


def display_about(text: str, location: Location) -> str:
    """A text for messages that speaks of ``location``, without the password of its URL, which a client may repeat."""
    found = re.search(r"://([^/\s]*)@", str(location))
    return display(text.replace(f"{found[1]}@", "***@") if found else text)


def options_of(url: str) -> Mapping[str, Any]:
    """The options that come with ``url``."""
    return url.options if isinstance(url, Url) else {}


def join(location: Location, name: str) -> Location:
    """The place called ``name`` in the folder ``location``."""
    return (
        location / name if isinstance(location, Path) else Url(f"{location.rstrip('/')}/{name}", options_of(location))
    )


def beside(location: Location, suffix: str) -> Location:
    """The place whose name is that of ``location`` with ``suffix`` at its end."""
    if isinstance(location, Path):
        return location.with_name(location.name + suffix)
    return Url(location.rstrip("/") + suffix, options_of(location))
