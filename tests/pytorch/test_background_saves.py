"""What the Trainer, its loggers and Fabric make of saves that go on in the background."""

import copy
import itertools
import logging
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning.fabric import Fabric
from lightning.fabric.storage.background import pending
from lightning.fabric.storage.background.queue import busy
from lightning.fabric.storage.background.submissions import watching
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.tuner import Tuner
from tests.pytorch.background_runs import HeldIO, Model, Pace, make_trainer, step_of, wait_for

FALLING = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0]


def every_step(dirpath: Path | str, steps: int = 1, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=dirpath, every_n_train_steps=steps, save_on_train_epoch_end=False, **options)


def complete_steps(folder: Path | str) -> set[int]:
    """The steps at which the checkpoints in a folder were saved; fails if one is not complete."""
    steps = set()
    for opened in fsspec.open_files(f"{folder}/*.ckpt", "rb"):
        with opened as file:
            steps.add(torch.load(file, weights_only=False)["global_step"])
    return steps


@pytest.mark.parametrize(
    ("place", "monitor", "lag"), [("local", None, 1), ("memory", "score", 1), ("local", "score", 2)]
)
def test_with_save_top_k_1_there_is_a_complete_checkpoint_at_every_step_while_saves_are_slow_and_fail(
    place: str, monitor: str | None, lag: int, tmp_path: Path
) -> None:
    folder = str(tmp_path) if place == "local" else f"memory://{tmp_path.name}"
    io = HeldIO(failing={1, 2, 4})
    seen: list[set[int]] = []
    checkpoint = every_step(folder, monitor=monitor)
    pace = Pace(io, lag, lambda: seen.append(complete_steps(folder)))
    plugin = AsyncCheckpointIO(io, max_in_flight=lag + 1, on_error="warn")
    make_trainer(plugin, tmp_path, checkpoint, pace).fit(Model(FALLING))
    assert not any(seen[: lag + 2])  # none is complete yet
    assert all(seen[lag + 2 :])
    for before, after in itertools.pairwise(seen):
        # gone is only what a later one, which is there, has replaced
        assert not before - after or max(after) > max(before)
    assert complete_steps(folder) == {6} == {step_of(checkpoint.best_model_path)}
    with fsspec.open(checkpoint.best_model_path, "rb") as file:
        callbacks = torch.load(file, weights_only=False)["callbacks"]
    assert callbacks[checkpoint.state_key]["best_model_path"] == checkpoint.best_model_path  # it names itself


def test_a_link_leads_to_the_last_checkpoint_that_is_complete_and_training_does_not_wait_for_it(tmp_path: Path) -> None:
    io = HeldIO(failing={2})
    link = tmp_path / "last.ckpt"
    linked: list[int | None] = []

    def act(step: int) -> None:
        time.sleep(0.02)  # for what is removed, now that a save has ended
        assert link.exists() or not link.is_symlink()

    def look() -> None:
        assert not pace.saves or not pace.saves[-1].done
        linked.append(torch.load(link, weights_only=False)["global_step"] if os.path.lexists(link) else None)

    checkpoint = every_step(tmp_path, save_last="link")
    pace = Pace(io, 1, look)
    plugin = AsyncCheckpointIO(io, max_in_flight=2, on_error="warn")
    make_trainer(plugin, tmp_path, checkpoint, pace).fit(Model(FALLING, act))
    assert linked == [None, None, None, 1, 2, 2, 4]
    assert os.readlink(link) == "epoch=0-step=6.ckpt"
    assert sorted(os.listdir(tmp_path)) == ["epoch=0-step=6.ckpt", "last.ckpt"]


