"""Where the checkpoints of a ModelCheckpoint are, on a local disk or at a URL, and what the last one is called."""

import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.storage.background.queue import unconditionally
from lightning.fabric.storage.background.saver import saver_of
from lightning.fabric.storage.collectives.errors import from_rank_zero, together_in
from lightning.fabric.storage.own_plugins import loads_from_path, saves_at_path
from lightning.fabric.storage.paths.location import locate, text_of_folder
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.save_report import SaveReport, reporting
from lightning.fabric.storage.save_report import stage as report_stage
from lightning.fabric.storage.tools.copy import duplicate
from lightning.fabric.storage.tools.discover import (
    is_there,
    times_of_complete,
    warn_of_skipped,
    why_incomplete,
    without_more_names,
)
from lightning.fabric.storage.tools.discover import paths_in as paths_in_folder
from lightning.fabric.storage.tools.preflight import has_checkpoints
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks.checkpoint_history import paths_in

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint

log = logging.getLogger(__name__)

_Path = str | os.PathLike[str]
#: An attribute of a ModelCheckpoint: what it has copied where, and the step of that.
_COPIED = "_copied_as_last"


def may_remove(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> bool:
    """Whether a checkpoint at a URL, which ``callback`` has replaced by another one, is to be removed.

    As on a local disk, what the run was resumed from is kept, and what is not in the callback's folder. So is what
    nothing can be told about.
    """
    try:
        place = locate(path)
        if trainer.ckpt_path is not None and place.is_same(locate(trainer.ckpt_path)):
            return False
        return callback.dirpath is not None and place.is_within(locate(callback.dirpath))
    except (ImportError, OSError, ValueError) as error:
        rank_zero_warn(f"{redact(path)!r} is not removed, for it cannot be asked about: {redact(str(error))}")
        return False


def is_same_folder(one: _Path | None, other: _Path | None) -> bool:
    """Whether two names of folders are those of one, but for slashes at the end of a URL."""
    if one == other or one is None or other is None:
        return one == other
    try:
        return text_of_folder(one) == text_of_folder(other)
    except ValueError as error:  # what was a URL once; the callback warns that its folder has changed
        log.debug(f"{redact(str(other))!r} is not the folder {redact(str(one))!r}: {error}")
        return False


def is_in_folder(callback: "ModelCheckpoint", path: str) -> bool:
    """Whether a checkpoint is in the callback's folder, as far as the text tells."""
    return callback.dirpath is not None and path.startswith(f"{text_of_folder(callback.dirpath).rstrip('/')}/")


def is_saved(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> bool:
    """Whether there is a checkpoint at ``path``, or one that a plugin of the user's has saved for that path."""
    if saves_at_path(trainer.strategy):
        return _is_something_at(path)
    return path in paths_in(callback) or is_there(path)


def _is_something_at(path: str) -> bool:
    place = locate(path)
    with questions_named(place):
        return place.kind() != "nothing"


def can_be_linked_to(trainer: "Trainer", path: str) -> bool:
    """Whether a checkpoint that has been saved, or is about to be, is at ``path`` itself; a collective call."""
    if saves_at_path(trainer.strategy):
        return True
    if saver_of(trainer.strategy.checkpoint_io) is not None:
        return loads_from_path(trainer.strategy)  # it may not be there yet
    return from_rank_zero(lambda: _is_something_at(path), f"looking for {redact(path)}")


def times_of_last(trainer: "Trainer", candidates: Iterable[str | None]) -> dict[str, float]:
    """When each of the checkpoints that ``ckpt_path="last"`` may mean was saved.

    Where one of them is incomplete, what else each ModelCheckpoint has saved in its folder counts, too: the newest of
    all that is complete is what the run goes on from.

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
    left = {path: _what_is_left_at(path) for path in sorted(paths - times.keys())}
    incomplete = {path: why for path, why in left.items() if why}
    folders = [(callback, os.fspath(_folder_of(callback, trainer))) for callback in _model_checkpoints(trainer)]
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


def _what_is_left_at(path: str) -> str:
    """What is missing of a checkpoint; empty if there is nothing of it."""
    place = locate(path)
    if place.is_broken_link():
        return f"{place} is a link that leads to nothing"
    return "" if place.kind() == "nothing" else why_incomplete(path) or ""


def _model_checkpoints(trainer: "Trainer") -> "list[ModelCheckpoint]":
    return [callback for callback in trainer.checkpoint_callbacks if hasattr(callback, "_find_last_checkpoints")]  # type: ignore[misc]


def _folder_of(callback: "ModelCheckpoint", trainer: "Trainer") -> _Path:
    folder: _Path = callback._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
    return folder


def _moved_away(callback: "ModelCheckpoint", folder: str, paths: set[str]) -> dict[str, str]:
    """The last checkpoints that a save, which was killed, has moved away from where its own was to be."""
    last = rf"({re.escape(callback.CHECKPOINT_NAME_LAST)}.*{re.escape(callback.FILE_EXTENSION)})\.[0-9a-f]{{12}}\.old"
    if locate(folder).shares_names():
        return {}  # where that is not done
    found = ((path, re.fullmatch(last, os.path.basename(path))) for path in paths_in_folder(folder))
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
    """The paths of what is called as a ModelCheckpoint calls its checkpoints, the last ones excepted."""
    if callback.save_weights_only:  # nothing to go on from
        return set()
    name = callback._format_checkpoint_name(
        callback.filename, _AnyMetrics(), auto_insert_metric_name=callback.auto_insert_metric_name
    )
    pattern = re.escape(name).replace(re.escape(_AnyMetrics.MARK), ".+")
    version = rf"({re.escape(callback.CHECKPOINT_JOIN_CHAR)}v[0-9]+)?"
    whole = re.compile(pattern + version + re.escape(callback.FILE_EXTENSION))
    return {path for path in paths_in_folder(folder) if whole.fullmatch(os.path.basename(path))}


def find_last(callback: "ModelCheckpoint", trainer: "Trainer", folder: str | Path) -> set[str]:
    """Returns the paths of all checkpoints in a folder that are called as the last one of ``callback`` is."""
    found = paths_in_folder(folder)
    if not saves_at_path(trainer.strategy):
        found = without_more_names(found, callback.FILE_EXTENSION)
    paths = ((path, Path(path)) for path in found)
    return {
        path
        for path, name in paths
        if name.suffix == callback.FILE_EXTENSION and re.match(callback.CHECKPOINT_NAME_LAST, name.stem)
    }


def set_up(
    callback: "ModelCheckpoint",
    trainer: "Trainer",
    folder: str | Path,
    stage: str,
    look: Callable[[_Path], object],
) -> None:
    """Gives a callback its folder, and looks there before a fit; a collective call.

    Args:
        callback: The callback.
        trainer: The Trainer that begins.
        folder: The folder that this rank has found; that of rank zero counts.
        stage: The stage of the Trainer.
        look: As for :func:`look_at_folder`.
    """
    folder = trainer.strategy.broadcast(folder)
    if stage == "fit":
        warn_of_local_folder(callback, trainer, folder)
    callback.dirpath = folder
    callback._fs = get_filesystem(folder or "")
    if stage == "fit":
        look_at_folder(callback, trainer, look)


def warn_of_local_folder(callback: "ModelCheckpoint", trainer: "Trainer", folder: _Path) -> None:
    """Warns if checkpoints go to this machine since a logger does, while the Trainer was given a URL for what it saves.

    Args:
        callback: As it was before it was given ``folder``.
        trainer: Whose first logger decides where checkpoints go that have no ``dirpath``.
        folder: Where the checkpoints are going to be.
    """
    root = locate(trainer.default_root_dir)
    if callback.dirpath is None and not root.is_local and locate(folder).is_local:
        rank_zero_warn(
            f"Checkpoints go to {folder} on this machine, to the folder of {type(trainer.loggers[0]).__name__}, and not"
            f" to the `default_root_dir` {root}. To have them there, give that to ModelCheckpoint as its"
            " `dirpath`, or to the logger as its `save_dir`."
        )


def look_at_folder(callback: "ModelCheckpoint", trainer: "Trainer", look: Callable[[_Path], object]) -> None:
    """Has rank zero look at the folder that checkpoints go to, unless another callback has done so; a collective call.

    Args:
        callback: Whose folder it is.
        trainer: That is about to fit.
        look: Warns of what is there, and raises what every rank is to raise.
    """
    folder = callback.dirpath
    if folder is None or (getattr(trainer, "fast_dev_run", False) and not locate(folder).is_local):
        return  # nothing is saved
    before = itertools.takewhile(lambda other: other is not callback, trainer.checkpoint_callbacks)
    if any(is_same_folder(getattr(other, "dirpath", None), folder) for other in before):
        return
    with together_in(trainer.strategy, f"looking at {redact(str(folder))}"):
        if trainer.is_global_zero:
            look(folder)


def look_at_root(trainer: "Trainer") -> None:
    """As :func:`look_at_folder`, before a fit, for a URL as `default_root_dir` that no callback's folder is in."""
    root = locate(trainer.default_root_dir)
    if trainer.state.fn != "fit" or root.is_local or getattr(trainer, "fast_dev_run", False):
        return
    folders = [locate(path) for path in (getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks) if path]
    if any(folder.is_same(root) or folder.is_within(root) for folder in folders):
        return
    with together_in(trainer.strategy, f"looking at {root}"):
        if trainer.is_global_zero:
            has_checkpoints(root)


def make_link(path: str, link: str) -> None:
    """Makes ``link`` lead to ``path``, both local; there is no moment at which it leads to nothing."""
    if os.path.abspath(path) == os.path.abspath(link):
        return
    if os.path.isdir(link) and not os.path.islink(link):
        shutil.rmtree(link)  # a sharded checkpoint, which cannot be replaced by a link at once
    beside = f"{link}.{os.getpid()}"
    try:
        os.symlink(os.path.relpath(path, os.path.dirname(link)), beside)
    except OSError:  # of a file system that has no links
        shutil.copy(path, beside)
    os.replace(beside, link)


def link_checkpoint(trainer: "Trainer", path: str, link: str) -> None:
    """As :func:`make_link`, by rank zero; a collective call."""
    with together_in(trainer.strategy, f"linking to {redact(path)}"):
        if trainer.is_global_zero:
            make_link(path, link)
    trainer.strategy.barrier()


def detach(path: str) -> None:
    """Removes a link to a neighbour, as :func:`make_link` makes it: a save through it would end in that checkpoint."""
    if locate(path).is_local and os.path.islink(path) and not os.path.dirname(os.readlink(path)):
        os.unlink(path)


def copy_as_last(callback: "ModelCheckpoint", trainer: "Trainer", path: str, is_durable: bool) -> None:
    """Does what a link does on a local disk: the store makes a copy, unless that is there already; a collective call.

    Args:
        callback: Whose last checkpoint it is.
        trainer: If it saves in the background, so it copies.
        path: The URL of the copy.
        is_durable: Whether the last checkpoint is, so that the copy does not depend on saves that are on their way.
    """
    target = callback._last_checkpoint_saved
    copied = (target, path, callback._last_global_step_saved)
    if vars(callback).get(_COPIED) == copied or target == path:
        return
    saver = saver_of(trainer.strategy.checkpoint_io)
    if saver is None:
        # in the profiler's report; it is no save of its own
        doing = f"copying {redact(target)} to {redact(path)}"
        with reporting(SaveReport(locate(path))), report_stage("link"), together_in(trainer.strategy, doing):
            if trainer.is_global_zero:
                duplicate(target, path)
    elif trainer.is_global_zero:
        with unconditionally() if is_durable else nullcontext():
            saver.copy_when_saved(locate(path), lambda: duplicate(target, path))
    vars(callback)[_COPIED] = copied
