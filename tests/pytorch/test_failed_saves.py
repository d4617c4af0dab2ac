"""What a ModelCheckpoint knows after saves in the background have failed, while others were on their way."""

import itertools
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.callbacks.checkpoint_history import Entry, History, changes_since, undo
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from tests.pytorch.background_runs import HeldIO, Model, Pace, make_trainer, step_of
from tests.servers import Bucket

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "best of all": {"monitor": "score"},
    "two best": {"monitor": "score", "save_top_k": 2, "mode": "max"},
    "three best": {"monitor": "score", "save_top_k": 3},
    "latest": {},
    "latest under one name": {"filename": "same", "enable_version_counter": False},
    "all": {"monitor": "score", "save_top_k": -1},
    "link": {"save_last": "link", "monitor": "score", "save_top_k": 2},
    "best and last": {"save_last": True, "monitor": "score"},
    "best and last by step": {"save_last": True, "monitor": "score"},
}
#: A save to a path waits for the one before to that path, and so how many can be on their way when one begins.
LAGS = {"latest under one name": 0, "best and last": 1}
SCORES = [5.0, 3.0, 4.0, 2.0, 6.0, 2.5, 1.0]
FALLING = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


class Counting(ModelCheckpoint):
    """As users write them, with methods that call those that they override."""

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self.saves = getattr(self, "saves", 0) + 1

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._remove_checkpoint(trainer, filepath)
        self.removals = getattr(self, "removals", 0) + 1


def run(
    name: str, failing: Collection[int], lag: int, folder: Path, late: bool = False, scores: list[float] = SCORES
) -> None:
    """A run that saves at every step, of which some saves fail and training is told of it later."""
    options = CONFIGURATIONS[name]
    scores = FALLING if name in LAGS else scores  # so that two saves in a row are not to one path
    io = HeldIO(failing)
    checkpoint = Counting(dirpath=folder, every_n_train_steps=1, save_on_train_epoch_end=False, **options)
    if name == "best and last by step":
        checkpoint.CHECKPOINT_NAME_LAST = "last-{step}"
    pace = Pace(io, LAGS.get(name, lag), late=late or name in LAGS)
    plugin = AsyncCheckpointIO(io, max_in_flight=lag + 2, on_error="warn")
    make_trainer(plugin, folder, checkpoint, pace).fit(Model(scores))
    assert_knows_what_is_there(checkpoint, [save.place.raw for save in pace.saves if save.succeeded], scores)


def assert_knows_what_is_there(checkpoint: ModelCheckpoint, durable: list[str], scores: list[float]) -> None:
    folder = checkpoint.dirpath
    known = {checkpoint.best_model_path, checkpoint.last_model_path, *checkpoint.best_k_models} - {""}
    assert known == {os.path.join(folder, file) for file in os.listdir(folder)}  # and nothing has been forgotten
    last = durable[-1] if durable else ""
    assert checkpoint._last_checkpoint_saved == last
    step = torch.load(last, weights_only=False)["global_step"] if last else 0
    assert checkpoint._last_global_step_saved == step
    if checkpoint.save_last == "link" and last:
        assert os.path.realpath(checkpoint.last_model_path) == last
    if checkpoint.monitor is not None:
        saved = {path: scores[step_of(path) - 1] for path in durable if "last" not in path}
        known_scores = {path: score.item() for path, score in checkpoint.best_k_models.items()}
        assert known_scores.items() <= saved.items()
        assert len(known_scores) <= checkpoint.save_top_k or checkpoint.save_top_k == -1
        best, worst = (min, max) if checkpoint.mode == "min" else (max, min)
        assert checkpoint.best_model_path == best(saved, key=saved.__getitem__, default="")
        assert checkpoint.best_model_score == known_scores.get(checkpoint.best_model_path)
        if len(known_scores) == checkpoint.save_top_k:
            assert checkpoint.kth_best_model_path == worst(known_scores, key=saved.__getitem__)
            assert checkpoint.kth_value == known_scores[checkpoint.kth_best_model_path]


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize(
    ("failing", "lag", "late"),
    [((1,), 1, False), ((0, 3), 0, True), ((0, 2, 9), 9, False), ((2, 4, 5), 2, False), ((0, 1, 6, 7), 3, False)],
)
def test_a_save_that_failed_is_taken_back_out_of_the_fields_also_if_others_have_been_begun_since(
    name: str, failing: Collection[int], lag: int, late: bool, tmp_path: Path
) -> None:
    run(name, failing, lag, tmp_path, late)


@pytest.mark.parametrize("name", ["two best", "latest", "link", "best and last by step"])
@pytest.mark.parametrize("lag", [0, 9])
def test_when_all_saves_have_failed_none_is_known(name: str, lag: int, tmp_path: Path) -> None:
    run(name, range(20), lag, tmp_path)


