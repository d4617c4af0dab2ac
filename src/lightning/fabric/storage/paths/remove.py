"""Folders, renames and removals. Names are literal: ``*`` and the like have no meaning in them."""

import errno
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fsspec import AbstractFileSystem

from lightning.fabric.storage.paths.filesystem import (
    files_below,
    filesystem,
    has_folders,
    is_hierarchical,
    is_object_store,
    kind_of,
)
from lightning.fabric.storage.paths.layout import MARKS
from lightning.fabric.storage.paths.location import Location, display

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


def remove(location: Location) -> None:
    """Removes a file, or a folder with all that is in it. It is no error if there is nothing.

    The marks of a complete sharded checkpoint go first, so that what is left when this is interrupted is not taken
    for a checkpoint.

    Raises:
        ValueError: ``location`` is the working folder or one around it, a whole bucket, or the root of a file system.
    """
    _refuse_too_much(location)
    remove_file(location)
    remove_folder(location)


def remove_file(location: Location) -> None:
    """Removes the file of exactly that name, if there is one."""
    if isinstance(location, Path):
        if location.is_symlink() or location.is_file():
            location.unlink(missing_ok=True)
        return
    fs, path = filesystem(location)
    if kind_of(fs, path) == "file":
        fs.rm_file(path)


def remove_folder(location: Location) -> None:
    """As :func:`remove`, but a file of that name beside the folder stays."""
    if not isinstance(location, Path):
        _remove_files_and_folders(*filesystem(location))
    elif location.is_dir():
        for mark in MARKS:
            (location / mark).unlink(missing_ok=True)
        shutil.rmtree(location)


def remove_if_empty(folder: Path) -> None:
    """Removes a folder in which nothing is. It is no error if there is something, or no folder of that name."""
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
            raise


def remove_names(location: Location, names: Iterable[str]) -> None:
    """Removes files of a folder that are known to be there."""
    if isinstance(location, Path):
        for name in names:
            (location / name).unlink(missing_ok=True)
        return
    fs, path = filesystem(location)
    _remove_all(fs, [f"{path.rstrip('/')}/{name}" for name in names])


def remove_any(fs: AbstractFileSystem, path: str) -> None:
    """As :func:`remove`, for a path of a file system."""
    if kind_of(fs, path) == "file":
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


def _refuse_too_much(location: Location) -> None:
    if isinstance(location, Path):
        whole = Path(os.path.abspath(location))
        too_much = whole in (Path.cwd(), *Path.cwd().parents)
    else:
        fs, path = filesystem(location)
        too_much = "/" not in path.strip("/") and (not has_folders(fs) or not path.strip("/"))
    if too_much:
        raise ValueError(f"Refusing to remove {display(location)!r}, which holds more than a checkpoint")
