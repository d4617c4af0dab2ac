"""What has become of checkpoints that somebody remembers: asked with one listing a folder, and in bounded time.

Their places may be of any time: on hosts that are gone, or of protocols for which there is no client any more.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import wait

from lightning.fabric.storage.paths.filesystem import is_object_store
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import Place
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
    stores: dict[str, dict[Place, list[str]]] = {}
    for path in paths:
        try:
            place = locate(path)
        except ValueError as error:
            answers[path] = error
            continue
        stores.setdefault(_store(place), {}).setdefault(place.parent, []).append(path)
    waiting = {in_thread("lightning-look", _look, folders, answers) for folders in stores.values()}
    known = -1
    while waiting and len(answers) > known:
        known = len(answers)
        waiting = wait(waiting, PATIENCE_S).not_done
    told = dict(answers)
    for path in paths:
        told.setdefault(path, TimeoutError(f"there is no answer after {PATIENCE_S:.0f} seconds"))
    return {path: told[path] for path in paths}


def _store(place: Place) -> str:
    """Returns what is asked about in one thread: protocol, host and bucket of a URL."""
    found = re.match(r"[^/]+//[^/]*", place.raw)
    return found[0] if found else ""


def _look(folders: dict[Place, list[str]], answers: dict[str, Answer]) -> None:
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


def _can_ask_together(place: Place) -> bool:
    return place.is_local or is_object_store(place.resolve()[0])


def _list(folder: Place, paths: list[str], answers: dict[str, Answer], unread: list[str]) -> Exception | None:
    """Answers what a listing of ``folder`` tells, adds the rest to ``unread``, and returns what has failed."""
    try:
        found = _whole_files(folder)
    except Exception as error:
        answers.update(dict.fromkeys(paths, error))
        return error
    for path in paths:
        place = locate(path)
        if place.name not in found:
            answers[path] = f"there is no {place}"
        elif found[place.name]:
            answers[path] = None
        else:
            unread.append(path)
    return None


def _whole_files(folder: Place) -> dict[str, bool]:
    """The names in a folder, and whether each is a file of which nothing need be read."""
    try:
        whole: dict[str, bool] = {}
        with questions_named(folder):
            for name, kind, size in folder.entries():  # which tell no size of local files
                # of a file and a folder of one name, the folder counts if it is complete
                whole[name] = whole.get(name, True) and kind == "file" and bool(size)
        return whole
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _read(paths: Iterator[str], answers: dict[str, Answer]) -> None:
    for path in paths:
        try:
            answers[path] = why_incomplete(path)
        except Exception as error:
            answers[path] = error
