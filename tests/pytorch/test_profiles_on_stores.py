"""Profilers that write to a store, and one that refuses."""

import importlib
import json
import logging
import pstats
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pytorch import profiled_runs
from tests.pytorch.profiled_runs import PACKAGES
from tests.servers import Bucket
from tests.storage.places import Folder


def fit(pl: Any, profiler: Any) -> Any:
    trainer = profiled_runs.trainer(pl, profiler, Path.cwd())
    trainer.fit(profiled_runs.model(pl, lambda: torch.utils.data.DataLoader(torch.ones(7, 2))))
    return trainer


def make(pl: Any, kind: str, dirpath: Any) -> Any:
    options = {
        "SimpleProfiler": {},
        "AdvancedProfiler": {"dump_stats": True},
        "PyTorchProfiler": {"export_to_flame_graph": True},
    }[kind]
    return getattr(pl.profilers, kind)(dirpath=dirpath, filename="profile", **options)


def without_time(names: list[str]) -> list[str]:
    """Names of traces without the time in them, and none of what depends on where checkpoints go."""
    return [".".join(part for part in name.split(".") if not part.isdecimal()) for name in names]


@pytest.mark.parametrize("kind", ["SimpleProfiler", "AdvancedProfiler", "PyTorchProfiler"])
@pytest.mark.parametrize("name", PACKAGES)
def test_a_bucket_has_the_files_that_a_local_folder_has(
    name: str, kind: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pl = importlib.import_module(name)
    fit(pl, make(pl, kind, str(tmp_path / "prof")))
    fit(pl, make(pl, kind, Path(bucket.url) / "prof"))  # a Path that has lost a slash
    local = Folder(tmp_path)
    assert sorted(without_time(bucket.names())) == sorted(without_time(local.names()))
    assert "Profile" in bucket.get("prof/fit-profile.txt").decode()
    for name in bucket.names():
        if name.endswith(".json"):
            assert json.loads(bucket.get(name))["traceEvents"]
        if name.endswith("training_step.prof"):
            (tmp_path / "x.prof").write_bytes(bucket.get(name))
            assert pstats.Stats(str(tmp_path / "x.prof")).total_calls > 0


def test_reports_of_runs_follow_each_other(bucket: Bucket) -> None:
    pl = importlib.import_module(PACKAGES[0])
    for _ in range(2):
        fit(pl, make(pl, "SimpleProfiler", f"{bucket.url}/prof"))
    assert bucket.get("prof/fit-profile.txt").decode().count("FIT Profiler Report") == 2


@pytest.mark.parametrize("kind", ["SimpleProfiler", "AdvancedProfiler", "PyTorchProfiler"])
def test_a_refused_profile_is_a_warning_and_neither_ends_training_nor_spoils_the_next_profile(
    kind: str, bucket: Bucket, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    pl = importlib.import_module(PACKAGES[0])
    with bucket.refusing(lambda method, path: 403), caplog.at_level(logging.WARNING):
        trainer = fit(pl, make(pl, kind, f"{bucket.url}/prof"))
    assert trainer.state.finished
    assert trainer.global_step == 7
    assert "A profile is lost" in caplog.text
    assert f"{bucket.url}/prof/fit-profile.txt" in caplog.text
    assert bucket.names() == []
    fit(pl, make(pl, kind, f"{bucket.url}/prof"))
    assert "prof/fit-profile.txt" in bucket.names()
