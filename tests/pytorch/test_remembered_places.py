"""Runs that are resumed from a checkpoint which remembers others, in places that cannot be asked about any more."""

import importlib
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adlfs import AzureBlobFileSystem
from fsspec.registry import _registry

from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.tools import recorded
from lightning.fabric.storage.tools.recorded import why_lost
from lightning.pytorch.utilities.checkpoint_hparams import is_checkpoint_file
from tests.pytorch.test_checkpoint_selection import lose, make_run, make_shards
from tests.pytorch.test_training_on_s3 import PACKAGES, make_model
from tests.servers import Bucket
from tests.strategies.conftest import forks as forks
from tests.strategies.forks import Forks
from tests.strategies.trainings import Runs

#: Folders that cannot be asked about, each for another reason.
UNASKABLE = [
    pytest.param("/old/s3:/b/run", id="a local path that was a URL"),
    pytest.param("gs://b/run", id="no client"),
    pytest.param("az://b/run", id="no account"),
    pytest.param("nosuch://b/run", id="no such protocol"),
    pytest.param("webhdfs://127.0.0.1:1/run", id="a host that is gone"),
]


@pytest.fixture(autouse=True)
def without_clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No client of Google's, and no account at Azure."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for protocol in ("gs", "gcs"):
        monkeypatch.delitem(_registry, protocol, raising=False)
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    AzureBlobFileSystem.clear_instance_cache()
    yield
    AzureBlobFileSystem.clear_instance_cache()


