"""What a Trainer shows of its saves: rows in the profiler's report, and a bar in a terminal."""

import io
import logging
import os
import re
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch

import lightning.pytorch as pl
from lightning.fabric.plugins import AsyncCheckpointIO, CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.storage import save_report
from lightning.fabric.storage.background import pending
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.save_report import SaveReport, finished, reporting, stage
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress import save_progress
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from tests.pytorch import profiled_runs
from tests.pytorch.profiled_runs import PACKAGES
from tests.pytorch.terminal import Terminal


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)


def fit(
    root: Path, profiler: Profiler | None = None, model: pl.LightningModule | None = None, **options: Any
) -> pl.Trainer:
    """Two epochs of two steps, with a save after each epoch."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, profiler=profiler, default_root_dir=root, logger=False, max_epochs=2,
        enable_model_summary=False,
        **{"enable_progress_bar": False, "callbacks": [ModelCheckpoint(root, save_top_k=-1)], **options},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers.*")
        trainer.fit(model or Model())
    return trainer


def rows(report: str) -> dict[str, list[str]]:
    """The cells behind the name of each row of SimpleProfiler's table, in its order."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith("|")]
    return {name: rest for name, *rest in cells}


class Behind(TorchCheckpointIO):
    """Saves in a thread, for which the next save waits."""

    last: tuple[SaveReport, threading.Thread] | None = None

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        report = SaveReport(locate(path))
        with reporting(report):
            with stage("wait"):
                self.settle()
            with stage("stage"):
                thread = threading.Thread(target=self._save, args=(report, checkpoint, path))
        thread.start()
        self.last = report, thread

    def _save(self, report: SaveReport, checkpoint: Any, path: Any) -> None:
        with reporting(report, background=True):
            super().save_checkpoint(checkpoint, path)

    def settle(self) -> None:
        if self.last is not None:
            report, thread = self.last
            thread.join()
            finished(report)
            self.last = None


@pytest.mark.parametrize("name", PACKAGES)
def test_a_save_that_training_waits_for_has_a_row_for_each_stage(name: str, tmp_path: Path) -> None:
    package = profiled_runs.package(name)
    profiler = package.profilers.SimpleProfiler()
    trainer = profiled_runs.trainer(package, profiler, tmp_path)
    trainer.fit(profiled_runs.model(package, lambda: torch.utils.data.DataLoader(torch.ones(4, 2))))
    for number in range(2):
        trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
    report = rows(profiler.summary())
    for row in ("save_checkpoint", "checkpoint_upload", "checkpoint_commit"):
        assert report[row][1] == "2", row
        assert float(report[row][2]) > 0
    assert "background" not in str(report)


def test_the_copy_for_a_link_at_a_url_has_a_row_and_is_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.fabric"), "propagate", True)
    caplog.set_level(logging.INFO, save_report.__name__)
    monkeypatch.setattr(save_report, "_LONG_S", 0.0)
    profiler = SimpleProfiler()
    root = f"memory://{tmp_path}"
    fit(tmp_path, profiler, callbacks=[ModelCheckpoint(root, save_top_k=-1, save_last="link", filename="{epoch}")])
    report = rows(profiler.summary())
    assert {name: cells[1] for name, cells in report.items() if name.startswith("checkpoint_")} == {
        "checkpoint_upload": "2",
        "checkpoint_commit": "2",
        "checkpoint_link": "2",
    }
    saved = [record.getMessage() for record in caplog.records if record.name == save_report.__name__]
    assert [line.partition(": ")[0] for line in saved] == [f"Saved {root}/epoch={epoch}.ckpt" for epoch in range(2)]


