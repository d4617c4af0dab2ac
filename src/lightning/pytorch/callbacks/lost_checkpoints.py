"""What a ModelCheckpoint remembers of an earlier run, and is no longer there."""

from typing import TYPE_CHECKING

from lightning.fabric.storage.location import display
from lightning.fabric.storage.selection import why_incomplete
from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def forget_lost_checkpoints(trainer: "Trainer") -> None:
    """Makes each ModelCheckpoint, whose state has just been loaded, forget those that do not exist or are incomplete.

    Else they would count among the best ``save_top_k``, so that worse ones which are really there are not kept, and
    ``ckpt_path="best"`` would lead to nothing. Nothing is removed from the disk or the store. In a distributed job this
    is a collective call: rank zero looks, so that all ranks remember the same.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            lost = trainer.strategy.broadcast(_lost(callback) if trainer.is_global_zero else set())
            _forget(callback, lost)


def _lost(callback: ModelCheckpoint) -> set[str]:
    known = [callback.best_model_path, callback.kth_best_model_path, callback.last_model_path, *callback.best_k_models]
    lost = {}
    for path in dict.fromkeys(path for path in known if path):
        try:
            why = why_incomplete(path)
        except OSError as error:  # what may be there is not forgotten
            rank_zero_warn(f"Could not look whether {display(path)!r} is a complete checkpoint: {display(str(error))}")
            continue
        if why is not None:
            lost[path] = why
    if lost:
        reasons = "; ".join(lost.values())
        rank_zero_warn(f"`ModelCheckpoint` no longer counts {len(lost)} of the checkpoints that it knew of: {reasons}")
    return set(lost)


def _forget(callback: ModelCheckpoint, lost: set[str]) -> None:
    if callback.last_model_path in lost:
        callback.last_model_path = ""
    scores = {path: score for path, score in callback.best_k_models.items() if path not in lost}
    best, worst = (min, max) if callback.mode == "min" else (max, min)
    if len(scores) < len(callback.best_k_models):
        callback.best_k_models = scores
        callback.kth_best_model_path = worst(scores, key=lambda path: scores[path], default="")
        callback.kth_value = scores.get(callback.kth_best_model_path)  # type: ignore[assignment]  # None as at first
    if callback.best_model_path in lost:
        callback.best_model_path = best(scores, key=lambda path: scores[path], default="")
        callback.best_model_score = scores.get(callback.best_model_path)
