import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.pytorch.profiled_runs import PACKAGES, SECONDS, loader, model, package, slowly_constructed_loader, trainer


@pytest.fixture
def recorded() -> Callable[[Any], dict[str, list[float]]]:
    """The durations by action that SimpleProfiler has of the actions about data loaders, hooks excepted."""

    def select(profiler: Any) -> dict[str, list[float]]:
        return {k: v for k, v in profiler.recorded_durations.items() if re.fullmatch(r"[a-z]+_[a-z]+_dataloader", k)}

    return select


@pytest.mark.slow
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
        if not action.startswith("create"):
            assert min(times) >= SECONDS, action


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
    assert sum(durations[f"create_{stage}_dataloader"]) >= SECONDS > sum(durations[f"setup_{stage}_dataloader"])


@pytest.mark.parametrize("stage", ["train", "val", "predict"])
def test_what_the_strategy_does_with_a_loader_is_in_the_row_of_its_creation(
    stage: str, tmp_path: Path, recorded: Callable[[Any], dict[str, list[float]]]
) -> None:
    pl = package("lightning.pytorch")

    class Strategy(pl.strategies.SingleDeviceStrategy):
        def process_dataloader(self, dataloader: object) -> object:
            time.sleep(SECONDS)
            return dataloader

    profiler = pl.profilers.SimpleProfiler()
    method = {"train": "fit", "val": "validate"}.get(stage, stage)
    limits = {} if stage == "train" else {"limit_val_batches": 1.0}
    strategy = Strategy(torch.device("cpu"))

    def quickly_constructed_loader() -> DataLoader:
        return DataLoader(torch.ones(4, 2), batch_size=2)

    getattr(trainer(pl, profiler, tmp_path, strategy=strategy, **limits), method)(model(pl, quickly_constructed_loader))
    assert sum(recorded(profiler)[f"create_{stage}_dataloader"]) >= SECONDS