@pytest.mark.parametrize("plugin", [TorchCheckpointIO, AsyncCheckpointIO])
def test_saves_that_take_but_a_moment_log_no_line(
    plugin: type[CheckpointIO], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.fabric"), "propagate", True)
    monkeypatch.setattr(save_report, "_LONG_S", 60.0)
    caplog.set_level(logging.INFO, "lightning.fabric.storage")
    fit(tmp_path, plugins=[plugin()])
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
    assert [record.getMessage() for record in caplog.records if "fabric.storage" in record.name] == []


@pytest.mark.parametrize("extended", [True, False])
def test_what_went_on_beside_training_is_marked_and_no_part_of_the_run(tmp_path: Path, extended: bool) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path, filename="report", extended=extended)
    plugin = Behind()
    fit(tmp_path, profiler, plugins=[plugin])
    profiler.recorded_durations["checkpoint_upload (background)"].append(1000.0)
    plugin.settle()
    report = rows(profiler.summary())
    assert list(report)[-2:] == ["checkpoint_upload (background)", "checkpoint_commit (background)"]
    assert {"checkpoint_wait", "checkpoint_stage"} < report.keys()
    assert not {"checkpoint_upload", "checkpoint_commit"} & report.keys()
    if extended:
        mean, calls, total, percentage = report["checkpoint_upload (background)"]
        assert (calls, percentage) == ("3", "-")
        assert float(mean) == pytest.approx(float(total) / 3, rel=0.01)
        foreground = {name: cells for name, cells in report.items() if "(background)" not in name}
        in_all = foreground.pop("Total")
        del foreground["Action"]
        assert int(in_all[1]) == sum(int(cells[1]) for cells in foreground.values())


def test_other_profilers_show_the_stages_in_their_own_way(tmp_path: Path) -> None:
    fit(tmp_path, AdvancedProfiler(dirpath=tmp_path, filename="advanced"))
    fit(tmp_path, PyTorchProfiler(dirpath=tmp_path, filename="pytorch", record_module_names=False, row_limit=1000))
    advanced, pytorch = ((tmp_path / f"fit-{name}.txt").read_text() for name in ("advanced", "pytorch"))
    for name in ("checkpoint_upload", "checkpoint_commit"):
        assert f"Profile stats for: {name}" in advanced
        assert f"[pl][profile]{name}" in pytorch


def test_a_profiler_that_cannot_show_a_stage_does_not_stop_the_save(tmp_path: Path) -> None:
    class Refusing(SimpleProfiler):
        def start(self, action_name: str) -> None:
            if action_name == "checkpoint_commit":
                raise OSError("no room")
            super().start(action_name)

    profiler = Refusing()
    with pytest.warns(UserWarning, match="does not show 'checkpoint_commit': OSError: no room"):
        fit(tmp_path, profiler)
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
    assert len(profiler.recorded_durations["checkpoint_upload"]) == 2
    assert profiler.current_actions == {}


def test_an_action_of_the_same_name_around_a_save_keeps_its_row(tmp_path: Path) -> None:
    class Saving(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            with trainer.profiler.profile("checkpoint_upload"), pytest.warns(UserWarning, match="already started"):
                trainer.save_checkpoint(tmp_path / "own.ckpt")

    profiler = SimpleProfiler()
    fit(tmp_path, profiler, callbacks=[Saving()], enable_checkpointing=False)
    assert (tmp_path / "own.ckpt").exists()
    assert len(profiler.recorded_durations["checkpoint_upload"]) == 1
    assert len(profiler.recorded_durations["checkpoint_commit"]) == 1


def test_a_save_has_its_rows_in_the_profiler_of_the_trainer_that_makes_it(tmp_path: Path) -> None:
    profilers = [SimpleProfiler(), SimpleProfiler()]
    trainers = [fit(tmp_path, profiler, callbacks=[], enable_checkpointing=False) for profiler in profilers]
    trainers[0].save_checkpoint(tmp_path / "first.ckpt")
    assert [len(profiler.recorded_durations["checkpoint_upload"]) for profiler in profilers] == [1, 0]
    trainers[1].save_checkpoint(tmp_path / "second.ckpt")
    assert [len(profiler.recorded_durations["checkpoint_upload"]) for profiler in profilers] == [1, 1]


def test_what_other_threads_save_by_themselves_has_no_rows(tmp_path: Path) -> None:
    class InThread(TorchCheckpointIO):
        def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
            thread = threading.Thread(target=super().save_checkpoint, args=arguments, kwargs=options)
            thread.start()
            thread.join()

    profiler = SimpleProfiler()
    fit(tmp_path, profiler, plugins=[InThread()])
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
    assert "save_checkpoint" in profiler.recorded_durations
    assert not re.findall(r"checkpoint_\w+", str([*profiler.recorded_durations]).replace("save_checkpoint", ""))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(save_progress, "_PATIENCE_S", 0.0)
    terminal = Terminal()
    yield terminal
    terminal.close()


def fit_in(stream: TextIO, root: Path, during_saves: Callable[[], object] = lambda: None, **options: Any) -> pl.Trainer:
    """As :func:`fit`, but prints and logs to ``stream``, and calls a function in the middle of each save."""
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            during_saves()
        fsync(descriptor)

    handler = logging.StreamHandler(stream)
    with pytest.MonkeyPatch.context() as patched:  # here and not in a fixture: pytest sets it anew for each test
        patched.setattr(sys, "stdout", stream)
        patched.setattr(os, "fsync", slow_fsync)
        patched.setattr(save_report, "_LONG_S", 0.0)
        logging.getLogger(save_report.__name__).addHandler(handler)
        try:
            return fit(root, **options)
        finally:
            logging.getLogger(save_report.__name__).removeHandler(handler)


def with_bar(bar: Callable[[], ProgressBar], root: Path) -> dict[str, Any]:
    return {"enable_progress_bar": True, "callbacks": [bar(), ModelCheckpoint(root, save_top_k=-1)]}


BARS = pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])


