"""Copies checkpoints to a second name."""

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from lightning.fabric.storage.paths.layout import MARKS, METADATA
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.remove import remove_file, remove_folder, remove_names
from lightning.fabric.storage.paths.replace import remove_leftovers, replace_by_folder
from lightning.fabric.storage.save_report import timed
from lightning.fabric.storage.sharded.metadata_file import read_metadata
from lightning.fabric.storage.transport.errors import ask, questions_named
from lightning.fabric.storage.transport.retry import retrying
from lightning.fabric.storage.transport.server_side_copy import copy_file

_FILES_AT_A_TIME = 4


def duplicate(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Makes what is at ``target`` a copy of the checkpoint at ``source``, a file or a folder of shards.

    The checkpoint at ``target`` stays until the copy is whole: files of shards have names of their own, and
    ``.metadata``, which is copied after them, commits them. Then the files of the one before are removed.

    Raises:
        FileNotFoundError: There is no checkpoint at ``source``, or one that lacks files.
        OSError: The checkpoint could not be copied.
    """
    place, copy = locate(source), locate(target)
    with timed("Copied", copy):
        if ask(place, lambda: _is_folder(place)):
            _copy_folder(place, copy)
        else:
            copy_file(place, copy)
            if copy.shares_names():
                _removed(copy, lambda: remove_folder(copy))
        remove_leftovers(copy)


def _is_folder(place: Place) -> bool:
    return place.kind() == "directory" or (place.shares_names() and METADATA in place.sizes_of_files())


def _removed(place: Place, remove: Callable[[], None]) -> None:
    """Removes what ``remove`` finds, which is asked for again each time: an answer may be lost."""
    with questions_named(place, "remove"):
        retrying(f"The removal of {place}", remove)


def _copy_folder(source: Place, target: Place) -> None:
    names = list(ask(source, source.sizes_of_files))
    if METADATA in names:
        read_metadata(source)  # what lacks a shard must not take the place of a complete checkpoint
    in_the_way = not target.shares_names() and ask(target, target.is_file)
    folder = target.beside(f".{secrets.token_hex(6)}.new") if in_the_way else target
    before = {} if in_the_way else ask(target, target.sizes_of_files)
    shards = [name for name in names if name not in MARKS]
    # of stock's, which have the same names each time: no checkpoint may mix them
    if not before.keys().isdisjoint(shards):
        _removed(folder, lambda: remove_names(folder, [name for name in MARKS if name in folder.sizes_of_files()]))
    tried = 0
    try:
        _copy_files(source, folder, shards)
        for mark in [mark for mark in MARKS if mark in names]:  # in this order: the first one commits the checkpoint
            tried += 1
            copy_file(source / mark, folder / mark)
    except BaseException as error:
        if in_the_way:
            remove_folder(folder)
        elif tried == 0 or (tried == 1 and isinstance(error, PermissionError)):
            # else .metadata may name them, also later, when a request ends that nobody waits for any more
            remove_names(folder, [name for name in folder.sizes_of_files() if name not in before and name in shards])
        raise
    if in_the_way:
        replace_by_folder(folder, target)
        return
    old = before.keys() - names
    _removed(target, lambda: remove_names(target, [name for name in target.sizes_of_files() if name in old]))
    if target.shares_names():
        _removed(target, lambda: remove_file(target))


def _copy_files(source: Place, folder: Place, names: list[str]) -> None:
    def copy(name: str) -> None:
        copy_file(source / name, folder / name)

    with ThreadPoolExecutor(_FILES_AT_A_TIME) as threads:
        # the client of a store with folders may have one connection, which threads cannot share
        list((threads.map if folder.shares_names() else map)(copy, names))  # list() raises the error of a thread
