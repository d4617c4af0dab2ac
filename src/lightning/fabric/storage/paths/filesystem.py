"""Asks a file system about places: what is there, what is inside, and what the file system can do."""

import inspect
import os
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem, available_protocols, get_filesystem_class
from fsspec.asyn import sync
from fsspec.config import conf
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

from lightning.fabric.storage.paths.client_options import check_options
from lightning.fabric.storage.paths.credentials import keep_current
from lightning.fabric.storage.paths.hints import about_bucket, about_credentials, about_package, about_protocol
from lightning.fabric.storage.paths.location import Location, display, display_about, options_of


def filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """The fsspec file system of ``url``, and the path of ``url`` in it.

    Other processes write to the store as well, so what the file system remembers about that path is forgotten.

    Raises:
        ValueError: The protocol is not known, its client lacks an option, has no option or no file of that name, or
            the endpoint has no scheme.
        ImportError: The client of the store is not installed.
        OSError: The client has asked a server, and got no good answer.
    """
    text, options = str(url), dict(options_of(url))
    if (protocol := get_protocol(text)) in ("http", "https"):  # proxies are found in the environment, as elsewhere
        given = {**conf.get(protocol, {}).get("client_kwargs", {}), **options.get("client_kwargs", {})}
        options["client_kwargs"] = {"trust_env": True, **given}
    check_options(protocol, options)
    folder, name = _split_where_taken_for_a_query(text)
    fs, path = _connect(url, folder, options)
    path = f"{path.rstrip('/')}/{name}" if name else path
    path = path.rstrip("/") or path  # else it would be another name on an object store
    if protocol.lower() == "webhdfs" and "%" in path:  # a data node would decode it once more
        raise ValueError(f"WebHDFS takes {display(url)!r} for another name: use one without `%`")
    for stale in (path, fs._parent(path)):
        fs.invalidate_cache(stale)
    keep_current(fs)
    return fs, path


def _connect(url: str, text: str, options: dict[str, Any]) -> tuple[AbstractFileSystem, str]:
    """As ``url_to_fs``, with errors that say what to do."""
    try:
        fs, path = url_to_fs(text, **options)
        return fs, str(path)
    except ImportError as error:
        raise ImportError(f"{display(url)} needs a package: {error}.{about_package(text)}", name=error.name) from error
    except (ValueError, OSError) as error:
        if (protocol := get_protocol(text)) not in available_protocols():
            raise ValueError(f"There is no way to {display(url)}: {about_protocol(protocol)}") from None
        kind = ValueError if isinstance(error, ValueError) else OSError
        reason = display_about(str(error), url).rstrip("!.")
        raise kind(f"There is no way to {display(url)}: {reason}.{about_credentials(text)}") from error


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
        raise ValueError(f"{kind.__name__} takes {display(url)!r} for another name: use one without `?` and `#`")
    return url, ""


def is_object_store(fs: AbstractFileSystem) -> bool:
    """Whether the file system stores a whole object with one call of ``pipe_file``, which is atomic.

    That is so when it brings a ``pipe_file`` of its own; the inherited one opens a file and writes into it.
    """
    from fsspec.asyn import AsyncFileSystem

    wrapped = getattr(fs, "fs", None)  # a DirFileSystem is what it wraps
    if isinstance(wrapped, AbstractFileSystem):
        return is_object_store(wrapped)
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._pipe_file is not AsyncFileSystem._pipe_file
    return type(fs).pipe_file is not AbstractFileSystem.pipe_file


def missing(location: Location) -> str:
    """``location`` for messages about nothing being there, with the reason if there is no such bucket."""
    if isinstance(location, Path) or not lacks_bucket(location):
        return display(location)
    return f"{display(location)}. {about_bucket(location)}"


def lacks_bucket(url: str) -> bool:
    """Whether the store says that there is no such bucket as that of ``url``."""
    fs, path = filesystem(url)
    if has_folders(fs) or url.startswith("http"):
        return False
    bucket = path.partition("/")[0]
    try:
        if kind_of(fs, bucket) != "nothing":
            return False
        fs.ls(bucket)  # gcsfs says so of an empty one as well, to whom may not ask for it
    except FileNotFoundError:
        return True
    except Exception:  # it may be forbidden to ask, and is of no help to an error about something else
        return False
    return False


def shares_names(location: Location) -> bool:
    """Whether a file and a folder can have the same name there.

    So it is on object stores, where folders are no more than a part of names: ``last.ckpt`` and ``last.ckpt/meta.pt``
    exist side by side.
    """
    return isinstance(location, str) and not has_folders(filesystem(location)[0])


def is_file(location: Location) -> bool:
    """Whether there is a file (an object) of exactly that name.

    Raises:
        OSError: The store did not answer the question, for example because access is denied.
    """
    if isinstance(location, Path):
        return location.is_file()
    fs, path = filesystem(location)
    return kind_of(fs, path) == "file"


def kind(location: Location) -> str:
    """``"file"``, ``"directory"`` (on an object store: names below it, and no file of that name) or ``"nothing"``."""
    if isinstance(location, Path):
        return "directory" if location.is_dir() else "file" if location.exists() else "nothing"
    return kind_of(*filesystem(location))


def is_folder(location: Location) -> bool:
    """Whether there is a folder that keeps a file of that name from being written: see :func:`shares_names`."""
    return not shares_names(location) and kind(location) == "directory"


