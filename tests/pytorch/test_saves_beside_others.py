"""Saves in the background beside what else uses the file system, changes the weights, or saves as well."""

import csv
import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning.fabric import Fabric
from lightning.fabric.storage.background.queue import busy
from lightning.fabric.storage.background.submissions import watching
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from tests.pytorch.background_runs import HeldIO, Model, make_trainer, wait_for

FALLING = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


def every_step(dirpath: Path | str, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=dirpath, every_n_train_steps=1, save_on_train_epoch_end=False, **options)


class Files(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that are objects, and for each that is read one that is written."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.fs, _ = fsspec.url_to_fs(root)
        for number in range(len(FALLING)):
            content = io.BytesIO()
            torch.save(torch.full((2,), float(number)), content)
            self.fs.pipe_file(f"{root}/data/{number}.pt", content.getvalue())

    def __len__(self) -> int:
        return len(FALLING)

    def __getitem__(self, number: int) -> torch.Tensor:
        with self.fs.open(f"{self.root}/data/{number}.pt", "rb") as file:
            sample: torch.Tensor = torch.load(file)
        with self.fs.open(f"{self.root}/seen/{number}", "wb") as file:
            file.write(b"%d" % sample[0])
        assert self.fs.cat_file(f"{self.root}/seen/{number}") == b"%d" % number
        return sample


@pytest.mark.parametrize("store", ["memory", "s3 with obstore", "s3 with s3fs"])
def test_data_loaders_and_loggers_that_use_the_same_file_system_lose_nothing(
    store: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store == "s3 with s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)
    root = f"memory://{tmp_path.name}" if store == "memory" else f"{request.getfixturevalue('bucket').url}/run"
    files = Files(root)
    read: list[float] = []

    class Reading(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            read.append(batch[0, 0].item())
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(files)

    held = HeldIO()

    def act(step: int) -> None:  # what begins in one step is at work in the next
        held.release(step)

    checkpoint = every_step(f"{root}/kept", save_top_k=2, monitor="score")
    logger = CSVLogger(f"{root}/logs", name="", version="", flush_logs_every_n_steps=1)
    plugin = AsyncCheckpointIO(held, max_in_flight=2)
    trainer = make_trainer(plugin, tmp_path, checkpoint, logger=logger, log_every_n_steps=1)
    model = Reading(FALLING, act)
    threading.Timer(0, lambda: (held.wait_for_begin(len(FALLING)), held.release())).start()
    trainer.fit(model)
    assert read == [0, 1, 2, 3, 4, 5]
    with files.fs.open(f"{root}/logs/metrics.csv", "r") as file:
        assert [float(row["score"]) for row in csv.DictReader(file)] == FALLING
    names = sorted(name.rpartition("/")[2] for name in files.fs.find(f"{root}/kept"))
    assert names == ["epoch=0-step=5.ckpt", "epoch=0-step=6.ckpt"]
    assert sorted(name.rpartition("/")[2] for name in files.fs.find(f"{root}/seen")) == list("012345")
    saved = trainer.strategy.load_checkpoint(checkpoint.best_model_path, weights_only=False)
    assert all(torch.equal(value, saved["state_dict"][name]) for name, value in model.state_dict().items())


def test_averaged_weights_are_those_of_the_step_at_which_the_save_was_begun(tmp_path: Path) -> None:
    def run(name: str, plugin: Any, release: Any) -> list[dict[str, Any]]:
        torch.manual_seed(1)
        callbacks = [EMAWeightAveraging(decay=0.5), every_step(tmp_path / name, save_top_k=-1)]
        make_trainer(plugin, tmp_path, *callbacks).fit(Model(FALLING[:4], release))
        folder = sorted((tmp_path / name).iterdir())
        return [torch.load(path, weights_only=False) for path in folder]

    held = HeldIO()
    at_once = HeldIO()
    at_once.release()
    beside = run("beside", AsyncCheckpointIO(held, max_in_flight=4), lambda step: held.release() if step == 3 else None)
    for one, other in zip(beside, run("at once", at_once, lambda step: None), strict=True):
        assert one["global_step"] == other["global_step"]
        for key in ("state_dict", "current_model_state", "averaging_state"):
            assert one[key].keys() == other[key].keys()
            assert all(torch.equal(value, other[key][name]) for name, value in one[key].items())
    last = beside[-1]
    assert not torch.equal(last["state_dict"]["layer.weight"], last["current_model_state"]["layer.weight"])


def test_the_batch_size_finder_leaves_nothing_behind(tmp_path: Path) -> None:
    class Scalable(Model):
        batch_size = 1

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=self.batch_size)

    model = Scalable(FALLING)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = make_trainer(AsyncCheckpointIO(), tmp_path, every_step(tmp_path / "kept"))
    assert Tuner(trainer).scale_batch_size(model, steps_per_trial=1, max_trials=2) == 4
    assert not busy
    assert os.listdir(tmp_path) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_last_checkpoint_is_saved_whenever_that_of_its_step_is_though_saves_that_come_early_are_not(
    tmp_path: Path,
) -> None:
    held = HeldIO()

    def act(step: int) -> None:
        if step == 2:
            held.release(2)
            wait_for(saves)

    def release() -> None:  # as the second save of a step waits for the first, so must others let that one go on
        for number in (1, 3):
            held.wait_for_begin(number)
            held.release(number)
        held.wait_for_begin(4)
        held.release()

    threading.Thread(target=release).start()
    checkpoint = every_step(tmp_path, save_last=True)
    with watching() as saves:
        make_trainer(AsyncCheckpointIO(held, when_busy="skip"), tmp_path, checkpoint).fit(Model(FALLING[:3], act))
    names = ["epoch=0-step=1.ckpt", "last.ckpt", "epoch=0-step=2.ckpt", "last.ckpt", "epoch=0-step=3.ckpt", "last.ckpt"]
    told = [(save.place.name, save.skipped) for save in saves]
    assert told == list(zip(names, [False, False, True, True, False, False], strict=True))
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 3
    assert sorted(os.listdir(tmp_path)) == ["epoch=0-step=3.ckpt", "last.ckpt"]


def test_what_is_saved_because_of_an_exception_is_saved_though_saves_that_come_early_are_not(tmp_path: Path) -> None:
    held = HeldIO()

    def act(step: int) -> None:
        if step == 1:
            threading.Timer(0.3, held.release).start()  # by then the second would have been left out
            raise ValueError("the user's own")

    callbacks = [OnExceptionCheckpoint(tmp_path / name) for name in ("one", "other")]
    plugin = AsyncCheckpointIO(held, when_busy="skip")
    with pytest.raises(ValueError, match="the user's own"):
        make_trainer(plugin, tmp_path, *callbacks).fit(Model(FALLING, act))
    for name in ("one", "other"):
        assert torch.load(tmp_path / name / "on_exception.ckpt", weights_only=False)["global_step"] == 1


def test_a_save_that_ctrl_c_gives_up_is_taken_back_at_once(tmp_path: Path) -> None:
    held = HeldIO(failing={1})
    known: list[tuple[str, str]] = []

    def act(step: int) -> None:
        if step == 1:
            held.release(1)
            wait_for(saves)
        if step != 2:
            return
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            plugin.drain()
        timer.join()
        known.append((checkpoint.best_model_path, checkpoint._last_checkpoint_saved))
        held.release()

    checkpoint = every_step(tmp_path, monitor="score")
    plugin = AsyncCheckpointIO(held)
    with watching() as saves:
        make_trainer(plugin, tmp_path, checkpoint).fit(Model(FALLING[:4], act))
    assert known == [(str(tmp_path / "epoch=0-step=1.ckpt"),) * 2]
    assert os.listdir(tmp_path) == ["epoch=0-step=4.ckpt"]


def test_fabric_allocates_the_memory_of_the_first_save_when_all_optimizers_have_taken_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = AsyncCheckpointIO()
    warmed: list[tuple[int, int]] = []
    monkeypatch.setattr(plugin.saver._staging, "warm", lambda size, device: warmed.append((steps, size)))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    modules = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)]
    optimizers = [fabric.setup(module, torch.optim.Adam(module.parameters()))[1] for module in modules]
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    for steps, optimizer in enumerate([*optimizers, *optimizers]):  # noqa: B007  # what is warmed looks at it
        optimizer.step()
    ((when, size),) = warmed
    assert when == 2
    assert 24 * 2**20 < size < 26 * 2**20  # parameters and two moments of 4 MiB each, twice
