"""No run makes a local folder named after a protocol: a path that was a URL is taken for that, or refused."""

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning.fabric import Fabric
from lightning.fabric.storage.collectives.errors import saving_together
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.model_registry import _determine_model_folder


@pytest.fixture(autouse=True)
def nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    MemoryFileSystem.store.clear()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "path", ["s3:/bucket/x", "/folder/s3:/bucket/x", Path("/folder/memory:/x"), "run/gs:/bucket/x"]
)
def test_what_was_a_url_and_cannot_be_repaired_is_refused(path: Any) -> None:
    for take in (locate, ModelCheckpoint, OnExceptionCheckpoint, lambda root: Trainer(default_root_dir=root)):
        with pytest.raises(ValueError, match="would be in a local folder called"):
            take(path)


def test_a_folder_that_is_called_so_can_be_used(tmp_path: Path) -> None:
    (tmp_path / "s3:").mkdir()
    assert locate(f"{tmp_path}/s3:/x.ckpt").raw == f"{tmp_path}/s3:/x.ckpt"
    (tmp_path / "s3:").rmdir()


def test_the_callback_for_exceptions_takes_a_path_made_from_a_url_and_a_file_url(tmp_path: Path) -> None:
    assert OnExceptionCheckpoint(Path("s3://bucket/run")).ckpt_path == "s3://bucket/run/on_exception.ckpt"
    assert OnExceptionCheckpoint(f"file://{tmp_path}").ckpt_path == f"{tmp_path}/on_exception.ckpt"
    assert OnExceptionCheckpoint(".").ckpt_path == "./on_exception.ckpt"


def test_the_list_of_batches_with_spikes_goes_to_the_url() -> None:
    detection = SpikeDetection(exclude_batches_path="memory://run/spikes")
    fabric: Any = SimpleNamespace(global_rank=0)
    detection.exclude_batches_path = "memory://run/spikes/skip_batches.json"
    with pytest.raises(TrainingSpikeException):
        detection._handle_spike(fabric, 5)
    assert json.loads(MemoryFileSystem.store["/run/spikes/skip_batches.json"].getvalue()) == [4, 5]


def test_what_can_only_write_to_local_folders_refuses_urls() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabrics = importlib.import_module("lightning.fabric.strategies.xla_fsdp").XLAFSDPStrategy
    fabric._strategy = fabrics.__new__(fabrics)
    with pytest.raises(ValueError, match="'s3://bucket/x' is a URL, and XLAFSDPStrategy can only use a local folder"):
        fabric.save("s3://bucket/x", {})
    deepspeed = importlib.import_module("lightning.pytorch.strategies.deepspeed").DeepSpeedStrategy
    with pytest.raises(ValueError, match="DeepSpeedStrategy can only use a local folder"):
        saving_together(deepspeed.__new__(deepspeed), Path("s3://bucket/x"))
    with pytest.raises(ValueError, match="registry, to which it downloads, can only use a local folder"):
        _determine_model_folder("model", "s3://bucket/root")
    assert _determine_model_folder("model", "root") == "root/model"


def test_scores_are_written_to_the_url() -> None:
    callback = ModelCheckpoint("memory://run")
    callback.best_k_models = {"memory://run/x.ckpt": torch.tensor(1.0)}
    callback.to_yaml()
    callback.to_yaml(Path("memory://run/sub/scores.yaml"))
    assert MemoryFileSystem.store["/run/best_k_models.yaml"].getvalue() == b"memory://run/x.ckpt: 1.0\n"
    assert "/run/sub/scores.yaml" in MemoryFileSystem.store
