"""What has become of checkpoints that somebody remembers: asked with one listing a folder, and in bounded time.

Their places may be of any time: on hosts that are gone, or of protocols for which there is no client any more.
"""

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from pathlib import Path

from lightning.fabric.storage.paths.filesystem import filesystem, infos_inside, is_object_store
from lightning.fabric.storage.paths.location import Location, display, locate
from lightning.fabric.storage.tools.discover import why_incomplete
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.storage.transport.threads import in_thread

#: How many seconds to wait for the next answer. Clients try again for minutes.
PATIENCE_S = 10.0
_CHECKPOINTS_AT_A_TIME = 8

#: Why a checkpoint is not there or incomplete, None if it is complete, or what keeps one from asking.
Answer = str | Exception | None


def why_lost(paths: Iterable[str]) -> dict[str, Answer]:
    """Says what is missing of each checkpoint, or None if it is complete, or the error if that cannot be told.

    Of a file in a store nothing is read: Lightning saves it as a whole or not at all. All else is looked into as by
    :func:`~lightning.fabric.storage.tools.discover.why_incomplete`. A store that says nothing for ten seconds is given
    up, and the thread that waits for it is left behind.

    Args:
        paths: Of checkpoints, in any number of places.
    """
    paths = list(paths)
    answers: dict[str, Answer] = {}
    stores: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        try:
            location = locate(path)
        except ValueError as error:
            answers[path] = error
            continue
        folder = os.path.dirname(os.path.abspath(location) if isinstance(location, Path) else location)
        stores.setdefault(_store(location), {}).setdefault(folder, []).append(path)
    waiting = {in_thread("lightning-look", _look, folders, answers) for folders in stores.values()}
    known = -1
    while waiting and len(answers) > known:
        known = len(answers)
        waiting = wait(waiting, PATIENCE_S).not_done
    told = dict(answers)
    for path in paths:
        told.setdefault(path, TimeoutError(f"there is no answer after {PATIENCE_S:.0f} seconds"))
    return {path: told[path] for path in paths}


def _store(location: Location) -> str:
    """What is asked about in one thread: protocol, host and bucket of a URL."""
    found = None if isinstance(location, Path) else re.match(r"[^/]*//[^/]*", location)
    return found[0] if found else ""


def _look(folders: dict[str, list[str]], answers: dict[str, Answer]) -> None:
    """Finds answers about the checkpoints in the folders of one store."""
    unread: list[str] = []
    error: Exception | None = None
    for folder, paths in folders.items():
        if error is None or isinstance(error, PermissionError) or not isinstance(error, OSError):
            error = _list(folder, paths, answers, unread)
        else:  # it would not be found in the next folder either
            answers.update(dict.fromkeys(paths, error))
    remaining = iter(unread)
    together = next((_can_ask_together(locate(path)) for path in unread), False)
    count = min(_CHECKPOINTS_AT_A_TIME, len(unread)) if together else 1
    for thread in [in_thread("lightning-look", _read, remaining, answers) for _ in range(count)]:
        thread.result()


def _can_ask_together(location: Location) -> bool:
    return isinstance(location, Path) or is_object_store(filesystem(location)[0])


def _list(folder: str, paths: list[str], answers: dict[str, Answer], unread: list[str]) -> Exception | None:
    """Answers what a listing of ``folder`` tells, adds the rest to ``unread``, and returns what has failed."""
    try:
        found = _whole_files(locate(folder))
    except Exception as error:
        answers.update(dict.fromkeys(paths, error))
        return error
    for path in paths:
        location = locate(path)
        name = location.name if isinstance(location, Path) else location.rpartition("/")[2]
        if name not in found:
            answers[path] = f"there is no {display(location)}"
        elif found[name]:
            answers[path] = None
        else:
            unread.append(path)
    return None


def _whole_files(folder: Location) -> dict[str, bool]:
    """The names in a folder, and whether each is a file of which nothing need be read."""
    try:
        if isinstance(folder, Path):
            return dict.fromkeys(os.listdir(folder), False)
        whole: dict[str, bool] = {}
        with questions_named(folder):
            for name, info in infos_inside(*filesystem(folder)):
                # of a file and a folder of one name, the folder counts if it is complete
                whole[name] = whole.get(name, True) and info.get("type") == "file" and bool(info.get("size"))
        return whole
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _read(paths: Iterator[str], answers: dict[str, Answer]) -> None:
    for path in paths:
        try:
            answers[path] = why_incomplete(path)
        except Exception as error:
            answers[path] = error
