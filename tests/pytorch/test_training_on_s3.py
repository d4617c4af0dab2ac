import importlib
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch

from tests.servers import Bucket

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


def make_model(pl: Any) -> Any:
    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return (self.layer(batch) - 10).pow(2).mean()

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val_loss", (self.layer(batch) - 10).pow(2).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4)

        val_dataloader = train_dataloader

    torch.manual_seed(1)
    return Model()


def make_trainer(pl: Any, url: str, **options: Any) -> Any:
    callbacks = importlib.import_module(f"{pl.__name__}.callbacks")
    checkpoint = callbacks.ModelCheckpoint(
        dirpath=f"{url}/checkpoints/", filename="sample-model-{epoch:02d}", save_top_k=1, monitor="val_loss"
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        callbacks=[checkpoint], default_root_dir=f"{url}/checkpoints/", accelerator="cpu", devices=1, **quiet, **options
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_a_run_keeps_its_best_checkpoint_on_s3_and_goes_on_from_it(
    name: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    straight = make_model(pl)
    trainer = make_trainer(pl, bucket.url, max_epochs=4)
    trainer.fit(straight)
    assert bucket.names() == ["checkpoints/sample-model-epoch=03.ckpt"]
    assert trainer.checkpoint_callback.best_model_path == f"{bucket.url}/checkpoints/sample-model-epoch=03.ckpt"

    bucket.empty()
    first = make_trainer(pl, bucket.url, max_epochs=2)
    first.fit(make_model(pl))
    resumed = make_model(pl)
    make_trainer(pl, bucket.url, max_epochs=4).fit(resumed, ckpt_path=first.checkpoint_callback.best_model_path)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))
    loaded = type(resumed).load_from_checkpoint(f"{bucket.url}/checkpoints/sample-model-epoch=03.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), loaded.parameters(), strict=True))
    assert os.listdir(tmp_path) == []  # no folder called `s3:`


@pytest.mark.parametrize(("method", "what"), [("HEAD", "Asking about"), ("DELETE", "The removal of")])
def test_a_store_that_is_away_for_longer_than_its_client_tries_does_not_end_training(
    method: str, what: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pl = importlib.import_module(PACKAGES[0])
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    left = [503] * 3
    trainer = make_trainer(pl, bucket.url, max_epochs=2)
    with bucket.refusing(
        lambda asked, path: left.pop() if left and asked == method and "model-epoch" in path else None
    ):
        trainer.fit(make_model(pl))
    assert bucket.names() == ["checkpoints/sample-model-epoch=01.ckpt"]
    assert not left
    assert caplog.text.count(f"{what} {bucket.url}/checkpoints/sample-model-epoch=0") == 1


@pytest.mark.parametrize("name", PACKAGES)
def test_a_denied_save_stops_the_run_with_the_path_and_keeps_the_checkpoint_before(name: str, bucket: Bucket) -> None:
    pl = importlib.import_module(name)
    trainer = make_trainer(pl, bucket.url, max_epochs=3)
    with (
        bucket.refusing(lambda method, path: 403 if method == "PUT" and "epoch%3D01" in path else None),
        pytest.raises(PermissionError, match=r"checkpoints/sample-model-epoch=01\.ckpt.*unchanged"),
    ):
        trainer.fit(make_model(pl))
    assert bucket.names() == ["checkpoints/sample-model-epoch=00.ckpt"]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_path_made_from_a_url_means_the_url_everywhere(
    name: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    callbacks = importlib.import_module(f"{name}.callbacks")
    checkpoint = callbacks.ModelCheckpoint(dirpath=Path(f"{bucket.url}/run"), filename="x")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        callbacks=[checkpoint], default_root_dir=Path(f"{bucket.url}/root"), max_epochs=1, accelerator="cpu", **quiet
    )
    assert trainer.default_root_dir == f"{bucket.url}/root"
    model = make_model(pl)
    trainer.fit(model)
    assert checkpoint.best_model_path == f"{bucket.url}/run/x.ckpt"
    trainer.save_checkpoint(Path(f"{bucket.url}/run/y.ckpt"))
    assert bucket.names() == ["run/x.ckpt", "run/y.ckpt"]
    type(model).load_from_checkpoint(Path(f"{bucket.url}/run/y.ckpt"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_a_file_url_is_a_local_path_for_the_checkpoint_callback(name: str, tmp_path: Path) -> None:
    callbacks = importlib.import_module(f"{name}.callbacks")
    assert callbacks.ModelCheckpoint(dirpath=f"file://{tmp_path}/run").dirpath == os.path.realpath(tmp_path / "run")
    assert callbacks.ModelCheckpoint(dirpath=tmp_path / "run").dirpath == os.path.realpath(tmp_path / "run")
    assert callbacks.ModelCheckpoint().dirpath is None


@pytest.mark.parametrize("place", ["s3", "local"])
def test_loading_a_sharded_checkpoint_as_a_file_says_what_it_is(place: str, bucket: Bucket, tmp_path: Path) -> None:
    pl = importlib.import_module("lightning.pytorch")
    model = type(make_model(pl))
    if place == "s3":
        bucket.put("run/x.ckpt/meta.pt", b"1")
    else:
        (tmp_path / "run/x.ckpt").mkdir(parents=True)
        (tmp_path / "run/x.ckpt/meta.pt").touch()
    root = bucket.url if place == "s3" else str(tmp_path)
    with pytest.raises(IsADirectoryError, match="is a sharded checkpoint: load it with FSDP or ModelParallel"):
        model.load_from_checkpoint(f"{root}/run/x.ckpt")
    with pytest.raises(IsADirectoryError, match="is a folder, not a checkpoint file"):
        model.load_from_checkpoint(f"{root}/run")
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*y\.ckpt"):
        model.load_from_checkpoint(f"{root}/run/y.ckpt")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_checkpoint_plugin_of_someone_else_is_called_as_ever(name: str, tmp_path: Path) -> None:
    pl = importlib.import_module(name)
    io = importlib.import_module(f"{name}.plugins.io")
    calls = []

    class Plugin(io.CheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            calls.append(("save", Path(path).name, storage_options))
            torch.save(checkpoint, path)

        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
            calls.append(("load", Path(path).name, map_location))
            return torch.load(path, map_location=map_location, weights_only=weights_only)

        def remove_checkpoint(self, path: Any) -> None:
            calls.append(("remove", Path(path).name))
            os.remove(path)

    (tmp_path / "checkpoints").mkdir()
    trainer = make_trainer(pl, str(tmp_path), max_epochs=2, plugins=[Plugin()])
    trainer.fit(make_model(pl))
    trainer.validate(make_model(pl), ckpt_path="best", verbose=False)
    assert calls == [
        ("save", "sample-model-epoch=00.ckpt", None),
        ("save", "sample-model-epoch=01.ckpt", None),
        ("remove", "sample-model-epoch=00.ckpt"),
        ("load", "sample-model-epoch=01.ckpt", None),
    ]


@pytest.mark.parametrize("name", PACKAGES)
def test_storage_options_of_a_save_reach_the_store(
    name: str, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = importlib.import_module(name)
    trainer = make_trainer(pl, str(tmp_path), max_epochs=1)
    trainer.fit(make_model(pl))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options = {"endpoint_url": bucket.server.endpoint}
    trainer.save_checkpoint(f"{bucket.url}/x.ckpt", storage_options=options)
    assert bucket.names() == ["x.ckpt"]
    plugin = trainer.strategy.checkpoint_io
    assert plugin.load_checkpoint(f"{bucket.url}/x.ckpt", storage_options=options)["epoch"] == 1
    assert list(inspect.signature(plugin.load_checkpoint).parameters)[:3] == ["path", "map_location", "weights_only"]
    plugin.remove_checkpoint(f"{bucket.url}/x.ckpt", storage_options=options)
    assert bucket.names() == []
