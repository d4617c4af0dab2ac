"""Saves and removals of a ModelCheckpoint, each tracked until all ranks know whether it has succeeded.

On each rank a ModelCheckpoint decides by its fields whether to save, and some of these decisions are collective. In a
distributed job the fields must therefore be the same on all ranks, while only some of them know whether a save in the
background has succeeded. :func:`agree` takes the changes of those that failed back on all ranks alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING
from weakref import proxy

from lightning.fabric.storage.background import pending
from lightning.fabric.storage.background.saver import saver_of
from lightning.fabric.storage.background.submissions import unconditionally, watching, without_skipping
from lightning.fabric.storage.collectives.errors import together_in
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.redact import redact
from lightning.pytorch.callbacks import checkpoint_places
from lightning.pytorch.callbacks.checkpoint_history import (
    Entry,
    History,
    changes_since,
    only_durable,
    paths_in,
    undo,
    undone_if_it_fails,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint

_HISTORY = "_history_of_saves"


def history_of(callback: "ModelCheckpoint") -> History:
    """Returns the history of a ModelCheckpoint, which is an attribute of it."""
    history: History = vars(callback).setdefault(_HISTORY, History())
    return history


def with_history(trainer: "Trainer") -> "list[ModelCheckpoint]":
    """Returns the callbacks that have saved."""
    return [callback for callback in trainer.checkpoint_callbacks if _HISTORY in vars(callback)]  # type: ignore[misc]


def saves_in_background(trainer: "Trainer") -> bool:
    """Returns whether the Trainer's plugin saves in the background."""
    return saver_of(trainer.strategy.checkpoint_io) is not None


