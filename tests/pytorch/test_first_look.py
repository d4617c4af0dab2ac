"""A run that could not save its checkpoints stops before its first step, after one request."""

import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch
from torch.utils.data import DataLoader

from lightning.fabric.storage.tools import preflight
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.pytorch.interruptible import Processes, running
from tests.servers import Bucket, Refusal

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "logger": False}


class Model(LightningModule):
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 2))


@pytest.fixture(autouse=True, params=["obstore", "s3fs"])
def _engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if request.param == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)


#: Another process has obstore in any case.
in_a_process = pytest.mark.parametrize("_engine", ["obstore"], indirect=True)


def fit(*folders: str, **options: Any) -> Model:
    model = Model()
    callbacks = [
        ModelCheckpoint(folder, filename=f"{number}", every_n_epochs=number) for number, folder in enumerate(folders, 1)
    ]
    trainer = Trainer(max_epochs=1, callbacks=callbacks, **{"devices": 1, **QUIET, **options})
    trainer.fit(model)
    return model


def stopped(error: type[Exception], text: str, *folders: str, **options: Any) -> None:
    model = Model()
    callbacks = [ModelCheckpoint(folder) for folder in folders]
    trainer = Trainer(max_epochs=1, callbacks=callbacks, **{"devices": 1, **QUIET, **options})
    with pytest.raises(error, match=text):
        trainer.fit(model)
    assert model.steps == 0


def test_a_bucket_that_is_missing_stops_the_run(bucket: Bucket) -> None:
    before = len(bucket.server.proxy.requests)
    stopped(FileNotFoundError, "There is no bucket 'no-such-bucket': make it", "s3://no-such-bucket/run")
    ((method, path),) = bucket.server.proxy.requests[before:]
    assert method == "GET"
    assert "prefix=run%2F" in path


def test_a_run_that_is_to_go_on_in_a_bucket_that_is_missing_is_told_nothing_else(
    bucket: Bucket, recwarn: pytest.WarningsRecorder
) -> None:
    trainer = Trainer(max_epochs=1, devices=1, callbacks=[ModelCheckpoint("s3://no-such-bucket/run")], **QUIET)
    with pytest.raises(
        FileNotFoundError, match=r"saved to s3://no-such-bucket/run\. There is no bucket 'no-such-bucket': make it"
    ):
        trainer.fit(Model(), ckpt_path="last")
    assert not [one for one in recwarn if "no last checkpoint available" in str(one.message)]


def test_a_run_that_is_to_go_on_in_a_bucket_that_is_empty_begins_anew(bucket: Bucket) -> None:
    trainer = Trainer(max_epochs=1, devices=1, callbacks=[ModelCheckpoint(f"{bucket.url}/run")], **QUIET)
    with pytest.warns(UserWarning, match="no last checkpoint available"):
        trainer.fit(Model(), ckpt_path="last")
    assert trainer.global_step == 4


def test_a_root_in_a_bucket_that_is_missing_stops_the_run(bucket: Bucket, tmp_path: Path) -> None:
    root = "s3://no-such-bucket/run"
    stopped(FileNotFoundError, "There is no bucket 'no-such-bucket'", str(tmp_path), default_root_dir=root)
    stopped(FileNotFoundError, "no bucket 'no-such-bucket'", default_root_dir=root, enable_checkpointing=False)


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
def test_credentials_that_are_not_valid_stop_the_run(bucket: Bucket, code: str) -> None:
    refusal = Refusal.of_s3(400 if code == "ExpiredToken" else 403, code, code)
    with bucket.refusing(lambda method, path: refusal):
        stopped(PermissionError, "AWS_ACCESS_KEY_ID", f"{bucket.url}/run")
    assert {method for method, _ in bucket.requests} == {"GET"}


