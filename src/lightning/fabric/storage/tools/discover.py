"""Finds complete checkpoints, from which Lightning chooses the one that a run goes on from."""

import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator

from lightning.fabric.storage.archives.archive_reader import ARCHIVE
from lightning.fabric.storage.paths.layout import METADATA, SHARD_FOLDER_PART, is_shard_folder
from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.paths.place import LocalPlace, Place
from lightning.fabric.storage.sharded.metadata_file import read_metadata
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.storage.transport.open import open_reader
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.types import _PATH

#: Names that only Lightning gives files in a folder of shards.
_LIGHTNINGS = re.compile(r"meta\.pt|__[0-9a-f]{12}_.+\.distcp")
_HPC_NAME = "hpc_ckpt_"
_NUMBER = re.compile(r"([0-9]+)")
#: Temporary names of a save, and names that Lightning does not give a checkpoint.
_SIDE_NAME = re.compile(r"\..*|.+\.[0-9a-f]{12}\.(?:old|new)")


def why_incomplete(path: AnyPath) -> str | None:
    """Returns why the checkpoint at ``path`` is incomplete, or None if it is complete.

    A folder that another strategy or plugin than FSDP and ModelParallel saves counts as complete. A file counts as
    complete unless it was cut off.

    Raises:
        OSError: The store did not answer.
    """
    place = locate(path)
    try:
        read_metadata(place)  # of a file and a folder of one name, the folder counts if it is complete
    except FileNotFoundError as error:
        found = place.kind()
        if found == "nothing":
            return f"there is no {place}"
        if found == "file":
            return _why_truncated(place)
        names = place.list_names()
        if all(map(SHARD_FOLDER_PART.fullmatch, names)) or any(map(_LIGHTNINGS.fullmatch, names)):
            return str(error)
    return None


def _why_truncated(place: Place) -> str | None:
    with open_reader(place) as file:
        start = file.read(len(ARCHIVE))
        if not start:
            return f"{place} is empty"
        if start == ARCHIVE and not zipfile.is_zipfile(file):
            return f"{place} is cut off: it has no directory of records at its end"
    return None


def names_in(folder: AnyPath) -> list[str]:
    """Returns the names of the files and folders right inside a folder; none if there is no folder.

    Raises:
        OSError: The store did not answer.
    """
    place = locate(folder)
    try:
        with questions_named(place):
            return place.list_names()
    except FileNotFoundError:
        return []


def paths_in(folder: _PATH) -> list[str]:
    """Returns the paths of :func:`names_in`: absolute ones, or URLs."""
    place = locate(folder)
    if place.is_local:  # they are compared with others, as texts
        place = LocalPlace(os.path.abspath(place.raw))
    return [(place / name).raw for name in names_in(place)]


def times_of_complete(candidates: Iterable[str], at_path: bool = True, warn: bool = True) -> dict[str, float]:
    """Returns the times at which the complete candidates were saved.

    For a folder that is the time of its commit: its own is changed by a failed save as well.

    Args:
        candidates: Paths. Those that do not exist are left out.
        at_path: Whether Lightning has saved them at these paths. Else anything that a plugin has saved there, or under
            a name that goes on with a dot, counts as complete.
        warn: Whether to warn of a candidate that is incomplete.

    Returns:
        Seconds since the beginning of 1970, by path. Of those with the same time, the first is newer by its name:
        stores give times in whole seconds.

    Raises:
        OSError: A store did not answer.
    """
    times = {}
    for path in sorted(candidates, key=_version, reverse=True):
        if not at_path:
            if found := [locate(other).modified() for other in _with_more_names(path)]:
                times[path] = max(found)
            continue
        place = locate(path)
        if place.kind() == "nothing" or not _is_complete(path, warn):
            continue
        commit = place / METADATA
        times[path] = (commit if commit.is_file() else place).modified()
    return times


def is_there(path: str) -> bool:
    """Returns whether there is anything at a path, or under a name that goes on with a dot, as a plugin may save it.

    Raises:
        OSError: The store did not answer.
    """
    return bool(_with_more_names(path))


def _with_more_names(path: str) -> list[str]:
    folder, name = os.path.split(path)
    return [f"{folder}/{found}" for found in names_in(folder) if found == name or found.startswith(f"{name}.")]


