"""What went wrong first is what a run ends with, whatever goes wrong after it."""

import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning.fabric import Fabric
from lightning.fabric.storage.strategies.checkpoint_save import save_sharded
from lightning.fabric.storage.tools.preflight import SWITCH
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from tests.pytorch.background_runs import Model, make_trainer
from tests.servers import Bucket


def fail(step: int) -> None:
    if step == 1:
        raise ValueError("boom")


def callback_for(kind: str, folder: str) -> Checkpoint:
    if kind == "on exception":
        return OnExceptionCheckpoint(folder)
    return ModelCheckpoint(folder, save_on_exception=True, every_n_train_steps=100)


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("plugin", "kind", "refusal", "engine"),
    [
        (TorchCheckpointIO, "on exception", "no bucket", "obstore"),
        (TorchCheckpointIO, "on exception", "read-only", "fsspec"),
        (TorchCheckpointIO, "model checkpoint", "read-only", "obstore"),
        (AsyncCheckpointIO, "on exception", "read-only", "obstore"),
        (AsyncCheckpointIO, "model checkpoint", "no bucket", "fsspec"),
    ],
)
def test_a_save_after_an_exception_that_fails_does_not_hide_the_exception(
    plugin: Any,
    kind: str,
    refusal: str,
    engine: str,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    if engine == "fsspec":
        monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setenv(SWITCH, "0")  # or the run would not begin
    url = "s3://there-is-no-such-bucket/run" if refusal == "no bucket" else f"{bucket.url}/run"
    trainer = make_trainer(plugin(), tmp_path, callback_for(kind, url), OnExceptionCheckpoint(tmp_path / "whole"))
    with (
        bucket.refusing(lambda method, path: 403 if refusal == "read-only" and method in ("PUT", "POST") else None),
        pytest.raises(ValueError, match="boom") as raised,
    ):
        trainer.fit(Model([3.0, 2.0, 1.0], fail))
    (note,) = [line for line in shown(raised.value).splitlines() if url in line]  # says what was not saved
    (logged,) = [record for record in caplog.records if record.levelno == logging.ERROR and url in record.message]
    reason = "There is no bucket" if refusal == "no bucket" else "Grant them"
    assert reason in logged.message
    assert reason not in note
    assert "saved checkpoint to" not in caplog.text
    # the next callback has had its turn
    assert torch.load(tmp_path / "whole" / "on_exception.ckpt", weights_only=False)["global_step"] == 1


@pytest.mark.parametrize("plugin", [TorchCheckpointIO, AsyncCheckpointIO])
def test_a_save_after_an_exception_is_told_of_when_it_is_there(
    plugin: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    callback = ModelCheckpoint(tmp_path / "saves", save_on_exception=True, every_n_train_steps=100)
    with pytest.raises(ValueError, match="boom"):
        make_trainer(plugin(), tmp_path, callback).fit(Model([3.0, 2.0, 1.0], fail))
    assert "saved checkpoint to" in caplog.text


class Failing(CSVLogger):
    def finalize(self, status: str) -> None:
        raise OSError(f"the log is full, {status}")


class Saving(Callback):
    def on_exception(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint("s3://there-is-no-such-bucket/of-a-user.ckpt")


def test_neither_a_callback_nor_a_logger_that_fails_hides_the_exception(bucket: Bucket, tmp_path: Path) -> None:
    finalized: list[str] = []
    last = CSVLogger(tmp_path)
    last.finalize = finalized.append  # type: ignore[method-assign, assignment]
    trainer = make_trainer(TorchCheckpointIO(), tmp_path, Saving(), logger=[Failing(tmp_path), last])
    with pytest.raises(ValueError, match="boom") as raised:
        trainer.fit(Model([3.0, 2.0, 1.0], fail))
    assert "of-a-user.ckpt" in shown(raised.value)
    assert "the log is full, failed" in shown(raised.value)
    assert finalized == ["failed"]


def test_ctrl_c_ends_as_ever_when_the_save_after_it_fails(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(step: int) -> None:
        raise KeyboardInterrupt

    callback = OnExceptionCheckpoint("s3://there-is-no-such-bucket/run")
    with pytest.raises(SystemExit):
        make_trainer(TorchCheckpointIO(), tmp_path, callback).fit(Model([1.0], interrupt))
    assert [record for record in caplog.records if "there-is-no-such-bucket" in record.message]


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize("verb", ["save", "save shards", "load"])
def test_an_error_of_storage_shows_the_exception_that_was_being_handled(
    verb: str, engine: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "fsspec":
        monkeypatch.setitem(sys.modules, "obstore", None)
    fabric = Fabric(accelerator="cpu", devices=1)

    def handle() -> None:
        try:
            raise ValueError("boom")
        except ValueError:
            if verb == "save":
                fabric.save(f"{bucket.url}/a.ckpt", {"w": torch.ones(3)})
            elif verb == "save shards":
                save_sharded({"w": torch.ones(3)}, None, f"{bucket.url}/shards")
            else:
                fabric.load(f"{bucket.url}/a.ckpt")

    bucket.put("a.ckpt", b"1")
    with bucket.refusing(lambda method, path: 403), pytest.raises(PermissionError) as raised:
        handle()
    assert "ValueError: boom" in shown(raised.value)
    assert "ClientError" not in shown(raised.value)  # what the message has told already
    with bucket.refusing(lambda method, path: 403), pytest.raises(PermissionError) as raised:
        fabric.save(f"{bucket.url}/b.ckpt", {})
    assert raised.value.__suppress_context__