def test_an_endpoint_that_is_down_stops_the_run_within_seconds(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    started = time.monotonic()
    stopped(OSError, "Is the server the right one", f"{bucket.url}/run")
    assert time.monotonic() - started < preflight.LIMIT_S


def test_an_endpoint_that_never_answers_stops_the_run(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        s3fs.S3FileSystem.clear_instance_cache()
        stopped(TimeoutError, "no answer in .* Is the server the right one", f"{bucket.url}/run")


def test_a_role_that_may_write_and_not_list_is_warned_and_goes_on(bucket: Bucket) -> None:
    denied = Refusal.of_s3(403, "AccessDenied", "Access Denied")
    checkpoint = ModelCheckpoint(f"{bucket.url}/run", filename="x", enable_version_counter=False)
    trainer = Trainer(max_epochs=1, devices=1, callbacks=[checkpoint], **QUIET)
    with (
        bucket.refusing(lambda method, path: denied if "list-type" in path else None),
        pytest.warns(match=r"`s3:ListBucket` .* The run goes on"),
    ):
        trainer.fit(Model())
    assert bucket.names() == ["run/x.ckpt"]


def test_a_name_that_cannot_be_asked_about_names_the_permission(bucket: Bucket) -> None:
    """Before a save, unless `enable_version_counter` is off: what is there may be another run's."""
    denied = Refusal.of_s3(403, "AccessDenied", "Access Denied")
    with (
        bucket.refusing(lambda method, path: denied if "list-type" in path else None),
        pytest.raises(PermissionError, match=r"Could not look at .*/run/1\.ckpt: .* `s3:ListBucket`"),
        pytest.warns(match="The run goes on"),
    ):
        fit(f"{bucket.url}/run")


def test_a_store_that_is_busy_does_not_stop_the_run(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    model = Model()

    def refuse(method: str, path: str) -> int | None:
        return 503 if model.steps == 0 else None

    trainer = Trainer(max_epochs=1, devices=1, callbacks=[ModelCheckpoint(f"{bucket.url}/run")], **QUIET)
    with bucket.refusing(refuse), pytest.warns(match="The run goes on"):
        trainer.fit(model)
    assert model.steps == 4


def test_each_folder_is_looked_at_once_and_before_the_first_step(bucket: Bucket) -> None:
    for folder in ("run", "other"):
        bucket.put(f"{folder}/x", b"")
    fit(f"{bucket.url}/run", f"{bucket.url}/run/", f"{bucket.url}/other", default_root_dir=bucket.url)
    first = next(i for i, (method, _) in enumerate(bucket.requests) if method != "GET")
    asked = [path.partition("prefix=")[2].partition("&")[0] for _, path in bucket.requests[:first]]
    assert [prefix for prefix in asked if prefix] == ["run%2F", "other%2F"]


def test_the_variable_switches_the_look_off(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(preflight.SWITCH, "0")
    model = Model()
    before = len(bucket.server.proxy.requests)
    trainer = Trainer(
        max_epochs=1, devices=1, limit_train_batches=0, callbacks=[ModelCheckpoint("s3://no-such-bucket/run")], **QUIET
    )
    trainer.fit(model)
    assert bucket.server.proxy.requests[before:] == []


def test_other_stages_do_not_look(bucket: Bucket) -> None:
    before = len(bucket.server.proxy.requests)
    trainer = Trainer(devices=1, callbacks=[ModelCheckpoint("s3://no-such-bucket/run")], **QUIET)
    model = Model()
    model.test_step = model.training_step  # type: ignore[method-assign]
    trainer.test(model, DataLoader(torch.ones(4, 2)), verbose=False)
    assert bucket.server.proxy.requests[before:] == []


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with running() as started:
        yield started


@in_a_process
@pytest.mark.parametrize("kind", ["root", "loggers"])
def test_a_bucket_that_is_missing_is_told_of_once(
    kind: str, bucket: Bucket, processes: Processes, tmp_path: Path
) -> None:
    job = {"kind": kind, "environment": bucket.server.environment}
    assert processes.wait(processes.start("logged_at_nowhere", tmp_path, **job)) == 1
    said = (tmp_path / "output.txt").read_text()
    assert said.count("There is no bucket 'no-such-bucket'") == 1, said
    assert "FileNotFoundError: Checkpoints cannot be saved to s3://no-such-bucket/run" in said
    assert "Logs are still not up to date in s3://no-such-bucket/run" in said


@in_a_process
def test_all_ranks_stop_and_one_has_looked(bucket: Bucket, processes: Processes, tmp_path: Path) -> None:
    before = len(bucket.server.proxy.requests)
    launched = {**bucket.server.environment, "WORLD_SIZE": "2", "NODE_RANK": "0"}
    pids = [
        processes.start(
            "saved_at_nowhere", tmp_path, output=f"output-{rank}.txt", rank=rank,
            environment={**launched, "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [processes.wait(pid) for pid in pids] == [0, 0]
    for rank in range(2):
        said = (tmp_path / f"output-{rank}.txt").read_text()
        assert re.search(r"^steps: 0, error: .*There is no bucket 'no-such-bucket'", said, re.MULTILINE), said
    assert len(bucket.server.proxy.requests) == before + 1
