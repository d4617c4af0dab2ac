"""Waits and errors of saves in the background, in the Trainer's loops and at the end of its runs.

A save that failed is taken back out of the fields of its ModelCheckpoint, and raised, when all ranks are at the same
place: before a step, before the next save, and at the end of training. Before each step rank zero broadcasts whether
there is anything, with what it broadcasts there in any case: whether it has received SIGTERM. A single process does so
as soon as a save settles.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.fabric.storage.background import pending
from lightning.fabric.storage.background.saver import saver_of, saves_here, states_of
from lightning.fabric.storage.background.submissions import without_skipping
from lightning.fabric.storage.collectives.errors import together_in
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.callbacks import tracked_saves
from lightning.pytorch.callbacks.first_error import behind

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint

log = logging.getLogger(__name__)

#: Flags that rank zero broadcasts before each step.
_SIGTERM, _SETTLED = 1, 2


def flags_before_step(trainer: "Trainer") -> int:
    """Returns the flags of this rank, of which those of rank zero are broadcast before a step."""
    has_settled = tracked_saves.saves_in_background(trainer) and pending.news() is not None
    return _SIGTERM * bool(getattr(trainer, "received_sigterm", False)) + _SETTLED * has_settled


def act_on_flags(trainer: "Trainer", flags: int) -> bool:
    """Settles saves if the flags of rank zero say so; a collective call.

    Returns:
        Whether rank zero has received SIGTERM.

    Raises:
        OSError: A checkpoint could not be saved or removed; or whatever else the reason was. Every rank raises it.
    """
    has_received_sigterm = bool(flags & _SIGTERM)
    if flags & _SETTLED and not has_received_sigterm:  # which ends with a drain
        _settle_together(trainer)
    return has_received_sigterm


def _are_steps_together(trainer: "Trainer") -> bool:
    """Returns whether rank zero broadcasts flags before each step."""
    return trainer.world_size > 1 and _distributed_is_initialized()


def _settle_together(trainer: "Trainer") -> None:
    last = trainer.strategy.broadcast(pending.news())
    _settle_and_agree(trainer, lambda: None if last is None else pending.settle_up_to(last))


def _settle_and_agree(trainer: "Trainer", settle: Callable[[], None]) -> None:
    """Raises the error of ``settle`` once the fields of all callbacks show which saves have succeeded."""
    doing = "waiting for what is saved in the background"
    failed: Exception | None = None
    with together_in(trainer.strategy, doing):
        try:
            settle()
        except Exception as error:
            failed = error
    for callback in tracked_saves.with_history(trainer):
        tracked_saves.agree(callback, trainer)
    with together_in(trainer.strategy, doing):
        if failed is not None:
            raise failed


def step_ended(trainer: "Trainer") -> None:
    """Settles saves between two steps of training, and allocates memory for the first one.

    Raises:
        OSError: A checkpoint could not be saved or removed; or whatever else the reason was.
    """
    if not _are_steps_together(trainer):
        pending.settle()
    saver = saver_of(trainer.strategy.checkpoint_io)
    if saver is not None and not saver.is_warm and trainer.global_step > 0 and saves_here(trainer.strategy):
        module = trainer.lightning_module
        saver.warm([*module.parameters(), *module.buffers(), *states_of(trainer.optimizers)], trainer.strategy)


def begin(callback: "ModelCheckpoint", trainer: "Trainer") -> None:
    """Settles earlier saves, before ``callback`` changes its fields for a save; a collective call.

    Raises:
        OSError: An earlier save has failed. Every rank raises it.
    """
    if tracked_saves.saves_in_background(trainer):
        if _are_steps_together(trainer) and not trainer.interrupted:
            _settle_together(trainer)
        else:
            tracked_saves.agree(callback, trainer)
    tracked_saves.history_of(callback).begin(callback)


def drain(trainer: "Trainer") -> None:
    """Waits until all saves and removals in flight are durable; a collective call.

    Raises:
        OSError: A checkpoint could not be saved; or whatever else the reason was. Every rank raises it.
    """
    if tracked_saves.saves_in_background(trainer):
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
    """Waits for all saves in flight, and logs their errors, where something else has to be done in any case."""
    try:
        pending.drain()
    except Exception as error:
        log.error(f"A checkpoint was not saved: {type(error).__name__}: {redact(str(error))}")


@contextmanager
def ending(exception: BaseException) -> Iterator[None]:
    """Waits for all saves in flight, before a body that runs what callbacks do about an exception.

    Args:
        exception: The exception that ends the run. Errors of the saves are logged, and noted in it.
    """
    with behind(exception):
        pending.drain()
    with without_skipping():
        yield


def finalize_failed(trainer: "Trainer", exception: BaseException) -> None:
    """Waits for all saves in flight, and has each logger end a run that failed.

    It is not a collective call, for other ranks may be elsewhere.

    Args:
        trainer: The Trainer whose run ends.
        exception: The exception that ends it. Other errors are logged, and noted in it.
    """
    with behind(exception):
        pending.drain()
    for callback in tracked_saves.with_history(trainer):
        history = tracked_saves.history_of(callback)
        # a rank that only waited for others cannot know, and what has been given up is not there
        outcomes = {number: entry.is_durable for number, entry in history.pending.items()}
        with behind(exception):
            tracked_saves.apply_outcomes(callback, trainer, outcomes)
        history.before = None
    with behind(exception):
        pending.drain()  # of what has been removed since
    for logger in trainer.loggers:
        with behind(exception):
            logger.finalize("failed")
