"""Puts what has been written into the place of what was there, also a file into that of a folder, and the reverse.

On the way there are other names beside the place: a temporary one for what is new, or another one for what is old.
"""

import ctypes
import errno
import hashlib
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from lightning.fabric.storage.paths.filesystem import has_folders, is_zonal, kind_of, names_inside
from lightning.fabric.storage.paths.place import LocalPlace, Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.paths.remove import move, remove, remove_any

log = logging.getLogger(__name__)

#: The function of the C library, and its arguments; None stands for a path.
_FUNCTIONS = {
    "linux": ("renameat2", (-100, None, -100, None, 2)),  # AT_FDCWD, and RENAME_EXCHANGE; since glibc 2.28
    "darwin": ("renamex_np", (None, None, 2)),  # RENAME_SWAP
}
#: Errors of systems and file systems that cannot do it; also where one of the two is on a lower layer of an overlay.
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV)

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
#: Side names that saves of this process are using at the moment.
_in_use: set[str] = set()


@contextmanager
def temporary_beside(name: str) -> Iterator[str]:
    """Yields a name in the same folder for what is going to be called ``name``, while that is being written.

    It does not contain ``name``, which may be as long as a name can be, but a mark of it for :func:`remove_leftovers`.
    """
    with _using(f".{_mark_of(name)}{secrets.token_hex(3)}.tmp") as temporary:
        yield temporary


def _mark_of(name: str) -> str:
    return hashlib.blake2b(os.fsencode(name), digest_size=5).hexdigest()


@contextmanager
def _using(name: str) -> Iterator[str]:
    _in_use.add(name)
    try:
        yield name
    finally:
        _in_use.discard(name)


def replace_by_folder(new: Place, place: Place) -> None:
    """Gives a finished folder the name of a file or a folder, which goes, or of nothing.

    ``new`` is beside ``place``. The two exchange their names where the system and the file system can do that. Else
    the old one is called ``<name>.<12 hexadecimal digits>.old`` for a moment in which there is nothing at ``place``.
    Then it is removed; a failure to do so is only logged. Not for places where files and folders share names: there is
    nothing to replace.

    Raises:
        OSError: It could not be done, and what was there before still is.
    """
    if isinstance(place, LocalPlace):
        take_place(Path(new.raw), place.path)
    else:
        fs, path = place.resolve()
        with set_aside(fs, path):
            move(fs, new.resolve()[1], path)


def take_place(new: Path, path: Path) -> None:
    """Gives a finished file or folder of this machine the name of another, as :func:`replace_by_folder`."""
    if os.path.lexists(path) and exchange(new, path):
        sync_folder(path.parent)  # the new one has the name for good before the old one goes
        with _failure_logged(new):
            remove(LocalPlace(new))
        return
    with set_aside(LocalFileSystem(), os.path.abspath(path)):
        new.rename(path)
        sync_folder(path.parent)


@contextmanager
def set_aside(fs: AbstractFileSystem, path: str) -> Iterator[None]:
    """Gives what is at ``path`` another name while the body puts something there, and then removes it.

    If the body fails, it gets its name back. There need not be anything.
    """
    if kind_of(fs, path) == "nothing":
        yield
        return
    with _using(f"{path.rpartition('/')[2]}.{secrets.token_hex(6)}.old") as name:
        aside = f"{fs._parent(path).rstrip('/')}/{name}"
        move(fs, path, aside)
        try:
            yield
        except BaseException:
            _bring_back(fs, aside, path)
            raise
        with _failure_logged(aside):
            remove_any(fs, aside)


def _bring_back(fs: AbstractFileSystem, aside: str, path: str) -> None:
    try:
        remove_any(fs, path)
        move(fs, aside, path)
    except Exception:
        log.error(f"What was called {redact(path)} before a save that failed is now called {redact(aside)}")
        raise


@contextmanager
def _failure_logged(left: object) -> Iterator[None]:
    """Logs a failure of the body, which removes what nobody needs after a save that is complete."""
    try:
        yield
    except Exception as error:
        reason = redact(f"{type(error).__name__}: {error}")
        log.warning(f"Could not remove what is left of an earlier save, {redact(str(left))} ({reason})")


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, where the platform and the file system have that notion."""
    if os.name != "posix":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:  # what has the name is in its place, which matters more
        log.debug(f"Could not make the new name in {folder} durable ({error})")


def remove_leftovers(place: Place) -> None:
    """Removes what saves to this place have left that were killed; for a save that is complete.

    Beside the place that is whatever is called ``<name>.<12 hexadecimal digits>.old`` or ``.new``, and the temporary
    files for this very name, one of which is the old folder if the kill came just after the exchange; in a folder at
    the place, all temporary files. Names of other places, and those that a save of this process is using, stay. A save
    to the same place by another process at the same time would lose its file, but must not be anyway. On object stores
    there is nothing of the kind, but in zonal buckets. A failure is only logged.
    """
    with _failure_logged(place):
        if place.is_local:
            for one in {place.absolute(), place.real()}:  # a link is written through
                inside = one.list_names() if one.kind() == "directory" else []
                for name in _leftovers(one.name, one.parent.list_names(), inside):
                    remove(one.parent / name)
        elif has_folders((found := place.resolve())[0]) or is_zonal(*found):
            fs, path = found
            parent = fs._parent(path)
            inside = names_inside(fs, path) if kind_of(fs, path) == "directory" else []
            for name in _leftovers(path.rpartition("/")[2], names_inside(fs, parent), inside):
                remove_any(fs, f"{parent.rstrip('/')}/{name}")


def _leftovers(name: str, beside: Iterable[str], inside: Iterable[str]) -> list[str]:
    ours = re.compile(rf"\.{_mark_of(name)}[0-9a-f]{{6}}\.tmp|{re.escape(name)}\.[0-9a-f]{{12}}\.(old|new)")
    found = [other for other in beside if ours.fullmatch(other) and other not in _in_use]
    return found + [f"{name}/{other}" for other in inside if _TEMPORARY.fullmatch(other)]


def exchange(one: Path, other: Path) -> bool:
    """Gives each of two files or folders of a local file system the name of the other, so that neither is ever missing.

    Returns:
        False if the system or the file system cannot do it; nothing has happened then.

    Raises:
        OSError: It failed for another reason.
    """
    call = _system_call()
    if call is None:
        return False
    if call(os.fsencode(os.path.abspath(one)), os.fsencode(os.path.abspath(other))) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), os.fspath(one), None, os.fspath(other))


@cache
def _system_call() -> Callable[[bytes, bytes], int] | None:
    """Returns the function that exchanges two absolute paths, and sets ctypes' errno if it does not return zero."""
    if sys.platform not in _FUNCTIONS:
        return None
    name, arguments = _FUNCTIONS[sys.platform]
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_char_p if argument is None else ctypes.c_int for argument in arguments]
    function.restype = ctypes.c_int

    def call(*paths: bytes) -> int:
        given = iter(paths)
        return int(function(*(next(given) if argument is None else argument for argument in arguments)))

    return call