def without_more_names(paths: Iterable[str], extension: str) -> list[str]:
    """Returns the paths without what a plugin may add to them, a dot and more behind the extension."""
    return [path.partition(f"{extension}.")[0] + extension if f"{extension}." in path else path for path in paths]


def _version(path: str) -> tuple[int, list[str | int]]:
    version = re.search(r"-v([0-9]+)\.\w+$", path)
    # text and numbers in turn: step 10 comes after step 9
    return int(version[1]) if version else 0, [int(part) if part.isdecimal() else part for part in _NUMBER.split(path)]


def newest_complete_version(folder: _PATH, at_path: bool = True) -> int | None:
    """Returns the largest N of the complete ``hpc_ckpt_N.ckpt`` in a folder, and warns of incomplete ones above it.

    Args:
        folder: The folder.
        at_path: Whether Lightning has saved them at these paths, see :func:`times_of_complete`.

    Returns:
        None if there are none at all.

    Raises:
        FileNotFoundError: There are some, but none is complete. A job does not start anew over them.
        OSError: The store did not answer.
    """
    place = locate(folder)
    if not at_path:
        return largest_version(folder, _HPC_NAME)
    incomplete = []
    for version in sorted(_versions(names_in(folder), _HPC_NAME), reverse=True):
        path = place / f"{_HPC_NAME}{version}.ckpt"
        if _is_complete(path):
            return version
        incomplete.append(path)
    if incomplete:
        why = str(why_incomplete(incomplete[0])).rstrip(".")
        raise FileNotFoundError(
            f"There is no complete checkpoint of SLURM's to go on from: {why}. To start from scratch all the same, move"
            f" what is called {_HPC_NAME}N.ckpt away from {place}; else give the path of a checkpoint as"
            " `ckpt_path`."
        )
    return None


def largest_version(folder: _PATH, start: str) -> int | None:
    """Returns the largest N of the names ``<start>N.ckpt`` in a folder, to which a dot and more may be added.

    Raises:
        OSError: The store did not answer.
    """
    return max(_versions(without_more_names(names_in(folder), ".ckpt"), start), default=None)


def _versions(names: Iterable[str], start: str) -> set[int]:
    # without leading zeros, for the name is made from the number again
    found = (re.search(rf"{re.escape(start)}(0|[1-9][0-9]*)\.ckpt$", name) for name in names)
    return {int(match[1]) for match in found if match is not None}


def _is_complete(path: AnyPath, warn: bool = True) -> bool:
    why = why_incomplete(path)
    if why is not None and warn:
        warn_of_skipped(path, why)
    return why is None


def warn_of_skipped(path: AnyPath, why: str) -> None:
    """Warns that a checkpoint is skipped, since it is incomplete."""
    rank_zero_warn(f"Skipping the checkpoint {locate(path)!r}, which is not complete: {why}")


def checkpoints_below(folder: Place) -> list[Place]:
    """Returns the checkpoints in a folder and in its folders: folders of shards, and everything named ``*.ckpt``.

    A checkpoint with several links is there once, under its own name if that is in the folder too.

    Raises:
        OSError: The store did not answer.
    """
    root = folder.real()
    real = {place: place.real() for place in _checkpoints_below(folder, frozenset([root]))}
    own = {place: (root / os.path.relpath(place.raw, folder.raw)) == real[place] for place in real}
    names = {real[place]: place for place in sorted(real, key=own.__getitem__)}  # the last one stays
    return [place for place in real if names[real[place]] == place]


def _checkpoints_below(folder: Place, above: frozenset[Place]) -> Iterator[Place]:
    # ``above``: the folders around, to which links may lead back
    names: dict[str, set[str]] = defaultdict(set)
    with questions_named(folder):
        for entry in folder.entries():
            names[entry.name].add(entry.kind)
    if is_shard_folder(names):
        yield folder
        return
    for name, kinds in sorted(names.items()):
        place = folder / name
        real = place.real()
        if _SIDE_NAME.fullmatch(name) or real in above:
            continue
        inside = list(_checkpoints_below(place, above | {real})) if "directory" in kinds else []
        if name.endswith(".ckpt") and place not in inside and ("file" in kinds or not inside):
            yield place  # on an object store there can be both
        yield from inside
