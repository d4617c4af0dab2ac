"""Profilers that write to a store, and one that refuses."""

import importlib
import json
import logging
import pstats
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning.pytorch.profilers import profiles
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
        if name.endswith(".stack"):
            assert re.search(r"training_step.* \d+$", bucket.get(name).decode(), re.MULTILINE)
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
    kind: str,
    bucket: Bucket,
    impatient: None,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    pl = importlib.import_module(PACKAGES[0])
    with bucket.refusing(lambda method, path: 403), caplog.at_level(logging.WARNING):
        trainer = fit(pl, make(pl, kind, f"{bucket.url}/prof"))
    assert trainer.state.finished
    assert trainer.global_step == 7
    assert f"{bucket.url}/prof/fit-profile" in caplog.text
    (kept,) = temporary.iterdir()
    assert caplog.text.count(f"Profiles for {bucket.url}/prof stay in {kept}. Could not ") == 1
    assert "Profile" in (kept / "fit-profile.txt").read_text()
    names = sorted(without_time(Folder(kept).names()))
    assert bucket.names() == []
    fit(pl, make(pl, kind, f"{bucket.url}/prof"))
    assert [f"prof/{name}" for name in names] == sorted(without_time(bucket.names()))
    assert list(temporary.iterdir()) == [kept]
    assert all(path.stat().st_size for path in kept.iterdir())


def test_stacks_that_pytorch_did_not_record_are_a_warning_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiles._warn_of_no_stacks.cache_clear()
    pl = importlib.import_module(PACKAGES[0])
    unasked = {"experimental_config": torch._C._profiler._ExperimentalConfig()}
    with caplog.at_level(logging.WARNING):
        for name in ("one", "two"):
            fit(pl, pl.profilers.PyTorchProfiler(tmp_path, name, export_to_flame_graph=True, **unasked))
    assert len([path for path in tmp_path.glob("*.stack") if path.stat().st_size == 0]) == 2
    assert caplog.text.count("PyTorch has recorded no stacks") == 1