@BARS
def test_a_long_save_has_a_bar_below_that_of_the_trainer_until_it_ends(
    bar: type[ProgressBar], tmp_path: Path, terminal: Terminal
) -> None:
    seen: list[list[str]] = []
    fit_in(terminal.stream, tmp_path, lambda: seen.append(terminal.wait_for("Saving ")), **with_bar(bar, tmp_path))
    terminal.close()
    for epoch, lines in enumerate(seen):
        above, of_trainer, of_save = lines[:-2], *lines[-2:]
        assert [line.partition(":")[0] for line in above] == [
            f"Saved {tmp_path}/epoch={earlier}-step={2 * earlier + 2}.ckpt" for earlier in range(epoch)
        ]
        assert re.match(rf"Epoch {epoch}\b.* 2/2 ", of_trainer)
        assert re.match(rf"Saving epoch={epoch}-step={2 * epoch + 2}\.ckpt\b", of_save)
    assert len(seen) == 2
    *saved, last = terminal.lines()
    assert [line.split()[0] for line in saved] == ["Saved", "Saved"]
    assert re.match(r"Epoch 1\b.* 2/2 ", last)


@BARS
def test_a_save_after_training_has_a_bar_of_its_own(bar: type[ProgressBar], tmp_path: Path, terminal: Terminal) -> None:
    class Saving(pl.Callback):
        def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            trainer.save_checkpoint(tmp_path / "own.ckpt")

    options = with_bar(bar, tmp_path)
    options["callbacks"].append(Saving())
    seen: list[list[str]] = []
    fit_in(terminal.stream, tmp_path, lambda: seen.append(terminal.wait_for("Saving ")), **options)
    terminal.close()
    assert re.match(r"Saving own\.ckpt\b", seen[-1][-1])
    assert not [line for line in terminal.lines() if "Saving" in line]


