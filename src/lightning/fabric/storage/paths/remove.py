"""Folders, renames and removals. Names are literal: ``*`` and the like have no meaning in them."""

import errno
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from lightning.fabric.storage.paths.filesystem import (
    files_below,
    has_folders,
    is_hierarchical,
    is_object_store,
    kind_of,
)
from lightning.fabric.storage.paths.layout import MARKS
from lightning.fabric.storage.paths.place import LocalPlace, Place

_REQUESTS_AT_A_TIME = 16


def move(fs: AbstractFileSystem, path: str, target: str) -> None:
    """Gives a file or a folder of a file system another name, over an existing file if the file system does that."""
    if type(fs).mv is not AbstractFileSystem.mv:
        fs.mv(path, target)
        return
    # the inherited one copies what a pattern matches
    names = [path] if kind_of(fs, path) == "file" else files_below(fs, path)
    for name in sorted(names, key=lambda name: name.rpartition("/")[2] in MARKS):  # those last
        copy = target + name[len(path) :]
        fs.makedirs(fs._parent(copy), exist_ok=True)
        fs.cp_file(name, copy)
    if names == [path]:
        fs.rm_file(path)
    else:
        _remove_files_and_folders(fs, path)


def remove(place: Place) -> None:
    """Removes a file, or a folder with all that is in it. It is no error if there is nothing.

    The marks of a complete sharded checkpoint go first, so that what is left when this is interrupted is not taken
    for a checkpoint.

    Raises:
        ValueError: ``place`` is the working folder or one around it, a whole bucket, or the root of a file system.
    """
    _refuse_too_much(place)
    remove_file(place)
    remove_folder(place)


def remove_file(place: Place) -> None:
    """Removes the file of exactly that name, if there is one."""
    if isinstance(place, LocalPlace):
        if place.path.is_symlink() or place.path.is_file():
            place.path.unlink(missing_ok=True)
        return
    fs, path = place.resolve()
    if kind_of(fs, path) == "file":
        fs.rm_file(path)


def remove_folder(place: Place) -> None:
    """Removes a folder with all that is in it, as :func:`remove`; a file of that name beside it stays."""
    if not isinstance(place, LocalPlace):
        _remove_files_and_folders(*place.resolve())
    elif place.path.is_dir():
        for mark in MARKS:
            (place.path / mark).unlink(missing_ok=True)
        shutil.rmtree(place.path)


def remove_if_empty(place: Place) -> None:
    """Removes a local folder in which nothing is. It is no error if there is something, or no folder of that name."""
    if not isinstance(place, LocalPlace):
        return
    try:
        place.path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
            raise


def remove_names(place: Place, names: Iterable[str]) -> None:
    """Removes files of a folder that are known to be there."""
    if isinstance(place, LocalPlace):
        for name in names:
            (place.path / name).unlink(missing_ok=True)
        return
    fs, path = place.resolve()
    _remove_all(fs, [f"{path.rstrip('/')}/{name}" for name in names])


def remove_any(fs: AbstractFileSystem, path: str) -> None:
    """Removes a file or a folder by its path in a file system, as :func:`remove`."""
    if isinstance(fs, LocalFileSystem):
        remove(LocalPlace(path))
    elif kind_of(fs, path) == "file":
        fs.rm_file(path)
    else:
        _remove_files_and_folders(fs, path)


def _remove_files_and_folders(fs: AbstractFileSystem, path: str) -> None:
    inside = path.rstrip("/") + "/"
    files = files_below(fs, path)
    marks = [inside + mark for mark in MARKS if inside + mark in files]
    folders = set()
    if has_folders(fs) or is_hierarchical(fs, path):
        folders = set(fs.find(path, withdirs=True)).difference(files) | {path}
    _remove_all(fs, marks)
    _remove_all(fs, [name for name in files if name not in marks])
    for name in sorted(folders, reverse=True):  # what is deeper goes first
        if kind_of(fs, name) == "directory":  # some go with their last file
            fs.rmdir(name)


def _remove_all(fs: AbstractFileSystem, paths: list[str]) -> None:
    if not is_object_store(fs):  # its client may have one connection, which threads cannot share
        for path in paths:
            fs.rm_file(path)
        return
    with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as threads:
        list(threads.map(fs.rm_file, paths))  # list() raises what a thread has raised


def _refuse_too_much(place: Place) -> None:
    if isinstance(place, LocalPlace):
        whole = Path(os.path.abspath(place.path))
        too_much = whole in (Path.cwd(), *Path.cwd().parents)
    else:
        fs, path = place.resolve()
        too_much = "/" not in path.strip("/") and (not has_folders(fs) or not path.strip("/"))
    if too_much:
        raise ValueError(f"Refusing to remove {place!r}, which holds more than a checkpoint")
