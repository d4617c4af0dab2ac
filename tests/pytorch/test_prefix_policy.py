"""A whole run with the rights on one prefix of a bucket, and none on the bucket: teams share buckets in this way."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch
from torch.utils.data import DataLoader

from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.fabric.loggers import TensorBoardLogger as FabricTensorBoardLogger
from lightning.fabric.storage.background.pending import drain
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.remove import remove
from lightning.fabric.storage.tools.copy import duplicate
from lightning.fabric.storage.tools.verify import verify
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from tests.servers import Bucket
from tests.storage.sharded.test_metadata_file import load, save

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}


class Model(LightningModule):
    def __init__(self, lr: float = 0.01, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.layer(batch).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("val_loss", self.layer(batch).pow(2).mean())

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(16, 2), batch_size=self.hparams["batch_size"])

    val_dataloader = test_dataloader = train_dataloader


@pytest.fixture(autouse=True, params=["obstore", "s3fs"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)


def is_allowed(method: str, target: str) -> bool:
    """What a policy says that grants `run` and what is under it, and ListBucket with that prefix."""
    parts = urlsplit(target)
    key = unquote(parts.path).lstrip("/").partition("/")[2]
    query = parse_qs(parts.query)
    if key:
        return f"{key}/".startswith("run/")
    return method == "GET" and "list-type" in query and query.get("prefix", [""])[0].startswith("run/")


@pytest.fixture
def root(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the prefix. The test fails if anything else was asked for, also if the refusal was borne with."""
    monkeypatch.chdir(tmp_path)
    with bucket.refusing(lambda method, path: None if is_allowed(method, path) else 403):
        yield f"{bucket.url}/run"
    assert [request for request in bucket.requests if not is_allowed(*request)] == []


def train(root: str, epochs: int = 1, ckpt_path: str | None = None, **options: Any) -> Trainer:
    checkpoint = ModelCheckpoint(f"{root}/checkpoints", monitor="val_loss", save_last=True, save_top_k=1)
    trainer = Trainer(
        default_root_dir=root, max_epochs=epochs, log_every_n_steps=1, **QUIET, **{"logger": False, **options},
        callbacks=[checkpoint, OnExceptionCheckpoint(root)],
    )  # fmt: skip
    trainer.fit(Model(), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("plugins", [[], [AsyncCheckpointIO]])
def test_a_run_is_saved_resumed_and_evaluated(root: str, bucket: Bucket, plugins: list[type]) -> None:
    train(root, plugins=[plugin() for plugin in plugins])
    trainer = train(root, 2, "last", plugins=[plugin() for plugin in plugins])
    trainer.test(ckpt_path="best", verbose=False)
    train(root, 3, trainer.checkpoint_callback.best_model_path)
    Model.load_from_checkpoint(f"{root}/checkpoints/last.ckpt")
    trainer.save_checkpoint(f"{root}/x.ckpt")
    trainer.strategy.remove_checkpoint(f"{root}/x.ckpt")
    drain()
    assert bucket.names("run/checkpoints/last") == ["run/checkpoints/last.ckpt"]


def test_a_run_with_the_defaults_is_saved(root: str, bucket: Bucket) -> None:
    trainer = Trainer(default_root_dir=root, max_epochs=1, log_every_n_steps=1, **QUIET)
    trainer.fit(Model())
    names = bucket.names()
    assert "run/lightning_logs/version_0/metrics.csv" in names or any("events.out" in name for name in names)
    assert [name for name in names if name.startswith("run/lightning_logs/version_0/checkpoints/")]


def test_loggers_write(root: str, bucket: Bucket) -> None:
    pytest.importorskip("tensorboard")
    train(root, logger=[CSVLogger(root), TensorBoardLogger(root, name="tensorboard")])
    train(root, 2, logger=[CSVLogger(root), TensorBoardLogger(root, name="tensorboard")])
    names = bucket.names()
    for version in range(2):
        assert f"run/lightning_logs/version_{version}/metrics.csv" in names
        assert any(name.startswith(f"run/tensorboard/version_{version}/events.out") for name in names)


@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler])
def test_profilers_write(root: str, bucket: Bucket, kind: type) -> None:
    train(root, profiler=kind(dirpath=f"{root}/profiles", filename="report"))
    assert bucket.names("run/profiles/")


def test_the_command_line_saves_its_configuration(root: str, bucket: Bucket) -> None:
    def run(*arguments: str) -> LightningCLI:
        options = [f"--trainer.{name}={value}".lower() for name, value in QUIET.items()]
        return LightningCLI(
            Model, seed_everything_default=1, args=[*arguments, *options, "--trainer.max_epochs=1"],
            trainer_defaults={"default_root_dir": root, "callbacks": [ModelCheckpoint(f"{root}/cli")]},
        )  # fmt: skip

    first = run("fit", "--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={root}")
    run("fit", f"--config={root}/lightning_logs/version_0/config.yaml", f"--trainer.logger.save_dir={root}/again")
    run("validate", f"--ckpt_path={first.trainer.checkpoint_callback.best_model_path}", "--trainer.logger=false")
    saved = [name for name in bucket.names() if name.endswith("config.yaml")]
    assert saved == [
        f"run/{folder}config.yaml" for folder in ("again/lightning_logs/version_0/", "", "lightning_logs/version_0/")
    ]


def test_the_tuner_keeps_its_checkpoints(root: str, bucket: Bucket) -> None:
    trainer = Trainer(default_root_dir=root, max_epochs=1, logger=False, enable_checkpointing=False, **QUIET)
    tuner = Tuner(trainer)
    tuner.lr_find(Model(), num_training=3, attr_name="lr")
    tuner.scale_batch_size(Model(), steps_per_trial=1, max_trials=1)
    assert any(path.partition("?")[0].endswith(".ckpt") for method, path in bucket.requests if method == "PUT")
    assert bucket.names() == []


def test_fabric_saves_loads_and_logs(root: str, bucket: Bucket) -> None:
    pytest.importorskip("tensorboard")
    loggers = [FabricCSVLogger(root, name="csv"), FabricTensorBoardLogger(root, name="tensorboard")]
    fabric = Fabric(accelerator="cpu", devices=1, loggers=loggers)
    state = {"w": torch.ones(3)}
    fabric.save(f"{root}/fabric/x.ckpt", state)
    fabric.load(f"{root}/fabric/x.ckpt", state)
    fabric.log("loss", 1.0)
    for logger in loggers:
        logger.finalize("success")
    assert {name.split("/")[1] for name in bucket.names()} == {"csv", "fabric", "tensorboard"}


def test_a_job_of_slurm_is_resumed(root: str, bucket: Bucket) -> None:
    trainer = train(root)
    trainer.save_checkpoint(f"{root}/hpc_ckpt_1.ckpt")
    assert train(root, 2, "hpc").current_epoch == 2


def test_sharded_checkpoints_are_saved_replaced_copied_verified_and_removed(root: str) -> None:
    place = locate(f"{root}/x.ckpt")
    save(place, 1.0)
    save(place, 2.0)
    duplicate(f"{root}/x.ckpt", f"{root}/last.ckpt")
    assert load(f"{root}/last.ckpt") == 2.0
    assert not verify(place).problems
    remove(place)
