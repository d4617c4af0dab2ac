"""Connects to file systems of fsspec, and asks them: what is there, what is inside, and what they can do."""

import inspect
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from fsspec import AbstractFileSystem, available_protocols, get_filesystem_class
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.config import conf
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import get_protocol

from lightning.fabric.storage.paths.client_options import check_options
from lightning.fabric.storage.paths.credentials import keep_current
from lightning.fabric.storage.paths.hints import about_credentials, about_package, about_protocol
from lightning.fabric.storage.paths.redact import redact


def connect(url: str, given: Mapping[str, Any]) -> tuple[AbstractFileSystem, str]:
    """Returns the fsspec file system of a URL, and the path in it.

    Args:
        url: The URL.
        given: The options of the file system, on top of its configuration.

    Raises:
        ValueError: The protocol is not known, its client lacks an option, has no option or no file of that name, or
            the endpoint has no scheme.
        ImportError: The client of the store is not installed.
        OSError: The client has asked a server, and got no good answer.
    """
    options = dict(given)
    if (protocol := get_protocol(url)) in ("http", "https"):  # proxies are found in the environment, as elsewhere
        kwargs = {**conf.get(protocol, {}).get("client_kwargs", {}), **options.get("client_kwargs", {})}
        options["client_kwargs"] = {"trust_env": True, **kwargs}
    check_options(protocol, options)
    folder, name = _split_where_taken_for_a_query(url)
    try:
        fs, path = url_to_fs(folder, **options)
    except ImportError as error:
        raise ImportError(f"{redact(url)} needs a package: {error}.{about_package(url)}", name=error.name) from error
    except (ValueError, OSError) as error:
        if protocol not in available_protocols():
            raise ValueError(f"There is no way to {redact(url)}: {about_protocol(protocol)}") from None
        kind = ValueError if isinstance(error, ValueError) else OSError
        reason = redact(str(error), url).rstrip("!.")
        raise kind(f"There is no way to {redact(url)}: {reason}.{about_credentials(url)}") from error
    path = f"{path.rstrip('/')}/{name}" if name else str(path)
    path = path.rstrip("/") or path  # else it would be another name on an object store
    if protocol.lower() == "webhdfs" and "%" in path:  # a data node would decode it once more
        raise ValueError(f"WebHDFS takes {redact(url)!r} for another name: use one without `%`")
    return fs, path


def refresh(fs: AbstractFileSystem, path: str) -> None:
    """Has a file system forget what it remembers about a path, and its client use the credentials of now."""
    forget(fs, path)
    keep_current(fs)


def forget(fs: AbstractFileSystem, path: str) -> None:
    """Has a file system forget what it remembers about a path."""
    fs.invalidate_cache(path)
    fs.invalidate_cache(fs._parent(path))


def _split_where_taken_for_a_query(url: str) -> tuple[str, str]:
    """Splits off what follows the last folder before a ``?`` or ``#``, if the file system takes that for a query.

    A website does so rightly. FTP has no queries, and its file system forgets them.
    """
    mark = re.search(r"[?#]", url)
    protocol = get_protocol(url)
    if mark is None or protocol not in available_protocols():
        return url, ""
    end = url.rindex("/", 0, mark.start()) + 1
    kind = get_filesystem_class(protocol)
    if {"url_query", "url_fragment"} & kind._get_kwargs_from_urls(url).keys():
        return url[:end], url[end:]
    if not str(kind._strip_protocol(url)).endswith(url[end:].rstrip("/")):  # and would do so on every call
        raise ValueError(f"{kind.__name__} takes {redact(url)!r} for another name: use one without `?` and `#`")
    return url, ""


def is_object_store(fs: AbstractFileSystem) -> bool:
    """Returns whether the file system stores a whole object with one call of ``pipe_file``, which is atomic.

    That is so when it brings a ``pipe_file`` of its own; the inherited one opens a file and writes into it.
    """
    wrapped = getattr(fs, "fs", None)  # a DirFileSystem is what it wraps
    if isinstance(wrapped, AbstractFileSystem):
        return is_object_store(wrapped)
    return has_own(fs, "pipe_file")