@BARS
def test_the_line_of_a_save_in_a_validation_stays_above_both_bars(
    bar: type[ProgressBar], tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Validated(Model):
        def validation_step(self, batch: torch.Tensor, number: int) -> None:
            self.trainer.save_checkpoint(tmp_path / f"{self.current_epoch}-{number}.ckpt")

        val_dataloader = Model.train_dataloader

    monkeypatch.setattr(save_progress, "_PATIENCE_S", 60.0)
    options = {"num_sanity_val_steps": 0, "enable_checkpointing": False, "enable_progress_bar": True}
    fit_in(terminal.stream, tmp_path, model=Validated(), callbacks=[bar()], **options)
    terminal.close()
    *saved, last = terminal.lines()
    names = ("0-0", "0-1", "1-0", "1-1")
    assert [line.partition(": ")[0] for line in saved] == [f"Saved {tmp_path}/{name}.ckpt" for name in names]
    assert last.startswith("Epoch 1")


@pytest.mark.parametrize("late", [False, True])
def test_while_a_save_waits_for_the_one_before_the_bar_is_of_that_one(
    tmp_path: Path, terminal: Terminal, late: bool
) -> None:
    waits, seen = threading.Semaphore(0), []

    class Gated(Behind):
        def _save(self, *arguments: Any) -> None:
            if late and not seen:  # the bar is there before the save has anything to show
                terminal.wait_for("Saving ")
            super()._save(*arguments)

        def settle(self) -> None:
            waits.release()
            super().settle()

    def hold_up() -> None:
        if not seen:
            for _ in range(2):  # the first save, and that which waits for it
                assert waits.acquire(timeout=20)
            (file,) = tmp_path.glob(".*.tmp")
            size = f"{file.stat().st_size / 1024:.2f}k"
            seen.append(terminal.wait_for(f"| {size}/{size} ["))

    plugin = Gated()
    fit_in(terminal.stream, tmp_path, hold_up, **with_bar(TQDMProgressBar, tmp_path), plugins=[plugin])
    plugin.settle()
    ((*_, line),) = seen
    assert line.startswith("Saving epoch=0-step=2.ckpt: 100%|")


def test_the_wait_for_saves_at_the_end_of_the_run_has_a_bar_and_a_row(tmp_path: Path, terminal: Terminal) -> None:
    class Slow(CheckpointIO):
        """One that knows nothing of reports."""

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            seen.append(terminal.wait_for("Saving own.ckpt"))

        load_checkpoint = remove_checkpoint = None  # type: ignore[assignment]

    class Saving(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "own.ckpt")
            pending.drain()

    seen: list[list[str]] = []
    profiler = SimpleProfiler()
    options = {"enable_progress_bar": True, "enable_checkpointing": False, "callbacks": [TQDMProgressBar(), Saving()]}
    fit_in(terminal.stream, tmp_path, plugins=[AsyncCheckpointIO(Slow())], profiler=profiler, **options)
    assert len(seen) == 1
    assert {"checkpoint_wait", "checkpoint_upload (background)"} < profiler.recorded_durations.keys()
    no_bar(terminal)


def no_thread() -> None:
    assert [thread.name for thread in threading.enumerate() if thread.name == "checkpoint-progress"] == []


def no_bar(terminal: Terminal) -> None:
    terminal.close()
    assert not [line for line in terminal.lines() if "Saving" in line]


def test_without_the_trainers_bar_there_is_none(tmp_path: Path, terminal: Terminal) -> None:
    fit_in(terminal.stream, tmp_path, no_thread, enable_progress_bar=False)
    no_bar(terminal)


@BARS
def test_what_is_not_a_terminal_gets_no_bar(
    bar: type[ProgressBar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_progress, "_PATIENCE_S", 0.0)
    stream = io.StringIO()
    fit_in(stream, tmp_path, no_thread, **with_bar(bar, tmp_path))
    assert "Saving" not in stream.getvalue()
    if bar is RichProgressBar:  # which writes to a file what it shows at its end, and what must not come more often
        assert stream.getvalue().count("Epoch") == 1


def test_a_save_that_takes_but_a_moment_has_no_bar(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_progress, "_PATIENCE_S", 60.0)
    fit_in(terminal.stream, tmp_path, **with_bar(TQDMProgressBar, tmp_path))
    no_bar(terminal)


def test_a_save_for_which_no_thread_can_be_started_any_more_has_no_bar(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "checkpoint-progress":
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    fit_in(terminal.stream, tmp_path, **with_bar(TQDMProgressBar, tmp_path))
    no_bar(terminal)
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


@pytest.mark.parametrize("stdout", [None, "a string", io.TextIOWrapper(io.BytesIO())])
def test_what_can_take_the_place_of_stdout_is_no_terminal(stdout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if stdout is not None and not isinstance(stdout, str):
        stdout.close()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        found = save_progress._prints_to_terminal()
    assert found is False