def save(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> None:
    """Saves a checkpoint, and notifies the loggers once it is durable."""
    with _saving(callback, trainer, path) as entry:
        trainer.save_checkpoint(path, callback.save_weights_only)
    callback._last_global_step_saved = trainer.global_step
    callback._last_checkpoint_saved = path
    if not entry.saves:
        _notify_loggers(callback, trainer)
    if saves_in_background(trainer):
        if entry.saves:
            entry.saves[-1].when_settled(lambda _: _settled(callback, trainer, entry))
        _append(callback, trainer, entry)


@contextmanager
def _saving(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> Iterator[Entry]:
    """Tracks the saves that a body begins at ``path``; the target is their entry."""
    entry = Entry(path, {})
    if trainer.is_global_zero:
        checkpoint_places.detach(path)
    history = history_of(callback)
    if not saves_in_background(trainer):
        with undone_if_it_fails(callback, history):
            yield entry
        return
    if history.before is None:
        history.begin(callback)
    history.number += 1
    history.is_saving = True
    # the state of this step is being saved already, so that a second save of it is never too early, but for its file
    is_second = callback._last_global_step_saved == trainer.global_step
    try:
        with watching() as entry.saves, without_skipping() if is_second else nullcontext():
            yield entry
    except BaseException:
        history.is_saving = False
        entry.failed = True
        _append(callback, trainer, entry)
        raise
    history.is_saving = False


def _append(callback: "ModelCheckpoint", trainer: "Trainer", entry: Entry) -> None:
    history = history_of(callback)
    if history.before is not None:
        entry.changes = changes_since(history.before, callback)
    history.before = None
    history.pending[history.number] = history.last = entry
    if trainer.world_size == 1:
        agree(callback, trainer)


def _settled(callback: "ModelCheckpoint", trainer: "Trainer", entry: Entry) -> None:
    if entry.is_durable:
        _finish(callback, trainer, entry)
        _notify_loggers(callback, trainer)
    if trainer.world_size == 1 and not history_of(callback).is_saving:
        agree(callback, trainer)


def _notify_loggers(callback: "ModelCheckpoint", trainer: "Trainer") -> None:
    if trainer.is_global_zero:
        with only_durable(callback, history_of(callback)):
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(callback))


def agree(callback: "ModelCheckpoint", trainer: "Trainer") -> None:
    """Takes back what has failed according to rank zero; a collective call."""
    history = history_of(callback)
    if history.pending:
        apply_outcomes(callback, trainer, trainer.strategy.broadcast(history.outcomes()))


def apply_outcomes(callback: "ModelCheckpoint", trainer: "Trainer", outcomes: dict[int, bool]) -> None:
    """Finishes the saves that have succeeded, and takes back those that have failed; by the numbers of saves."""
    history = history_of(callback)
    for number, is_durable in outcomes.items():
        if is_durable:
            entry = history.pending.pop(number)
            entry.outcome = True
            _finish(callback, trainer, entry)
        else:
            _remove_now(callback, trainer, undo(callback, history, number))


def _finish(callback: "ModelCheckpoint", trainer: "Trainer", entry: Entry) -> None:
    """Does the work that was put off until a save is durable, unless it is done."""
    if entry.link and not entry.is_linked and trainer.is_global_zero:
        checkpoint_places.make_link(entry.path, entry.link)
    entry.is_linked = True
    removals, entry.removals = entry.removals, []
    _remove_now(callback, trainer, removals)


def _remove_now(callback: "ModelCheckpoint", trainer: "Trainer", paths: list[str]) -> None:
    """Removes checkpoints that durable ones have replaced, whether or not the saves in flight succeed."""
    in_use = paths_in(callback)  # again, by a later save to the same path
    entries = {entry.path: entry for entry in history_of(callback).pending.values()}
    with unconditionally():
        for path in (path for path in paths if path not in in_use):
            if path in entries:
                entries[path].removals.append(path)
            else:
                trainer.strategy.remove_checkpoint(path)


def link(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> None:
    """Makes a link at ``path`` that leads to the last checkpoint, once that is durable; a collective call.

    On a remote file system it is a copy. Where only a plugin of the user's knows where that checkpoint is, it is saved
    once more.
    """
    target = callback._last_checkpoint_saved
    if not checkpoint_places.can_be_linked_to(trainer, target):
        if target != path:
            callback._save_checkpoint(trainer, path)
        return
    history, is_local = history_of(callback), locate(path).is_local
    last = next((entry for entry in reversed(history.pending.values()) if entry.path == target), None)
    history.last = last
    with undone_if_it_fails(callback, history) if last is None else nullcontext():
        if not is_local:
            checkpoint_places.copy_as_last(callback, trainer, path, is_durable=last is None)
        elif last is None:
            callback._link_checkpoint(trainer, target, path)
    if last is None:
        return
    last.is_linked = not is_local  # the queue does it
    last.link = path
    if history.before is not None:
        for key, (before, after) in changes_since(history.before, callback).items():
            first, _ = last.changes.get(key, (before, after))
            last.changes[key] = (first, after)
    history.before = None


def remove(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> None:
    """Removes a checkpoint, after the save that replaces it.

    The queue in the background keeps that order, but for a checkpoint that a link may lead to: that has to be renewed
    before.
    """
    is_later = saves_in_background(trainer)
    last = history_of(callback).last if is_later and callback.save_last == "link" else None
    if last is None or last.outcome:
        with nullcontext() if is_later else together_in(trainer.strategy, "removing a checkpoint"):
            trainer.strategy.remove_checkpoint(path)
    elif last.outcome is None:
        last.removals.append(path)


def file_exists(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> bool:
    """Returns whether there is a checkpoint at ``path`` once all saves and removals have succeeded.

    It is a collective call, in which rank zero looks.
    """
    with together_in(trainer.strategy, f"looking for {redact(path)}"):
        exists = trainer.is_global_zero and pending.will_exist(path)
        if exists is None:
            exists = checkpoint_places.is_saved(callback, trainer, path)
    return trainer.strategy.reduce_boolean_decision(exists, all=False)
