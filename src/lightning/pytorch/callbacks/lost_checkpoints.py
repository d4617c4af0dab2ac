"""Checkpoints that a ModelCheckpoint remembers of an earlier run, and that are no longer there."""

from itertools import islice
from typing import TYPE_CHECKING

from lightning.fabric.storage.collectives.errors import together_in
from lightning.fabric.storage.own_plugins import saves_at_path
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.tools.recorded import why_lost
from lightning.pytorch.callbacks.checkpoint_history import rank
from lightning.pytorch.callbacks.checkpoint_places import is_in_folder
from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: How many reasons a warning gives.
_REASONS = 5


def forget_lost_checkpoints(trainer: "Trainer") -> None:
    """Makes each ModelCheckpoint forget the checkpoints in its loaded state that do not exist or are incomplete.

    Else they would count among the best ``save_top_k``, so that worse ones which are really there are not kept, and
    ``ckpt_path="best"`` would lead to nothing. Nothing is removed from the disk or the store. In a distributed job this
    is a collective call: rank zero looks, so that all ranks remember the same.

    A checkpoint that cannot be asked about is forgotten as well, unless it is in the callback's own folder, where the
    run goes on to save: its store may be out of reach for a moment. Where a plugin of the user's saves, only that knows
    what is where.
    """
    if trainer.state.fn != TrainerFn.FITTING or not saves_at_path(trainer.strategy):
        return
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            with together_in(trainer.strategy, "looking which checkpoints are still there"):
                lost = _lost(callback) if trainer.is_global_zero else set()
            _forget(callback, trainer.strategy.broadcast(lost))


def _lost(callback: ModelCheckpoint) -> set[str]:
    known = [callback.best_model_path, callback.kth_best_model_path, callback.last_model_path, *callback.best_k_models]
    lost: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for path, answer in why_lost(dict.fromkeys(path for path in known if path)).items():
        if isinstance(answer, Exception):
            why = f"{type(answer).__name__}: {redact(str(answer), path)}"
            reason = f"{redact(path)!r} cannot be asked about ({why})"
            to_keep = isinstance(answer, OSError) and is_in_folder(callback, path)
            (unknown if to_keep else lost)[path] = reason
        elif answer is not None:
            lost[path] = answer
    if unknown:
        rank_zero_warn(f"Could not look whether {len(unknown)} checkpoints are complete: {_some(unknown)}")
    if lost:
        rank_zero_warn(
            f"`ModelCheckpoint` no longer counts {len(lost)} of the checkpoints that it knew of: {_some(lost)}"
        )
    return set(lost)


def _some(reasons: dict[str, str]) -> str:
    more = len(reasons) - _REASONS
    return "; ".join([*islice(reasons.values(), _REASONS), *([f"and {more} more"] if more > 0 else [])])


def _forget(callback: ModelCheckpoint, lost: set[str]) -> None:
    if callback.last_model_path in lost:
        callback.last_model_path = ""
    if not lost.isdisjoint({callback.best_model_path, callback.kth_best_model_path, *callback.best_k_models}):
        callback.best_k_models = {path: score for path, score in callback.best_k_models.items() if path not in lost}
        rank(callback)
