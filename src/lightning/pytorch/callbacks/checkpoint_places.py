"""The folders, links and copies of a ModelCheckpoint's checkpoints, on a local disk or at a URL."""

import itertools
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.fabric.storage.background.saver import saver_of
from lightning.fabric.storage.background.submissions import unconditionally
from lightning.fabric.storage.collectives.errors import from_rank_zero, together_in
from lightning.fabric.storage.own_plugins import loads_from_path, saves_at_path
from lightning.fabric.storage.paths.location import locate, text_of_folder
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.save_report import SaveReport, reporting
from lightning.fabric.storage.save_report import stage as report_stage
from lightning.fabric.storage.tools.copy import duplicate
from lightning.fabric.storage.tools.discover import is_there
from lightning.fabric.storage.tools.preflight import has_checkpoints
from lightning.fabric.storage.transport.errors import ask
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks.checkpoint_history import paths_in

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint

log = logging.getLogger(__name__)

_Path = str | os.PathLike[str]
#: An attribute of a ModelCheckpoint: the last copy that it made, from where to where and at which step.
_COPIED = "_copied_as_last"


def may_remove(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> bool:
    """Returns whether to remove a checkpoint at a URL, which ``callback`` has replaced by another one.

    Like on a local disk, the checkpoint that the run was resumed from is kept, and one that is not in the callback's
    folder. So is one that cannot be asked about.
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
    """Returns whether two names of folders are those of one, but for slashes at the end of a URL."""
    if one == other or one is None or other is None:
        return one == other
    try:
        return text_of_folder(one) == text_of_folder(other)
    except ValueError as error:  # what was a URL once; the callback warns that its folder has changed
        log.debug(f"{redact(str(other))!r} is not the folder {redact(str(one))!r}: {error}")
        return False


def is_in_folder(callback: "ModelCheckpoint", path: str) -> bool:
    """Returns whether the path of a checkpoint begins with the callback's folder."""
    return callback.dirpath is not None and path.startswith(f"{text_of_folder(callback.dirpath).rstrip('/')}/")


def is_saved(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> bool:
    """Returns whether there is a checkpoint at ``path``, or one that a user's plugin has saved for that path."""
    if saves_at_path(trainer.strategy):
        return _is_something_at(path)
    return path in paths_in(callback) or is_there(path)


def _is_something_at(path: str) -> bool:
    place = locate(path)
    return ask(place, place.kind) != "nothing"  # training does not end for a restart


def can_be_linked_to(trainer: "Trainer", path: str) -> bool:
    """Returns whether a checkpoint that has been saved, or is about to be, is at ``path``; a collective call."""
    if saves_at_path(trainer.strategy):
        return True
    if saver_of(trainer.strategy.checkpoint_io) is not None:
        return loads_from_path(trainer.strategy)  # it may not be there yet
    return from_rank_zero(lambda: _is_something_at(path), f"looking for {redact(path)}")


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
        look: Warns of what is in the folder, and raises what every rank is to raise.
    """
    folder = trainer.strategy.broadcast(folder)
    if stage == "fit":
        _warn_of_local_folder(callback, trainer, folder)
    callback.dirpath = folder
    callback._fs = get_filesystem(folder or "")
    if stage == "fit":
        _look_at_folder(callback, trainer, look)


def _warn_of_local_folder(callback: "ModelCheckpoint", trainer: "Trainer", folder: _Path) -> None:
    """Warns of checkpoints that go to this machine with a logger, while the Trainer has a URL as its root.

    The first logger decides where the checkpoints go of a callback without a ``dirpath``.
    """
    root = locate(trainer.default_root_dir)
    if callback.dirpath is None and not root.is_local and locate(folder).is_local:
        rank_zero_warn(
            f"Checkpoints go to {folder} on this machine, to the folder of {type(trainer.loggers[0]).__name__}, and not"
            f" to the `default_root_dir` {root}. To have them there, give that to ModelCheckpoint as its"
            " `dirpath`, or to the logger as its `save_dir`."
        )


def _look_at_folder(callback: "ModelCheckpoint", trainer: "Trainer", look: Callable[[_Path], object]) -> None:
    """Has rank zero look at a callback's folder, unless an earlier callback has done so; a collective call."""
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
    """Has rank zero look at a URL as `default_root_dir` before a fit, unless a callback's folder is in it.

    It is a collective call.
    """
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
    """Makes a link as :func:`make_link` does, on rank zero; a collective call."""
    with together_in(trainer.strategy, f"linking to {redact(path)}"):
        if trainer.is_global_zero:
            make_link(path, link)
    trainer.strategy.barrier()


def detach(path: str) -> None:
    """Removes a link to a neighbour, as :func:`make_link` makes it: a save through it would end in that checkpoint."""
    if locate(path).is_local and os.path.islink(path) and not os.path.dirname(os.readlink(path)):
        os.unlink(path)


def copy_as_last(callback: "ModelCheckpoint", trainer: "Trainer", path: str, is_durable: bool) -> None:
    """Has the store copy the last checkpoint, in the place of a link, unless that is done; a collective call.

    Args:
        callback: The callback that has saved the checkpoint.
        trainer: The Trainer. If it saves in the background, it copies there as well.
        path: The URL of the copy.
        is_durable: Whether the last checkpoint is durable, so that the copy does not depend on saves in flight.
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
