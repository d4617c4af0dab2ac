import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pytorch.slow_data import SECONDS, loader, slowly_constructed_loader

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


def package(name: str) -> Any:
    importlib.import_module(f"{name}.profilers")
    return importlib.import_module(name)


def model(pl: Any, make_loader: Callable[[], Any]) -> Any:
    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).sum()

        def validation_step(self, batch: torch.Tensor) -> None:
            self.layer(batch)

        test_step = validation_step

        def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def _loader(self) -> Any:
            return make_loader()

        train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader

    return Model()


def trainer(pl: Any, profiler: Any, root: Path, **options: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu", devices=1, profiler=profiler, default_root_dir=root, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0, **options},
    )  # fmt: skip


def reported_seconds(report: str, action: str) -> float:
    """The total time in the action's row of SimpleProfiler's table, or section of AdvancedProfiler's report."""
    row = re.search(rf"^\|\s*{action}\s*\|([^|]+)\|([^|]+)\|([^|]+)\|", report, re.MULTILINE)
    if row is not None:
        return float(row[3])
    section = report.partition(f"Profile stats for: {action}")[2].partition("Profile stats for:")[0]
    took = re.search(r"function calls.* in ([\d.]+) seconds", section)
    assert took is not None, f"{action} is not in the report:\n{report}"
    return float(took[1])


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("kind", ["SimpleProfiler", "AdvancedProfiler"])
def test_the_report_shows_the_start_of_the_train_workers_in_its_own_row(name: str, kind: str, tmp_path: Path) -> None:
    pl = package(name)
    profiler = getattr(pl.profilers, kind)(dirpath=tmp_path, filename="report")
    trainer(pl, profiler, tmp_path).fit(model(pl, loader))
    report = (tmp_path / "fit-report.txt").read_text()
    assert SECONDS <= reported_seconds(report, "setup_train_dataloader") < SECONDS + 1
    assert reported_seconds(report, "create_train_dataloader") < SECONDS / 2


@pytest.fixture
def recorded() -> Callable[[Any], dict[str, list[float]]]:
    """The durations by action that SimpleProfiler has of the actions about data loaders, hooks excepted."""

    def select(profiler: Any) -> dict[str, list[float]]:
        return {k: v for k, v in profiler.recorded_durations.items() if re.fullmatch(r"[a-z]+_[a-z]+_dataloader", k)}

    return select


@pytest.mark.parametrize("name", PACKAGES)
def test_later_epochs_and_validation_runs_have_rows_for_their_iterators(
    name: str, tmp_path: Path, recorded: Callable[[Any], dict[str, list[float]]]
) -> None:
    pl = package(name)
    profiler = pl.profilers.SimpleProfiler()
    trainer(pl, profiler, tmp_path, max_epochs=2, limit_val_batches=1.0, num_sanity_val_steps=1).fit(model(pl, loader))
    durations = recorded(profiler)
    counts = {action: len(times) for action, times in durations.items()}
    assert counts == {
        "create_train_dataloader": 2,  # the hook, and Lightning's own processing of the one loader
        "create_val_dataloader": 2,
        "setup_train_dataloader": 1,
        "reset_train_dataloader": 1,
        "setup_val_dataloader": 3,  # sanity check and two epochs
    }
    for action, times in durations.items():
        assert all(time >= SECONDS for time in times) is not action.startswith("create"), (action, times)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(("method", "stage"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
def test_every_other_stage_has_rows_for_loader_and_iterator(
    name: str, method: str, stage: str, tmp_path: Path, recorded: Callable[[Any], dict[str, list[float]]]
) -> None:
    pl = package(name)
    profiler = pl.profilers.SimpleProfiler()
    getattr(trainer(pl, profiler, tmp_path, limit_val_batches=1.0), method)(model(pl, loader))
    durations = recorded(profiler)
    assert durations.keys() == {f"create_{stage}_dataloader", f"setup_{stage}_dataloader"}
    assert sum(durations[f"setup_{stage}_dataloader"]) >= SECONDS


@pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
def test_the_construction_of_a_loader_is_in_its_row_and_not_in_the_iterators(
    stage: str, tmp_path: Path, recorded: Callable[[Any], dict[str, list[float]]]
) -> None:
    pl = package("lightning.pytorch")
    profiler = pl.profilers.SimpleProfiler()
    method = {"train": "fit", "val": "validate"}.get(stage, stage)
    limits = {} if stage == "train" else {"limit_val_batches": 1.0}
    getattr(trainer(pl, profiler, tmp_path, **limits), method)(model(pl, slowly_constructed_loader))
    durations = recorded(profiler)
    assert SECONDS <= sum(durations[f"create_{stage}_dataloader"]) < SECONDS + 0.5
    assert sum(durations[f"setup_{stage}_dataloader"]) < SECONDS / 2


def test_the_action_of_an_iterator_that_cannot_be_made_is_ended(tmp_path: Path) -> None:
    class Broken:
        tried = 0

        def __iter__(self) -> Iterator[Any]:
            self.tried += 1
            if self.tried > 1:  # Lightning tries first whether a loader can be iterated over at all
                raise OSError("no such data set")
            return iter([])

        def __len__(self) -> int:
            return 2

    pl = package("lightning.pytorch")
    profiler = pl.profilers.SimpleProfiler()
    with pytest.raises((OSError, RuntimeError)) as raised:  # Lightning's own clean-up can fail on top of it
        trainer(pl, profiler, tmp_path).fit(model(pl, Broken))
    assert "no such data set" in str(raised.value.__context__ or raised.value)
    assert len(profiler.recorded_durations["setup_train_dataloader"]) == 1
    assert profiler.current_actions == {}
