"""Ranks of different nodes that give a folder of their own disks the same name."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.forks import Outcome
from tests.strategies.places import Local

OLD, NEW = 1.0, 2.0


def run(local: Local, task: str, folders: list[Path], **more: Any) -> list[Outcome]:
    """Each rank is in a folder of its own, and ``run/last.ckpt`` in that."""
    job = {"kind": "sharded", "strategy": "model_parallel", "path": "run/last.ckpt", "value": NEW, "lag_s": 0.2}
    return local.run({"task": task, **job, **more, "folders": [str(folder) for folder in folders]}, 2)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "node-0", tmp_path / "node-1"]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.parametrize(("strategy", "is_async"), [("model_parallel", False), ("fsdp", False), ("fsdp", True)])
def test_a_save_fails_on_every_rank_where_rank_zero_does_not_see_what_another_one_wrote(
    local: Local, folders: list[Path], strategy: str, is_async: bool
) -> None:
    outcomes = run(local, "save", folders, strategy=strategy, **{"async": is_async})
    for outcome in outcomes:
        assert re.match(r"OSError: Could not save the sharded checkpoint .*last\.ckpt: rank 0: ", outcome["error"])
        assert "_1_0.distcp was written by another rank" in outcome["error"]
        assert "use a file system that all nodes share, or a URL" in outcome["error"]
    assert [os.listdir(folder / "run") for folder in folders] == [[], []]


def test_the_checkpoint_before_stays_when_a_save_fails_since_nodes_do_not_share_its_folder(
    local: Local, folders: list[Path]
) -> None:
    saved = run(local, "save", [folders[0]] * 2, value=OLD)
    assert [outcome["error"] for outcome in saved] == [None, None]
    before = sorted(os.listdir(folders[0] / "run/last.ckpt"))
    assert "OSError" in run(local, "save", folders)[0]["error"]
    assert sorted(os.listdir(folders[0] / "run/last.ckpt")) == before
    loaded = run(local, "load", [folders[0]] * 2)
    assert [outcome["found"] for outcome in loaded] == [[OLD], [OLD]]


@pytest.mark.parametrize(
    ("strategy", "kind"), [("ddp", "full"), ("model_parallel", "full"), ("fsdp", "full"), ("fsdp", "sharded")]
)
def test_a_rank_that_does_not_see_a_checkpoint_says_that_its_node_may_not_share_the_folder(
    local: Local, folders: list[Path], strategy: str, kind: str
) -> None:
    saved = run(local, "save", [folders[0]] * 2, strategy=strategy, kind=kind)
    assert [outcome["error"] for outcome in saved] == [None, None]
    for outcome in run(local, "load", folders, strategy=strategy, kind=kind):
        assert outcome["error"].startswith("FileNotFoundError: ")
        assert "last.ckpt" in outcome["error"]
        assert "rank 1: does its node share the folder with that of rank zero?" in outcome["error"]
