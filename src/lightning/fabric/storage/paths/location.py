"""Turns what Lightning is given, a path or a URL, into a place."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec import available_protocols
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from lightning.fabric.storage.paths.place import SLASHES_AT_END, LocalPlace, Place, StorePlace

#: LocalFileSystem.protocol, which is but a string in older releases of fsspec.
LOCAL_PROTOCOLS = ("file", "local")
#: A name with a colon where a path begins, or a folder of that name in it, as is left of a URL that has lost a slash.
_MANGLED = re.compile(r"(?:^|(?<=[/\\]))(\w[\w.+-]+):[/\\](?![/\\])")

#: The beginning of a URL that has a path, but no bucket or container, as if a variable in it were empty.
_WITHOUT_BUCKET = re.compile(r"(s3a?|gs|gcs|az|abfss?)://(?=/|$)")


#: The argument of functions that both Lightning and others of this package call.
AnyPath = str | os.PathLike[str] | Place


def locate(path: AnyPath, options: Mapping[str, Any] | None = None) -> Place:
    """Tells a local path from a URL.

    ``file:`` URLs are local paths. A ``Path`` that was made from a URL of another protocol known to fsspec, and lost a
    slash by that, is taken for the URL.

    Args:
        path: A local path or a URL, or a place, which is returned as it is.
        options: The options of fsspec's file system (``endpoint_url``, ``key``, ...), on top of its configuration.
            They mean nothing to a local path.

    Raises:
        TypeError: ``options`` is not a mapping.
        ValueError: ``path`` is a string that was a URL until it lost a slash, or a URL without a bucket.
    """
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            "Storage options are a dictionary of what fsspec's file system takes, such as"
            f" {{'endpoint_url': 'http://127.0.0.1:9000'}}, not {type(options).__name__!r}"
        )
    if isinstance(path, Place):
        return path
    text = os.fspath(path)
    if (mangled := _MANGLED.search(text)) is not None and mangled[1] in {*available_protocols()} - {*LOCAL_PROTOCOLS}:
        if isinstance(path, Path) and mangled.start() == 0:
            text = f"{mangled[1]}://{Path(text[mangled.end() :]).as_posix()}"
        elif not os.path.isdir(text[: mangled.end()]):
            raise ValueError(
                f"{text!r} would be in a local folder called `{mangled[1]}:`. A URL begins with {mangled[1]}://, and is"
                " kept as a string: pathlib.Path and functions of os.path take a slash away"
            )
    if (found := _WITHOUT_BUCKET.match(text)) is not None:
        raise ValueError(f"There is no bucket in {text!r}, as in {found[0]}bucket/run: is a variable empty?")
    if get_protocol(text) not in LOCAL_PROTOCOLS:
        return StorePlace(text, options)
    return LocalPlace(LocalFileSystem._strip_protocol(text) if _is_local_url(text) else os.path.expanduser(text))


def only_local(path: str | os.PathLike[str], what: str) -> str | os.PathLike[str]:
    """Returns ``path``, where nothing but a local folder will do.

    Raises:
        ValueError: It is a URL. The message names ``what``.
    """
    place = locate(path)
    if place.is_local:
        return path
    raise ValueError(f"{place!r} is a URL, and {what} can only use a local folder: give it one")


def _is_local_url(text: str) -> bool:
    return any(text.startswith(f"{protocol}:") for protocol in LOCAL_PROTOCOLS)


def text_of_folder(path: str | os.PathLike[str]) -> str:
    """Returns the text of a folder, to which names are joined: a local path as it is, a URL without slashes at its end.

    A ``file:`` URL becomes a path, and a ``Path`` that was made from a URL becomes that again.
    """
    place, text = locate(path), os.fspath(path)
    if place.is_local and not _is_local_url(text):
        return text
    return SLASHES_AT_END.sub("", place.raw)