@pytest.fixture
def silent_host() -> Iterator[str]:
    """Takes connections, and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def remembering(first: Any, folder: Path, **state: Any) -> str:
    """A checkpoint of a run, whose ModelCheckpoint remembers what it is told to."""
    checkpoint = first._checkpoint_connector.dump_checkpoint()
    checkpoint["callbacks"][first.checkpoint_callback.state_key].update(state)
    save_file(checkpoint, folder / "x.ckpt")
    return f"{folder}/x.ckpt"


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("folder", UNASKABLE)
def test_a_run_forgets_what_cannot_be_asked_about_and_goes_on(folder: str, name: str, tmp_path: Path) -> None:
    pl = importlib.import_module(name)
    first = make_run(pl, tmp_path, epochs=1, save_top_k=2)
    first.fit(make_model(pl))
    own = first.checkpoint_callback.best_model_path
    lost = {f"{folder}/{epoch}.ckpt": torch.tensor(1000.0 + epoch) for epoch in range(2)}
    best = {"best_model_path": f"{folder}/1.ckpt", "best_model_score": torch.tensor(1001.0)}
    others = {"kth_best_model_path": f"{folder}/0.ckpt", "last_model_path": f"{folder}/last.ckpt"}
    scores = {**first.checkpoint_callback.best_k_models, **lost}
    path = remembering(first, tmp_path, best_k_models=scores, **best, **others)

    resumed = make_run(pl, tmp_path, epochs=3, save_top_k=2, save_last=True)
    started = time.monotonic()
    with pytest.warns(UserWarning, match=r"no longer counts 3 of .*cannot be asked") as warned:
        resumed.fit(make_model(pl), ckpt_path=path)
    assert time.monotonic() - started < 60
    assert len([warning for warning in warned if "no longer counts" in str(warning.message)]) == 1
    callback = resumed.checkpoint_callback
    assert own in callback.best_k_models
    assert len(callback.best_k_models) == 2
    assert callback.best_model_path == own
    assert all(Path(path).is_file() for path in [*callback.best_k_models, callback.last_model_path])


@pytest.mark.parametrize("folder", UNASKABLE)
def test_a_run_whose_folder_was_one_that_cannot_be_asked_about_goes_on(folder: str, tmp_path: Path) -> None:
    pl = importlib.import_module("lightning.pytorch")
    first = make_run(pl, tmp_path, epochs=1, monitor=None)
    first.fit(make_model(pl))
    path = remembering(first, tmp_path, dirpath=folder, best_model_path=f"{folder}/x.ckpt")
    resumed = make_run(pl, tmp_path, epochs=3, monitor=None)
    with (
        pytest.warns(UserWarning, match="no longer counts 1 of"),
        pytest.warns(UserWarning, match="dirpath has changed"),
    ):
        resumed.fit(make_model(pl), ckpt_path=path)
    assert resumed.global_step == 6
    assert Path(resumed.checkpoint_callback.best_model_path).is_file()


def test_a_host_that_does_not_answer_keeps_a_run_from_training_for_seconds_at_most(
    silent_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "PATIENCE_S", 1.0)
    whole = tmp_path / "whole.ckpt"
    save_file({"w": torch.ones(3)}, whole)
    places = [f"webhdfs://{silent_host}/{folder}/{number}.ckpt" for folder in range(5) for number in range(5)]
    started = time.monotonic()
    answers = why_lost([*places, str(whole)])
    assert time.monotonic() - started < 10
    assert answers.pop(str(whole)) is None
    assert list(answers) == places
    assert all(isinstance(answer, TimeoutError) for answer in answers.values())


@pytest.mark.slow
def test_ranks_forget_together(forks: Forks, tmp_path: Path) -> None:
    runs = Runs(tmp_path, forks)
    url = str(tmp_path / "checkpoints")
    case = {"api": "trainer", "strategy": "fsdp", "kind": "full", "package": "lightning", "url": url}
    runs.train(**case, epochs=1)
    checkpoint = torch.load(f"{url}/epoch=0.ckpt")
    for state in checkpoint["callbacks"].values():
        state.update(best_model_path="nosuch://b/x.ckpt", last_model_path="gs://b/last.ckpt", dirpath="/old/s3:/b")
    save_file(checkpoint, tmp_path / "x.ckpt")
    assert [rank["batches_seen"] for rank in runs.train(**case, epochs=2, resume=f"{tmp_path}/x.ckpt")] == [4, 4]


def test_one_listing_a_folder_tells_of_all_files_in_it(bucket: Bucket) -> None:
    names = [f"run/epoch={epoch}.ckpt" for epoch in range(60)]
    for name in names:
        bucket.put(name, b"1")
    bucket.put("run/empty.ckpt", b"")
    places = [f"{bucket.url}/{name}" for name in [*names, "run/gone.ckpt"]]
    before = len(bucket.requests)
    answers = why_lost(places)
    asked = bucket.requests[before:]
    assert [method for method, path in asked if "list-type=2" in path and "prefix=run" in path] == ["GET"]
    assert len(asked) == 1, asked
    assert [place for place in places if answers[place] is not None] == [f"{bucket.url}/run/gone.ckpt"]
    assert "is empty" in str(why_lost([f"{bucket.url}/run/empty.ckpt"]).popitem()[1])


def test_folders_of_shards_are_looked_into(bucket: Bucket, tmp_path: Path) -> None:
    make_shards(tmp_path / "whole.ckpt")
    lose(".metadata")(tmp_path / "part.ckpt")
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04 and no more")
    for file in [*tmp_path.glob("whole.ckpt/*"), *tmp_path.glob("whole.ckpt/.*"), *tmp_path.glob("part.ckpt/*")]:
        bucket.put(str(file.relative_to(tmp_path)), file.read_bytes())
    for root in (bucket.url, str(tmp_path)):
        answers = why_lost([f"{root}/{name}.ckpt" for name in ("whole", "part")])
        assert answers[f"{root}/whole.ckpt"] is None
        assert ".metadata" in str(answers[f"{root}/part.ckpt"])
    assert "is cut off" in str(why_lost([f"{tmp_path}/cut.ckpt"])[f"{tmp_path}/cut.ckpt"])


@pytest.mark.parametrize("path", ["nosuch://b/x.ckpt", "gs://b/x.ckpt", "/old/s3:/b/x.ckpt"])
def test_the_command_line_leaves_what_it_cannot_ask_about_to_the_plugin_that_loads(path: str) -> None:
    assert not is_checkpoint_file(path)
