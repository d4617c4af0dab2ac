import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pytorch.profiled_runs import PACKAGES, SECONDS, loader, model, package, trainer


def reported_seconds(report: str, action: str) -> float:
    """The total time in the action's row of SimpleProfiler's or PyTorchProfiler's table, or section of the third's."""
    row = re.search(rf"^\|\s*{action}\s*\|([^|]+)\|([^|]+)\|([^|]+)\|", report, re.MULTILINE)
    if row is not None:
        return float(row[3])
    row = re.search(
        rf"^\s*\[pl\]\[profile\]{action} .* ([\d.]+)(us|ms|s) +\S+(?:us|ms|s) +\d+ *$", report, re.MULTILINE
    )
    if row is not None:
        return float(row[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[row[2]]
    section = report.partition(f"Profile stats for: {action}")[2].partition("Profile stats for:")[0]
    took = re.search(r"function calls.* in ([\d.]+) seconds", section)
    assert took is not None, f"{action} is not in the report:\n{report}"
    return float(took[1])


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("kind", ["SimpleProfiler", pytest.param("AdvancedProfiler", marks=pytest.mark.slow)])
def test_the_report_shows_the_start_of_the_train_workers_in_its_own_row(name: str, kind: str, tmp_path: Path) -> None:
    pl = package(name)
    profiler = getattr(pl.profilers, kind)(dirpath=tmp_path, filename="report")
    trainer(pl, profiler, tmp_path).fit(model(pl, loader))
    report = (tmp_path / "fit-report.txt").read_text()
    assert reported_seconds(report, "setup_train_dataloader") >= SECONDS


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