def test_a_failed_save_stops_the_run_at_the_next_step_boundary_once(tmp_path: Path) -> None:
    io = HeldIO(failing={0})
    checkpoint = every_step(tmp_path, steps=2)
    steps: list[int] = []

    def act(step: int) -> None:
        steps.append(step)
        if step == 2:
            io.release()
            wait_for(saves)

    trainer = make_trainer(AsyncCheckpointIO(io), tmp_path, checkpoint)
    with watching() as saves, pytest.raises(OSError, match=r"no room for .*epoch=0-step=2\.ckpt"):
        trainer.fit(Model(FALLING, act))
    assert steps == [0, 1, 2]
    assert (checkpoint.best_model_path, checkpoint._last_checkpoint_saved) == ("", "")
    pending.drain()
    trainer = make_trainer(AsyncCheckpointIO(io), tmp_path, every_step(tmp_path, steps=2))
    trainer.fit(Model(FALLING))
    assert complete_steps(tmp_path) == {6}


def test_a_save_that_cannot_even_begin_is_taken_back_too(tmp_path: Path) -> None:
    class Unpicklable(Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.trainer.global_step == 2:
                checkpoint["lock"] = threading.Lock()

    io = HeldIO()
    io.release()
    checkpoint = every_step(tmp_path, monitor="score")
    with pytest.raises(pickle.PicklingError, match="lock"):
        make_trainer(AsyncCheckpointIO(io), tmp_path, checkpoint).fit(Unpicklable(FALLING))
    assert step_of(checkpoint.best_model_path) == step_of(checkpoint._last_checkpoint_saved) == 1
    assert complete_steps(tmp_path) == {1}


def test_with_on_error_warn_training_goes_on_and_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io = HeldIO(failing={1})
    io.release()
    trainer = make_trainer(AsyncCheckpointIO(io, on_error="warn"), tmp_path, every_step(tmp_path, save_top_k=-1))
    trainer.fit(Model(FALLING))
    told = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([line for line in told if "no room for" in line and "step=2.ckpt" in line]) == 1
    assert complete_steps(tmp_path) == {1, 3, 4, 5, 6}


def test_a_skipped_save_leaves_the_fields_as_they_were(tmp_path: Path) -> None:
    io = HeldIO()
    best: list[str] = []

    def act(step: int) -> None:
        best.append(checkpoint.best_model_path)
        if step == 3:
            io.release()
            wait_for(saves)

    checkpoint = every_step(tmp_path, monitor="score")
    plugin = AsyncCheckpointIO(io, when_busy="skip")
    with watching() as saves:
        make_trainer(plugin, tmp_path, checkpoint).fit(Model(FALLING[:4], act))
    assert [save.skipped for save in saves] == [False, True, True, False]
    assert [step_of(path) for path in best if path] == [1, 1, 1]
    assert complete_steps(tmp_path) == {4} == {step_of(checkpoint.best_model_path)}


class Recorder(CSVLogger):
    """Keeps what it is told, with the steps of which there are complete checkpoints at that time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "logs")
        self.checkpoints = root
        self.told: list[tuple[str, set[int]]] = []

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.told.append(("saved", complete_steps(self.checkpoints)))

    def finalize(self, status: str) -> None:
        assert not busy
        self.told.append((status, complete_steps(self.checkpoints)))


class LateSaves(Callback):
    """Saves at the end of training and of the run, and tells the logger that it does."""

    def __init__(self, folder: Path, recorder: Recorder) -> None:
        self.folder = folder
        self.recorder = recorder

    def _save(self, trainer: Trainer, hook: str) -> None:
        self.recorder.told.append((hook, complete_steps(self.recorder.checkpoints)))
        trainer.save_checkpoint(self.folder / f"{hook}.ckpt")

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self._save(trainer, "on_train_end")

    def on_fit_end(self, trainer: Trainer, *_: Any) -> None:
        assert (self.folder / "on_train_end.ckpt").exists()
        self._save(trainer, "on_fit_end")


class Describing(PassThroughProfiler):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def describe(self) -> None:
        self.recorder.told.append(("described", complete_steps(self.recorder.checkpoints)))


def test_loggers_hear_of_a_checkpoint_when_it_is_durable_and_are_finalized_after_the_last(tmp_path: Path) -> None:
    io = HeldIO(failing={1})
    logger = Recorder(tmp_path)
    known: list[int] = []
    pace = Pace(io, 1, lambda: known.append(len(logger.told)))
    plugin = AsyncCheckpointIO(io, max_in_flight=2, on_error="warn")
    options = {"logger": logger, "profiler": Describing(logger)}
    callbacks = [every_step(tmp_path, save_top_k=-1), LateSaves(tmp_path / "late", logger), pace]
    make_trainer(plugin, tmp_path, *callbacks, **options).fit(Model(FALLING[:4]))
    assert known == [0, 0, 0, 1, 1]
    assert logger.told == [
        ("saved", {1}),
        ("saved", {1, 3, 4}),
        ("saved", {1, 3, 4}),
        ("on_train_end", {1, 3, 4}),
        ("on_fit_end", {1, 3, 4}),
        ("success", {1, 3, 4}),
        ("described", {1, 3, 4}),
    ]


def test_with_a_plugin_that_saves_at_once_nothing_is_put_off(tmp_path: Path) -> None:
    io = HeldIO(failing={3})
    io.release()
    logger = Recorder(tmp_path)
    checkpoint = every_step(tmp_path, save_top_k=2, monitor="score", save_last="link")
    with pytest.raises(OSError, match="step=4"):
        make_trainer(io, tmp_path, checkpoint, logger=logger).fit(Model(FALLING))
    assert logger.told == [("saved", {1}), ("saved", {1, 2}), ("saved", {1, 2, 3}), ("failed", {2, 3})]
    assert step_of(checkpoint.best_model_path) == 3
    assert not checkpoint._history_of_saves.pending  # type: ignore[attr-defined]


@pytest.mark.parametrize("ckpt_path", ["best", "last", "other.ckpt"])
def test_a_checkpoint_on_its_way_is_waited_for_before_it_is_chosen_and_loaded(ckpt_path: str, tmp_path: Path) -> None:
    io = HeldIO()
    io.release()
    checkpoint = every_step(tmp_path, steps=6)
    trainer = make_trainer(AsyncCheckpointIO(io), tmp_path, checkpoint)
    model = Model(FALLING)
    trainer.fit(model)
    io.hold()
    torch.nn.init.constant_(model.layer.weight, 7.0)
    names = {"best": checkpoint.best_model_path, "last": tmp_path / "last.ckpt"}
    trainer.save_checkpoint(names.get(ckpt_path, tmp_path / ckpt_path))
    torch.nn.init.constant_(model.layer.weight, 0.0)
    threading.Timer(0.2, io.release).start()
    trainer.test(model, ckpt_path=ckpt_path if ckpt_path in names else str(tmp_path / ckpt_path), verbose=False)
    assert model.layer.weight.flatten().tolist() == [7.0, 7.0]


def test_an_exception_is_raised_when_the_saves_before_it_have_ended_and_theirs_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = HeldIO(failing={1})
    logger = Recorder(tmp_path)

    def act(step: int) -> None:
        if step == 2:
            threading.Timer(0.2, io.release).start()
            raise ValueError("the user's own")

    checkpoint = every_step(tmp_path, monitor="score", save_on_exception=True)
    callbacks = [checkpoint, OnExceptionCheckpoint(tmp_path / "exception")]
    plugin = AsyncCheckpointIO(io, max_in_flight=2)
    with pytest.raises(ValueError, match="the user's own"):
        make_trainer(plugin, tmp_path, *callbacks, logger=logger).fit(Model(FALLING, act))
    assert len([record for record in caplog.records if "no room for" in record.message]) == 1
    assert complete_steps(tmp_path / "exception") == {2}
    # what failed at this step is tried again
    assert logger.told == [("saved", {1}), ("saved", {1, 2}), ("failed", {1, 2})]
    assert step_of(checkpoint.best_model_path) == 1
    assert step_of(checkpoint._last_checkpoint_saved) == 2


def test_a_callback_can_be_copied_while_it_saves(tmp_path: Path) -> None:
    io = HeldIO()
    copies: list[ModelCheckpoint] = []

    def act(step: int) -> None:
        if step == 1:
            copies.append(copy.deepcopy(checkpoint))
            io.release()

    checkpoint = every_step(tmp_path)
    make_trainer(AsyncCheckpointIO(io), tmp_path, checkpoint).fit(Model(FALLING, act))
    (duplicate,) = copies
    first = duplicate.best_model_path
    io = HeldIO(failing=range(9))
    io.release()
    make_trainer(AsyncCheckpointIO(io, on_error="warn"), tmp_path, duplicate).fit(Model(FALLING[:3]))
    assert first == duplicate.best_model_path == duplicate._last_checkpoint_saved  # what failed has been taken back


def test_the_learning_rate_finder_leaves_nothing_behind(tmp_path: Path) -> None:
    class Tunable(Model):
        lr = 0.1

    io = HeldIO()
    io.release()
    trainer = make_trainer(AsyncCheckpointIO(io), tmp_path, every_step(tmp_path / "kept"))
    model = Tunable(FALLING)
    before = copy.deepcopy(model.state_dict())
    assert Tuner(trainer).lr_find(model, num_training=4) is not None
    pending.drain()
    assert os.listdir(tmp_path) == []
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_fabric_tells_of_a_failed_save_at_the_next_step_of_an_optimizer(tmp_path: Path) -> None:
    io = HeldIO(failing={0})
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[AsyncCheckpointIO(io)])
    module = torch.nn.Linear(2, 1)
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    with watching() as saves:
        fabric.save(tmp_path / "x.ckpt", {"module": module})
    optimizer.step()
    io.release()
    wait_for(saves)
    with pytest.raises(OSError, match=r"no room for .*x\.ckpt"):
        optimizer.step()
    optimizer.step()


def test_the_memory_of_the_first_save_is_allocated_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed: list[int] = []
    steps = [0]
    io = AsyncCheckpointIO()
    monkeypatch.setattr(io.saver._staging, "warm", lambda size, device: warmed.append(steps[0]))

    def act(step: int) -> None:
        steps[0] = step

    make_trainer(io, tmp_path, every_step(tmp_path, steps=3)).fit(Model(FALLING, act))
    assert warmed == [0]  # during which the first one is done


def test_a_model_is_loaded_when_what_is_on_its_way_has_been_saved(tmp_path: Path) -> None:
    io = HeldIO()
    saved, path = BoringModel(), tmp_path / "x.ckpt"
    checkpoint = {"state_dict": saved.state_dict(), "pytorch-lightning_version": "2.6.6"}
    AsyncCheckpointIO(io).save_checkpoint(checkpoint, path)
    timer = threading.Timer(0.2, io.release)
    timer.start()
    loaded = BoringModel.load_from_checkpoint(path)
    timer.join()
    assert torch.equal(loaded.layer.weight, saved.layer.weight)


def test_loggers_are_told_of_nothing_that_is_still_on_its_way(tmp_path: Path) -> None:
    told: list[tuple[int, set[str]]] = []

    class Opening(CSVLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            best = checkpoint_callback.best_model_path
            names = {best, *checkpoint_callback.best_k_models}
            told.append((step_of(best), {name for name in names if not os.path.exists(name)}))

    io, checkpoint = HeldIO(), every_step(tmp_path, monitor="score")
    # each save ends when ModelCheckpoint has set its fields for the next one
    trainer = make_trainer(
        AsyncCheckpointIO(io), tmp_path, checkpoint, Pace(io, 0, late=True), logger=Opening(tmp_path)
    )
    trainer.fit(Model(FALLING[:3]))
    assert told == [(1, set()), (2, set()), (3, set())]
    assert {step_of(path) for path in (checkpoint.best_model_path, *checkpoint.best_k_models)} == {3}