def sizes_of_files(location: Location) -> dict[str, int | None]:
    """The names of the files right inside a folder, and their sizes in bytes, or None where a store does not tell."""
    if isinstance(location, Path):
        if not location.is_dir():
            return {}
        with os.scandir(location) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    fs, path = filesystem(location)
    inside = path.rstrip("/") + "/"
    found = {name[len(inside) :]: info.get("size") for name, info in _find(fs, path).items()}
    return {name: size for name, size in sorted(found.items()) if "/" not in name}


def list_names(location: Location) -> list[str]:
    """The names of what is right inside a folder, files and folders.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    return sorted(os.listdir(location)) if isinstance(location, Path) else names_inside(*filesystem(location))


def names_inside(fs: AbstractFileSystem, path: str) -> list[str]:
    """As :func:`list_names`."""
    return sorted({name for name, _ in infos_inside(fs, path)})


def infos_inside(fs: AbstractFileSystem, path: str) -> list[tuple[str, dict[str, Any]]]:
    """What the file system says of all that is right inside a folder, with its name there."""
    inside = path.rstrip("/") + "/"
    found = [(str(info["name"]).rstrip("/"), info) for info in fs.ls(path, detail=True)]  # FTP gives no more else
    return [(name[len(inside) :], info) for name, info in found if name.startswith(inside)]


def modified(location: Location) -> float:
    """When a file, or what is in a folder, was last written, in seconds since the beginning of 1970.

    Raises:
        OSError: There is nothing, or the store did not answer.
        NotImplementedError: The file system does not tell.
    """
    if isinstance(location, Path):
        return location.stat().st_mtime
    fs, path = filesystem(location)
    if kind_of(fs, path) == "directory":
        return max((_modified(fs, name) for name in files_below(fs, path)), default=0.0)
    return _modified(fs, path)


def _modified(fs: AbstractFileSystem, path: str) -> float:
    if (time := info_of(fs, path).get("modify")) is not None:  # FTP, whose file system has no method for it
        return datetime.strptime(str(time).partition(".")[0], "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc).timestamp()
    return float(fs.modified(path).timestamp())


def is_within(location: Location, folder: Location) -> bool:
    """Whether a place is below a folder, as far as names tell."""
    if isinstance(location, Path) or isinstance(folder, Path):
        return (
            type(location) is type(folder) and Path(os.path.abspath(folder)) in Path(os.path.abspath(location)).parents
        )
    if _are_of_two_clients(location, folder):
        return False
    (fs, path), (other, above) = filesystem(location), filesystem(folder)
    return fs == other and path.startswith(above.rstrip("/") + "/")


def is_same(location: Location, other: Location) -> bool:
    """Whether two names are those of one place."""
    if isinstance(location, Path) or isinstance(other, Path):
        return type(location) is type(other) and os.path.abspath(location) == os.path.abspath(other)
    return not _are_of_two_clients(location, other) and filesystem(location) == filesystem(other)


def _are_of_two_clients(url: str, other: str) -> bool:
    """Whether the protocols alone tell that two places are in different stores. They need not be known."""
    names = [get_protocol(url), get_protocol(other)]
    one, two = (known_implementations.get(name, {"class": name})["class"] for name in names)
    return bool(one != two)


def files_below(fs: AbstractFileSystem, path: str) -> list[str]:
    """The paths of all files in a folder, also if there is a file of the folder's name."""
    return list(_find(fs, path))


def _find(fs: AbstractFileSystem, path: str) -> dict[str, dict[str, Any]]:
    inside = path.rstrip("/") + "/"
    in_bucket = "/" in path.strip("/")  # there is nothing around a bucket to look in
    if in_bucket and "prefix" in inspect.signature(getattr(fs, "_find", fs.find)).parameters:
        # adlfs's find(path) stops at the file. What it is asked for here matches the names beside the folder as well
        prefix = inside.rstrip("/").rpartition("/")[2] + "/"
        found = fs.find(fs._parent(path), prefix=prefix, detail=True)
    else:
        found = fs.find(path, detail=True)
    return {name: info for name, info in found.items() if name.startswith(inside)}


def has_folders(fs: AbstractFileSystem) -> bool:
    """Whether a folder is more than a part of names. It is also in memory, which is atomic as object stores are."""
    return not is_object_store(fs) or isinstance(fs, MemoryFileSystem)


def kind_of(fs: AbstractFileSystem, path: str) -> str:
    """``"file"``, ``"directory"`` or ``"nothing"``; what fsspec's ``exists`` takes for a no is an error here."""
    return str(info_of(fs, path)["type"])


def info_of(fs: AbstractFileSystem, path: str) -> dict[str, Any]:
    """What the file system says of ``path``; ``"type"`` is as for :func:`kind_of`."""
    try:
        return dict(fs.info(path))
    except (FileNotFoundError, NotADirectoryError):  # the latter below a name that is a file
        return {"type": "nothing"}


def is_zonal(fs: AbstractFileSystem, path: str) -> bool:
    """Whether ``path`` is in a zonal bucket, whose objects are written and read over gRPC."""
    return _is_bucket(fs, path, "_is_zonal_bucket")


def is_hierarchical(fs: AbstractFileSystem, path: str) -> bool:
    """Whether ``path`` is in a bucket of Google's with folders, which stay when all that was in them is removed.

    Files and folders there can have the same name all the same.
    """
    return _is_bucket(fs, path, "_is_bucket_hns_enabled")


def _is_bucket(fs: Any, path: str, question: str) -> bool:
    asked = getattr(fs, question, None)
    return asked is not None and not fs.asynchronous and bool(sync(fs.loop, asked, fs.split_path(path)[0]))
