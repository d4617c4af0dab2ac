"""Full states that two ranks load into a distributed model; all cases in one run, which mostly takes time to start."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.archives.without_tensors import load_without_tensors
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.strategies.lazy_tensors import filled, mark_unread
from tests.servers import Bucket, Server
from tests.strategies.full_states import checkpoint, trained

WORKER = Path(__file__).with_name("full_state_worker.py")
REPOSITORY = Path(__file__).parents[2]
MIB = 2**20
Ranks = list[dict[str, Any]]

NET, OPTIMIZER = trained()
WEIGHTS = NET.state_dict()
SAVED = checkpoint(NET, OPTIMIZER)
LACKING = {name: value for name, value in WEIGHTS.items() if name != "uneven.weight"}
FILES = {
    "whole": SAVED,
    "weights": WEIGHTS,
    "lacking": LACKING,
    "other": {**WEIGHTS, "rows.weight": torch.ones(1024, 1000)},
}


@pytest.fixture(scope="module")
def outcomes(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    """What both ranks have after each case."""
    folder, bucket = tmp_path_factory.mktemp("full-state"), Bucket(server)
    for name, content in FILES.items():
        file = io.BytesIO()
        torch.save(content, file)
        bucket.put(f"{name}.ckpt", file.getvalue())
        (folder / f"{name}.ckpt").write_bytes(file.getvalue())
    cases = {
        "s3": {"path": f"{bucket.url}/whole.ckpt", "raw": False, "strict": True},
        "local": {"path": f"{folder}/whole.ckpt", "raw": False, "strict": True},
        "weights": {"path": f"{bucket.url}/weights.ckpt", "raw": True, "strict": True},
        "strict": {"path": f"{folder}/lacking.ckpt", "raw": True, "strict": True},
        "lax": {"path": f"{folder}/lacking.ckpt", "raw": True, "strict": False},
        "other": {"path": f"{bucket.url}/other.ckpt", "raw": True, "strict": True},
        "lost": {"path": f"{folder}/whole.ckpt", "raw": False, "strict": True, "lost_by": 1},
    }
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {**os.environ, **server.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ranks = [
        subprocess.Popen([sys.executable, str(WORKER), str(folder), str(rank)], env=environment, cwd=folder)
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    results = [torch.load(folder / f"rank-{rank}.pt") for rank in (0, 1)]
    return {name: [result[name] for result in results] for name in cases}


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert left == right


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3", "local"])
def test_each_rank_reads_what_it_keeps_and_has_what_was_saved(place: str, outcomes: dict[str, Ranks]) -> None:
    names = [name for name, _ in NET.named_parameters()]
    for rank in outcomes[place]:
        assert rank["error"] == ""
        assert_equal(rank["model"], dict(WEIGHTS))
        state = SAVED["optimizer"]["state"]
        assert_equal(rank["optimizer"], {name: state[i] for i, name in enumerate(names)})
        assert rank["lr"] == 0.25
        assert rank["epoch"] == 7
        assert_equal(rank["rest"], {"history": SAVED["history"], "latest": SAVED["latest"]})
        # 12 MiB are distributed by rows, of which a rank keeps one half, and 12 MiB by columns, whose rows it reads
        assert 18 * MIB < sum(rank["read"]) < 20 * MIB
        assert len(rank["read"]) < 40


@pytest.mark.slow
def test_weights_alone_are_loaded_into_the_model(outcomes: dict[str, Ranks]) -> None:
    for rank in outcomes["weights"]:
        assert rank["error"] == ""
        assert_equal(rank["model"], dict(WEIGHTS))
        assert 6 * MIB < sum(rank["read"]) < 8 * MIB


@pytest.mark.slow
def test_what_is_missing_is_named_by_every_rank_and_left_alone_if_asked_for(outcomes: dict[str, Ranks]) -> None:
    for rank in outcomes["strict"]:
        assert "KeyError" in rank["error"]
        assert "'uneven.weight'" in rank["error"]
    for rank in outcomes["lax"]:
        assert rank["error"] == ""
        assert torch.equal(rank["model"]["rows.weight"], WEIGHTS["rows.weight"])
        assert not torch.equal(rank["model"]["uneven.weight"], WEIGHTS["uneven.weight"])


@pytest.mark.slow
def test_a_tensor_of_another_size_is_an_error_on_every_rank(outcomes: dict[str, Ranks]) -> None:
    for rank in outcomes["other"]:
        assert "rows.weight" in rank["error"]
        assert "other.ckpt" in rank["error"]


@pytest.mark.slow
def test_a_file_that_one_rank_cannot_read_is_an_error_on_every_rank(outcomes: dict[str, Ranks]) -> None:
    first, second = outcomes["lost"]
    assert second["error"].startswith("FileNotFoundError: Checkpoint file not found: ")
    assert first["error"] == second["error"].replace(": ", ": rank 1: FileNotFoundError: ", 1)


@pytest.mark.parametrize("place", ["s3", "local"])
def test_a_file_that_is_replaced_before_its_tensors_are_read_is_an_error(
    place: str, bucket: Bucket, tmp_path: Path
) -> None:
    file = locate(f"{bucket.url}/x.ckpt" if place == "s3" else tmp_path / "x.ckpt")
    save_file({"w": torch.ones(3)}, file)
    loaded = load_without_tensors(file)
    assert loaded is not None
    assert loaded.obj["w"].is_meta
    loaded.file.check()
    save_file({"w": torch.zeros(3)}, file)
    with pytest.raises(OSError, match=r"x\.ckpt: it was replaced while it was read"):
        loaded.file.check()


def test_a_file_of_the_format_before_zip_files_is_left_to_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.ckpt", _use_new_zipfile_serialization=False)
    assert load_without_tensors(locate(tmp_path / "x.ckpt")) is None


def test_a_file_is_read_into_host_memory_whatever_the_default_device_is(tmp_path: Path) -> None:
    file = locate(tmp_path / "x.ckpt")
    weight = torch.rand(3, 4)
    save_file({"w": weight, "rows": weight[1:], "p": torch.nn.Parameter(torch.ones(2))}, file)
    loaded = load_without_tensors(file)
    assert loaded is not None
    mark_unread(loaded.obj, loaded.file)
    with torch.device("meta"):
        read = filled(loaded.obj)
    assert torch.equal(read["w"], weight)
    assert torch.equal(read["rows"], weight[1:])
    assert read["p"].eq(1).all()
