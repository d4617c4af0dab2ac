"""Looks for checkpoints whose paths were recorded, with one listing a folder and in bounded time.

Their places may be on hosts that are gone, or of protocols for which there is no client any more.
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

#: Seconds to wait for the next answer. Clients try again for minutes.
PATIENCE_S = 10.0
_CHECKPOINTS_AT_A_TIME = 8

#: The reason why a checkpoint is missing or incomplete, None if it is complete, or the error of the question.
Answer = str | Exception | None


def why_lost(paths: Iterable[str]) -> dict[str, Answer]:
    """Returns, for each checkpoint, why it is incomplete, None if it is complete, or the error of the question.

    A file in a store is not read: Lightning saves it as a whole or not at all. All else is looked into by
    :func:`~lightning.fabric.storage.tools.discover.why_incomplete`. A store without an answer for ten seconds is given
    up, and the thread that waits for it is left behind.

    Args:
        paths: The paths of checkpoints, in any number of stores.
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
    late = TimeoutError(f"there is no answer after {PATIENCE_S:.0f} seconds")
    return {path: answers.get(path, late) for path in paths}


def _store(place: Place) -> str:
    """Returns protocol, host and bucket of a URL, which one thread looks at."""
    found = re.match(r"[^/]+//[^/]*", place.raw)
    return found[0] if found else ""


def _look(folders: dict[Place, list[str]], answers: dict[str, Answer]) -> None:
    """Finds answers about the checkpoints in the folders of one store."""
    unread: list[str] = []
    error: Exception | None = None
    for folder, paths in folders.items():
        if error is None or isinstance(error, PermissionError) or not isinstance(error, OSError):
            error = _list(folder, paths, answers, unread)
        else:  # the store would not answer for the next folder either
            answers.update(dict.fromkeys(paths, error))
    remaining = iter(unread)
    together = next((_can_ask_together(locate(path)) for path in unread), False)
    count = min(_CHECKPOINTS_AT_A_TIME, len(unread)) if together else 1
    for thread in [in_thread("lightning-look", _look_into, remaining, answers) for _ in range(count)]:
        thread.result()


def _can_ask_together(place: Place) -> bool:
    return place.is_local or is_object_store(place.resolve()[0])


def _list(folder: Place, paths: list[str], answers: dict[str, Answer], unread: list[str]) -> Exception | None:
    """Answers from a listing of ``folder``, adds other paths to ``unread``, and returns the error of the listing."""
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
    """Returns the names in a folder, and whether each is a file that need not be read."""
    try:
        whole: dict[str, bool] = {}
        with questions_named(folder):
            for name, kind, size in folder.entries():  # without sizes of local files
                # of a file and a folder of one name, the folder counts if it is complete
                whole[name] = whole.get(name, True) and kind == "file" and bool(size)
        return whole
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _look_into(paths: Iterator[str], answers: dict[str, Answer]) -> None:
    for path in paths:
        try:
            answers[path] = why_incomplete(path)
        except Exception as error:
            answers[path] = error
