"""Choice of the checkpoint that ``ckpt_path="last"`` means, by the names of files and by what is complete."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.storage.own_plugins import saves_at_path
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.tools.discover import (
    paths_in,
    times_of_complete,
    warn_of_skipped,
    why_incomplete,
    without_more_names,
)
from lightning.fabric.storage.tools.preflight import has_checkpoints
from lightning.fabric.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint


def times_of_last(trainer: "Trainer", candidates: Iterable[str | None]) -> dict[str, float]:
    """Returns the times of the checkpoints that ``ckpt_path="last"`` may mean.

    Where one of them is incomplete, the other checkpoints of each ModelCheckpoint count, too: the run goes on from the
    newest complete one.

    Raises:
        FileNotFoundError: None is complete of those that are there: a run does not start anew over them. Or there is
            no such bucket.
        OSError: The store did not answer.
    """
    paths = {path for path in candidates if path}
    if not saves_at_path(trainer.strategy):
        names = [getattr(callback, "last_model_path", "") for callback in trainer.checkpoint_callbacks]
        return times_of_complete(paths, at_path=False) or {path: 0.0 for path in names if path}
    times = times_of_complete(paths, warn=False)
    left = {path: _missing_at(path) for path in sorted(paths - times.keys())}
    incomplete = {path: why for path, why in left.items() if why}
    folders = [(callback, _folder_of(callback, trainer)) for callback in _model_checkpoints(trainer)]
    for callback, folder in folders:
        incomplete |= _moved_away(callback, folder, paths)
    if not incomplete:
        for _, folder in folders if not times else ():
            has_checkpoints(folder)  # before the run is said to have saved nothing yet
        return times
    others = {path for callback, folder in folders for path in _saved_by(callback, folder)} - paths
    times |= times_of_complete(others)
    why = "; ".join(reason.rstrip(".") for reason in incomplete.values())
    if not times:
        raise FileNotFoundError(
            f"There is no complete checkpoint to go on from: {why}. To start from scratch all the same, move"
            f" {'it' if len(incomplete) == 1 else 'them'} away; else give the path of a checkpoint as `ckpt_path`."
        )
    newest = max(times, key=times.__getitem__)
    if newest in others:
        rank_zero_warn(f"The last checkpoint is not complete ({why}). The run goes on from {redact(newest)!r}.")
    else:
        for path, reason in incomplete.items():
            warn_of_skipped(path, reason)
    return times


def none_there(trainer: "Trainer", fn: str) -> str:
    """Returns the warning of a run that starts from scratch, with advice that the callbacks do not follow already."""
    callbacks = _model_checkpoints(trainer)
    folders = ", ".join(sorted({redact(_folder_of(callback, trainer)) for callback in callbacks}))
    where = f" in {folders}" if folders else ""
    hint = "" if any(callback.save_last for callback in callbacks) else " Set `ModelCheckpoint(..., save_last=True)`."
    return f'.{fn}(ckpt_path="last") is set, but there is no last checkpoint available{where}: none is loaded.{hint}'


def _missing_at(path: str) -> str:
    """Returns what is missing of a checkpoint; empty if there is nothing of it."""
    place = locate(path)
    if place.is_broken_link():
        return f"{place} is a link that leads to nothing"
    return "" if place.kind() == "nothing" else why_incomplete(path) or ""


def _model_checkpoints(trainer: "Trainer") -> "list[ModelCheckpoint]":
    return [callback for callback in trainer.checkpoint_callbacks if hasattr(callback, "_find_last_checkpoints")]  # type: ignore[misc]


def _folder_of(callback: "ModelCheckpoint", trainer: "Trainer") -> str:
    return os.fspath(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def _moved_away(callback: "ModelCheckpoint", folder: str, paths: set[str]) -> dict[str, str]:
    """Returns the last checkpoints that a killed save has moved away from the place of its own, each with a reason."""
    last = rf"({re.escape(callback.CHECKPOINT_NAME_LAST)}.*{re.escape(callback.FILE_EXTENSION)})\.[0-9a-f]{{12}}\.old"
    if locate(folder).shares_names():
        return {}  # where that is not done
    found = ((path, re.fullmatch(last, os.path.basename(path))) for path in paths_in(folder))
    moved = {path: os.path.join(os.path.dirname(path), match[1]) for path, match in found if match is not None}
    return {
        path: f"there is no {redact(place)}, but {redact(path)}, which was there before: give it that name again"
        for path, place in moved.items()
        if place not in paths
    }


class _AnyMetrics(dict[str, Any]):
    """Stands for the metrics in the name of a checkpoint, whatever they are."""

    MARK = "\0"

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> "_AnyMetrics":
        return self

    def __format__(self, spec: str) -> str:
        return self.MARK


def _saved_by(callback: "ModelCheckpoint", folder: str) -> set[str]:
    """Returns the paths with names that a ModelCheckpoint gives its checkpoints, the last ones excepted."""
    if callback.save_weights_only:  # nothing to go on from
        return set()
    name = callback._format_checkpoint_name(
        callback.filename, _AnyMetrics(), auto_insert_metric_name=callback.auto_insert_metric_name
    )
    pattern = re.escape(name).replace(re.escape(_AnyMetrics.MARK), ".+")
    version = rf"({re.escape(callback.CHECKPOINT_JOIN_CHAR)}v[0-9]+)?"
    whole = re.compile(pattern + version + re.escape(callback.FILE_EXTENSION))
    return {path for path in paths_in(folder) if whole.fullmatch(os.path.basename(path))}


def find_last(callback: "ModelCheckpoint", trainer: "Trainer", folder: str | Path) -> set[str]:
    """Returns the paths of all checkpoints in a folder that have a name of the last one of ``callback``."""
    found = paths_in(folder)
    if not saves_at_path(trainer.strategy):
        found = without_more_names(found, callback.FILE_EXTENSION)
    names = ((path, os.path.splitext(os.path.basename(path))) for path in found)
    return {
        path
        for path, (stem, suffix) in names
        if suffix == callback.FILE_EXTENSION and re.match(callback.CHECKPOINT_NAME_LAST, stem)
    }