def test_what_was_to_be_removed_is_kept_if_a_later_save_takes_its_name(tmp_path: Path) -> None:
    io = HeldIO(failing={1})
    checkpoint = ModelCheckpoint(tmp_path, filename="{score}", every_n_train_steps=1, enable_version_counter=False)
    plugin = AsyncCheckpointIO(io, max_in_flight=3, on_error="warn")
    make_trainer(plugin, tmp_path, checkpoint, Pace(io, 2)).fit(Model([1.0, 2.0, 3.0, 1.0]))
    assert os.listdir(tmp_path) == ["score=1.0.ckpt"] == [os.path.basename(checkpoint.best_model_path)]


def test_a_name_counts_as_taken_when_a_save_to_it_is_on_its_way(tmp_path: Path) -> None:
    io = HeldIO()
    checkpoint = ModelCheckpoint(tmp_path, filename="same", every_n_train_steps=1, save_top_k=2, monitor="score")
    plugin = AsyncCheckpointIO(io, max_in_flight=2)
    make_trainer(plugin, tmp_path, checkpoint, Pace(io, 1)).fit(Model([4.0, 3.0, 2.0]))
    assert {os.path.basename(path): score.item() for path, score in checkpoint.best_k_models.items()} == {
        "same.ckpt": 2.0,
        "same-v1.ckpt": 3.0,
    }


class FailingIO(TorchCheckpointIO):
    """Saves at once; those of some numbers, which count from zero, fail."""

    def __init__(self, failing: Collection[int]) -> None:
        super().__init__()
        self.failing = failing
        self.begun = 0
        self.saved: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.begun += 1
        if self.begun - 1 in self.failing:
            raise OSError(f"no room for {path}")
        super().save_checkpoint(checkpoint, path, storage_options)
        self.saved.append(os.fspath(path))


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("number", [0, 3])
def test_a_save_at_once_that_failed_is_taken_back_out_of_the_fields(name: str, number: int, tmp_path: Path) -> None:
    io = FailingIO({number})
    checkpoint = ModelCheckpoint(
        dirpath=tmp_path, every_n_train_steps=1, save_on_train_epoch_end=False, **CONFIGURATIONS[name]
    )
    if name == "best and last by step":
        checkpoint.CHECKPOINT_NAME_LAST = "last-{step}"
    scores = FALLING if name in LAGS else SCORES
    with pytest.raises(OSError, match="no room for"):
        make_trainer(io, tmp_path, checkpoint).fit(Model(scores))
    assert_knows_what_is_there(checkpoint, io.saved, scores)


@pytest.mark.parametrize("step", [1, 2])
def test_a_copy_in_place_of_a_link_that_failed_is_taken_back_out_of_the_fields(
    step: int, bucket: Bucket, tmp_path: Path
) -> None:
    checkpoint = ModelCheckpoint(bucket.url, every_n_train_steps=1, save_on_train_epoch_end=False, save_last="link")
    copies = itertools.count(1)

    def refuse(method: str, path: str) -> int | None:
        return 403 if method == "PUT" and "last" in path and next(copies) >= step else None

    with bucket.refusing(refuse), pytest.raises(PermissionError, match=r"last\.ckpt"):
        make_trainer(TorchCheckpointIO(), tmp_path, checkpoint).fit(Model(SCORES))
    assert next(copies) == step + 1
    assert checkpoint.last_model_path == ("" if step == 1 else f"{bucket.url}/last.ckpt")
    assert os.path.basename(checkpoint.best_model_path) in bucket.names()


class Saves:
    """Saves of a ModelCheckpoint that keeps one, of which none has an outcome yet."""

    def __init__(self) -> None:
        self.callback = ModelCheckpoint(monitor="score")
        self.history = History()

    def begin(self, number: int, path: str, score: float) -> Entry:
        self.history.begin(self.callback)
        self.callback.best_k_models = {path: torch.tensor(score)}
        entry = Entry(path, changes_since(self.history.before or {}, self.callback))
        self.history.pending[number] = entry
        return entry

    def fail(self, number: int) -> dict[str, float]:
        """The scores after a save has failed."""
        undo(self.callback, self.history, number)
        return {path: score.item() for path, score in self.callback.best_k_models.items()}


def test_what_was_left_out_for_a_save_that_failed_does_not_count_again_if_it_has_failed_too() -> None:
    saves = Saves()
    saves.begin(1, "a", 3.0)
    score = saves.callback.best_k_models.pop("a")
    saves.begin(2, "b", 2.0).evicted["a"] = score
    assert saves.fail(1) == {"b": 2.0}
    assert saves.fail(2) == {}


def test_what_was_left_out_for_a_save_that_failed_does_not_count_again_while_a_later_save_has_its_name() -> None:
    saves = Saves()
    saves.begin(1, "a", 3.0)
    score = saves.callback.best_k_models.pop("a")
    saves.begin(2, "b", 2.0).evicted["a"] = score
    saves.history.pending.pop(1)  # it is durable
    saves.begin(3, "a", 1.0)
    assert saves.fail(2) == {"a": 1.0}
    assert saves.fail(3) == {"a": 3.0}
