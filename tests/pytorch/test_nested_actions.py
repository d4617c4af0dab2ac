"""Actions within actions: each profiler shows of an action what those within it took, too."""

import pstats
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning.pytorch.profilers import AdvancedProfiler
from tests.pytorch import profiled_runs
from tests.pytorch.profiled_runs import SECONDS, slowly_constructed_loader
from tests.pytorch.test_train_dataloader_setup import reported_seconds


def slow() -> None:
    time.sleep(0.1)


def seconds_of(profiler: AdvancedProfiler, action: str) -> float:
    return sum(entry.inlinetime for entry in profiler.profiled_actions[action].getstats())


@pytest.fixture
def profiler() -> Iterator[AdvancedProfiler]:
    profiler = AdvancedProfiler()
    yield profiler
    profiler.teardown(None)


def test_an_action_contains_those_within_and_goes_on_after_them(profiler: AdvancedProfiler) -> None:
    for outer in ("first", "second"):
        with profiler.profile(outer):
            slow()
            with profiler.profile("inner"):
                slow()
            slow()
    with profiler.profile("inner"):
        slow()
    assert seconds_of(profiler, "first") == pytest.approx(0.3, abs=0.08)
    assert seconds_of(profiler, "second") == pytest.approx(0.3, abs=0.08)
    assert seconds_of(profiler, "inner") == pytest.approx(0.3, abs=0.08)
    calls = {action: pstats.Stats(profile).total_calls for action, profile in profiler.profiled_actions.items()}
    assert list(calls) == ["first", "inner", "second"]
    report = profiler.summary()
    for action in calls:
        assert reported_seconds(report, action) == pytest.approx(0.3, abs=0.08)
        section = report.partition(f"Profile stats for: {action}")[2].partition("Profile stats for:")[0]
        assert re.search(r"^\s+3\s.*\(slow\)$", section, re.MULTILINE)


def test_actions_that_end_in_the_order_of_their_starts_are_recorded_to_their_ends(profiler: AdvancedProfiler) -> None:
    profiler.start("first")
    profiler.start("second")
    profiler.stop("first")
    slow()
    profiler.stop("second")
    slow()
    assert seconds_of(profiler, "first") < 0.05
    assert seconds_of(profiler, "second") == pytest.approx(0.1, abs=0.05)


def test_an_action_within_one_of_the_same_name_is_counted_once(profiler: AdvancedProfiler) -> None:
    with profiler.profile("same"):
        slow()
        with profiler.profile("same"):
            slow()
        slow()
    assert seconds_of(profiler, "same") == pytest.approx(0.3, abs=0.08)


def test_an_action_that_was_never_started_cannot_be_stopped_and_one_that_ended_can(profiler: AdvancedProfiler) -> None:
    with pytest.raises(ValueError, match="recording the action 'missing', which"):
        profiler.stop("missing")
    profiler.start("ended")
    profiler.stop("ended")
    profiler.stop("ended")
    with pytest.raises(KeyError):
        profiler.profiled_actions["missing"]


class SlowToBegin(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        time.sleep(SECONDS)
        yield from torch.ones(8, 2)


def stream() -> Any:
    return DataLoader(SlowToBegin(), batch_size=2)


@pytest.mark.parametrize("kind", ["SimpleProfiler", "AdvancedProfiler", "PyTorchProfiler"])
@pytest.mark.parametrize(
    ("row", "loader"), [("create_train_dataloader", slowly_constructed_loader), ("setup_train_dataloader", stream)]
)
def test_the_row_of_a_loader_contains_what_the_actions_within_it_took(
    row: str, loader: Callable[[], Any], kind: str, tmp_path: Path
) -> None:
    pl = profiled_runs.package("lightning.pytorch")
    options = {"row_limit": -1, "schedule": None} if kind == "PyTorchProfiler" else {}
    profiler = getattr(pl.profilers, kind)(dirpath=tmp_path, filename="report", **options)
    profiled_runs.trainer(pl, profiler, tmp_path).fit(profiled_runs.model(pl, loader))
    report = (tmp_path / "fit-report.txt").read_text()
    assert reported_seconds(report, row) >= SECONDS
