"""What the Trainer and ModelCheckpoint do about saves that go on in the background.

On each rank a ModelCheckpoint decides by its fields whether to save, and some of these decisions are collective. In a
distributed job the fields must therefore be the same on all ranks, while only some of them know what became of a save.
So a save that failed is taken back out of the fields, and raised, when all ranks are at the same place: before a step,
before the next save, and at the end of training. Before each step rank zero tells the others whether there is anything,
with what it tells them there in any case: whether it has received SIGTERM. A single process does so as soon as it hears
of a save.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING
from weakref import proxy

from lightning.fabric.storage.background import pending
from lightning.fabric.storage.background.queue import unconditionally, watching, without_skipping
from lightning.fabric.storage.background.saver import saver_of, saves_here, states_of
from lightning.fabric.storage.collectives.errors import together_in
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.callbacks.checkpoint_history import (
    History,
    Record,
    changes_since,
    only_durable,
    paths_in,
    undo,
    undone_if_it_fails,
)
from lightning.pytorch.callbacks.checkpoint_places import (
    can_be_linked_to,
    copy_as_last,
    detach,
    is_saved,
    make_link,
)
from lightning.pytorch.callbacks.first_error import behind

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint

log = logging.getLogger(__name__)

_HISTORY = "_history_of_saves"


def _history(callback: "ModelCheckpoint") -> History:
    history: History = vars(callback).setdefault(_HISTORY, History())
    return history


def _pending(callback: "ModelCheckpoint") -> dict[int, Record]:
    return _history(callback).pending if _HISTORY in vars(callback) else {}


def _saves_in_background(trainer: "Trainer") -> bool:
    return saver_of(trainer.strategy.checkpoint_io) is not None


#: What rank zero tells the others before each step: the sum of these.
_SIGTERM, _NEWS = 1, 2


def news(trainer: "Trainer") -> int:
    """Returns what a rank has to tell the others before a step."""
    has_received_sigterm = getattr(trainer, "received_sigterm", False)
    has_news = _saves_in_background(trainer) and pending.news() is not None
    return (_SIGTERM if has_received_sigterm else 0) + (_NEWS if has_news else 0)


def hear(trainer: "Trainer", told: int) -> bool:
    """Takes what rank zero has told all ranks before a step; a collective call.

    Returns:
        Whether it has received SIGTERM.

    Raises:
        OSError: A checkpoint could not be saved or removed; or whatever else the reason was. Every rank raises it.
    """
    has_received_sigterm = bool(told & _SIGTERM)
    if told & _NEWS and not has_received_sigterm:  # which ends with a drain
        _settle_together(trainer)
    return has_received_sigterm


def _are_steps_together(trainer: "Trainer") -> bool:
    """Whether ranks hear from rank zero before each step."""
    return trainer.world_size > 1 and _distributed_is_initialized()


def _settle_together(trainer: "Trainer") -> None:
    told = trainer.strategy.broadcast(pending.news())
    _settle_and_agree(trainer, lambda: None if told is None else pending.settle_up_to(told))


def _settle_and_agree(trainer: "Trainer", settle: Callable[[], None]) -> None:
    """Raises what ``settle`` does when the fields of all callbacks say what became of the saves."""
    doing = "waiting for what is saved in the background"
    failed: Exception | None = None
    with together_in(trainer.strategy, doing):
        try:
            settle()
        except Exception as error:
            failed = error
    for callback in _with_history(trainer):
        _agree(callback, trainer)
    with together_in(trainer.strategy, doing):
        if failed is not None:
            raise failed


def step_ended(trainer: "Trainer") -> None:
    """To be called between two steps of training.

    Raises:
        OSError: As for :func:`~lightning.fabric.storage.background.pending.settle`.
    """
    if not _are_steps_together(trainer):
        pending.settle()
    saver = saver_of(trainer.strategy.checkpoint_io)
    if saver is not None and not saver.is_warm and trainer.global_step > 0 and saves_here(trainer.strategy):
        module = trainer.lightning_module
        saver.warm([*module.parameters(), *module.buffers(), *states_of(trainer.optimizers)])


def begin(callback: "ModelCheckpoint", trainer: "Trainer") -> None:
    """To be called before ``callback`` changes its fields for a save; a collective call.

    Raises:
        OSError: An earlier save has failed. Every rank raises it.
    """
    if _saves_in_background(trainer):
        if _are_steps_together(trainer) and not trainer.interrupted:
            _settle_together(trainer)
        else:
            _agree(callback, trainer)
    _history(callback).begin(callback)


def save(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> None:
    """Saves a checkpoint, and lets the loggers know of it once it is durable."""
    with _saving(callback, trainer, path) as record:
        trainer.save_checkpoint(path, callback.save_weights_only)
    callback._last_global_step_saved = trainer.global_step
    callback._last_checkpoint_saved = path
    _remember(callback, trainer, record)


@contextmanager
def _saving(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> Iterator[Record]:
    """For a body that saves to ``path``; the target is what :func:`_remember` takes."""
    record = Record(path, {})
    if trainer.is_global_zero:
        detach(path)
    history = _history(callback)
    if not _saves_in_background(trainer):
        with undone_if_it_fails(callback, history):
            yield record
        return
    if history.before is None:
        history.begin(callback)
    history.number += 1
    history.is_saving = True
    # the state of this step is being saved already, so that a second save of it is never too early, but for its file
    is_second = callback._last_global_step_saved == trainer.global_step
    try:
        with watching() as record.saves, without_skipping() if is_second else nullcontext():
            yield record
    except BaseException:
        history.is_saving = False
        record.failed = True
        _append(callback, trainer, record)
        raise
    history.is_saving = False


def _remember(callback: "ModelCheckpoint", trainer: "Trainer", record: Record) -> None:
    saves = record.saves
    if not saves:
        _notify_loggers(callback, trainer)
    if _saves_in_background(trainer):
        if saves:
            saves[-1].when_settled(lambda _: _settled(callback, trainer, record))
        _append(callback, trainer, record)


def _append(callback: "ModelCheckpoint", trainer: "Trainer", record: Record) -> None:
    history = _history(callback)
    if history.before is not None:
        record.changes = changes_since(history.before, callback)
    history.before = None
    history.pending[history.number] = history.last = record
    if trainer.world_size == 1:
        _agree(callback, trainer)


def _settled(callback: "ModelCheckpoint", trainer: "Trainer", record: Record) -> None:
    if record.is_durable:
        _finish(callback, trainer, record)
        _notify_loggers(callback, trainer)
    if trainer.world_size == 1 and not _history(callback).is_saving:
        _agree(callback, trainer)


def _notify_loggers(callback: "ModelCheckpoint", trainer: "Trainer") -> None:
    if trainer.is_global_zero:
        history = _history(callback) if _HISTORY in vars(callback) else None
        with only_durable(callback, history) if history else nullcontext():
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(callback))


def _agree(callback: "ModelCheckpoint", trainer: "Trainer") -> None:
    """Takes back what failed according to rank zero; a collective call."""
    if _pending(callback):
        _apply(callback, trainer, trainer.strategy.broadcast(_history(callback).outcomes()))


def _apply(callback: "ModelCheckpoint", trainer: "Trainer", outcomes: dict[int, bool]) -> None:
    history = _history(callback)
    for number, is_durable in outcomes.items():
        if is_durable:
            record = history.pending.pop(number)
            record.outcome = True
            _finish(callback, trainer, record)
        else:
            _remove_now(callback, trainer, undo(callback, history, number))


def _finish(callback: "ModelCheckpoint", trainer: "Trainer", record: Record) -> None:
    """Does what was put off until a save is durable, unless that is done."""
    if record.link and not record.is_linked and trainer.is_global_zero:
        make_link(record.path, record.link)
    record.is_linked = True
    removals, record.removals = record.removals, []
    _remove_now(callback, trainer, removals)


def _remove_now(callback: "ModelCheckpoint", trainer: "Trainer", paths: list[str]) -> None:
    """Removes what has been replaced by what is durable, whatever becomes of the saves that are on their way."""
    in_use = paths_in(callback)  # again, by a later save to the same path
    saves = {record.path: record for record in _pending(callback).values()}
    with unconditionally():
        for path in paths:
            if path in saves and path not in in_use:
                saves[path].removals.append(path)
            elif path not in in_use:
                trainer.strategy.remove_checkpoint(path)


def link(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> None:
    """Makes a link at ``path`` that leads to the last checkpoint, once that is durable; a collective call.

    On a remote file system it is a copy. Where only a plugin of the user's knows where that checkpoint is, it is saved
    once more.
    """
    target = callback._last_checkpoint_saved
    if not can_be_linked_to(trainer, target):
        if target != path:
            callback._save_checkpoint(trainer, path)
        return
    last = next((record for record in reversed(_pending(callback).values()) if record.path == target), None)
    history = _history(callback)
    history.last = last
    with undone_if_it_fails(callback, history) if last is None else nullcontext():
        if not locate(path).is_local:
            copy_as_last(callback, trainer, path, is_durable=last is None)
        elif last is None:
            callback._link_checkpoint(trainer, target, path)
    if last is None:
        return
    last.is_linked = not locate(path).is_local  # the queue does it
    last.link = path
    if history.before is not None:
        for key, (before, after) in changes_since(history.before, callback).items():
            first, _ = last.changes.get(key, (before, after))
            last.changes[key] = (first, after)
    history.before = None


def remove(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> None:
    """Removes a checkpoint, after the save that replaces it.

    That is what the queue in the background does, but for what a link may lead to, which has to be renewed before.
    """
    last = _history(callback).last if _saves_in_background(trainer) and callback.save_last == "link" else None
    if last is None or last.outcome:
        waits = (
            nullcontext() if _saves_in_background(trainer) else together_in(trainer.strategy, "removing a checkpoint")
        )
        with waits:
            trainer.strategy.remove_checkpoint(path)
    elif last.outcome is None:
        last.removals.append(path)


def file_exists(callback: "ModelCheckpoint", trainer: "Trainer", path: str) -> bool:
    """Whether there is a checkpoint at ``path``, when all saves and removals have succeeded; a collective call.

    Rank zero looks.
    """
    with together_in(trainer.strategy, f"looking for {redact(path)}"):
        exists = trainer.is_global_zero and pending.will_exist(path)
        if exists is None:
            exists = is_saved(callback, trainer, path)
    return trainer.strategy.reduce_boolean_decision(exists, all=False)


def drain(trainer: "Trainer") -> None:
    """Waits until all that is on its way is durable; a collective call.

    Raises:
        OSError: A checkpoint could not be saved; or whatever else the reason was. Every rank raises it.
    """
    if not _saves_in_background(trainer):
        return
    _settle_and_agree(trainer, pending.drain)


def finalize(trainer: "Trainer") -> None:
    """Waits as :func:`drain` does, and has the loggers and the profiler write what they have; a collective call.

    Some ranks' may have nothing to write, and wait for the others.
    """
    drain(trainer)
    with together_in(trainer.strategy, "writing logs"):
        for logger in trainer.loggers:
            logger.finalize("success")
    with together_in(trainer.strategy, "writing the profiler's report"):
        trainer.profiler.describe()  # type: ignore[attr-defined]


def drain_and_log() -> None:
    """Waits as :func:`drain` does, where something else has to be done whatever happens: what failed is logged."""
    try:
        pending.drain()
    except Exception as error:
        log.error(f"A checkpoint was not saved: {type(error).__name__}: {redact(str(error))}")


@contextmanager
def ending(exception: BaseException) -> Iterator[None]:
    """Waits for all saves in flight, and lets the body call what callbacks do about an exception.

    Args:
        exception: What ends the run. What failed is logged, and added to it.
    """
    with behind(exception):
        pending.drain()
    with without_skipping():
        yield


def finalize_failed(trainer: "Trainer", exception: BaseException) -> None:
    """Waits as :func:`drain` does, and has each logger end a run that ``exception`` ends; not a collective call."""
    _drain_on_exception(trainer, exception)
    for logger in trainer.loggers:
        with behind(exception):
            logger.finalize("failed")


def _drain_on_exception(trainer: "Trainer", exception: BaseException) -> None:
    """Waits as :func:`drain` does; not a collective call, for other ranks may be elsewhere.

    Args:
        trainer: Whose run ends.
        exception: What ends it. What failed is logged, and added to it.
    """
    with behind(exception):
        pending.drain()
    for callback in _with_history(trainer):
        history = _history(callback)
        # a rank that only waited for others cannot know, and what has been given up is not there
        outcomes = {number: record.is_durable for number, record in history.pending.items()}
        with behind(exception):
            _apply(callback, trainer, outcomes)
        history.before = None
    with behind(exception):
        pending.drain()  # of what has been removed since


def _with_history(trainer: "Trainer") -> "list[ModelCheckpoint]":
    return [callback for callback in trainer.checkpoint_callbacks if _HISTORY in vars(callback)]  # type: ignore[misc]