def has_own(fs: AbstractFileSystem, method: str) -> bool:
    """Returns whether a file system does not inherit a method from fsspec."""
    base, name = (AsyncFileSystem, f"_{method}") if isinstance(fs, AsyncFileSystem) else (AbstractFileSystem, method)
    return getattr(type(fs), name) is not getattr(base, name)


def lacks_bucket(fs: AbstractFileSystem, path: str) -> bool:
    """Returns whether the bucket of ``path`` is known to be missing."""
    if has_folders(fs):
        return False
    bucket = path.partition("/")[0]
    try:
        if kind_of(fs, bucket) != "nothing":
            return False
        fs.ls(bucket)  # for gcsfs, an empty one is nothing as well, where it is forbidden to ask for it
    except FileNotFoundError:
        return True
    except Exception:  # it may be forbidden to ask, and is of no help to an error about something else
        return False
    return False


def names_inside(fs: AbstractFileSystem, path: str) -> list[str]:
    """Lists the names of what is right inside a folder, files and folders."""
    return sorted({name for name, _ in infos_inside(fs, path)})


def infos_inside(fs: AbstractFileSystem, path: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the file system's info of all that is right inside a folder, with its name there."""
    inside = path.rstrip("/") + "/"
    found = [(str(info["name"]).rstrip("/"), info) for info in fs.ls(path, detail=True)]  # FTP gives no more else
    return [(name[len(inside) :], info) for name, info in found if name.startswith(inside)]


def modified(fs: AbstractFileSystem, path: str) -> float:
    """Returns when a file was last written, in seconds since the beginning of 1970."""
    if (time := info_of(fs, path).get("modify")) is not None:  # FTP, whose file system has no method for it
        return datetime.strptime(str(time).partition(".")[0], "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc).timestamp()
    return float(fs.modified(path).timestamp())


def files_below(fs: AbstractFileSystem, path: str) -> dict[str, dict[str, Any]]:
    """Returns the file system's info of all files in a folder, also if a file has its name, by their paths."""
    inside = path.rstrip("/") + "/"
    in_bucket = "/" in path.strip("/")  # there is nothing around a bucket to look in
    above, options = path, {}
    if in_bucket and "prefix" in inspect.signature(getattr(fs, "_find", fs.find)).parameters:
        # adlfs's find(path) stops at the file. What it is asked for here matches the names beside the folder as well
        above = fs._parent(path)
        while fs._strip_protocol(above) != above:  # it takes a `?` at the end for an empty query
            above = fs._parent(above)
        options = {"prefix": inside[len(above) + 1 :]}
    try:
        found = fs.find(above, detail=True, **options)
    except FileNotFoundError:  # there is not even the bucket
        return {}
    return {name: info for name, info in found.items() if name.startswith(inside)}


def has_folders(fs: AbstractFileSystem) -> bool:
    """Returns whether a folder is more than a part of names, as also in memory, which is atomic like object stores."""
    return not is_object_store(fs) or isinstance(fs, MemoryFileSystem)


def kind_of(fs: AbstractFileSystem, path: str) -> str:
    """Returns ``"file"``, ``"directory"`` or ``"nothing"``; what fsspec's ``exists`` takes for a no is an error."""
    return str(info_of(fs, path)["type"])


def info_of(fs: AbstractFileSystem, path: str) -> dict[str, Any]:
    """Returns the file system's info of ``path``; ``"type"`` is that of :func:`kind_of`."""
    try:
        return dict(fs.info(path))
    except (FileNotFoundError, NotADirectoryError):  # the latter below a name that is a file
        return {"type": "nothing"}


def is_zonal(fs: AbstractFileSystem, path: str) -> bool:
    """Returns whether ``path`` is in a zonal bucket, whose objects are written and read over gRPC."""
    return _is_bucket(fs, path, "_is_zonal_bucket")


def is_hierarchical(fs: AbstractFileSystem, path: str) -> bool:
    """Returns whether ``path`` is in a bucket of Google's with folders, which stay when they are empty.

    Files and folders there can have the same name all the same.
    """
    return _is_bucket(fs, path, "_is_bucket_hns_enabled")


def _is_bucket(fs: Any, path: str, question: str) -> bool:
    asked = getattr(fs, question, None)
    return asked is not None and not fs.asynchronous and bool(sync(fs.loop, asked, fs.split_path(path)[0]))
