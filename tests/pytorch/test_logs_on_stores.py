"""The Trainer's loggers on local folders and stores: the same files, readable while the run goes on."""

import csv
import importlib
import io
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adlfs import AzureBlobFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from gcsfs import GCSFileSystem

from tests.servers import Bucket
from tests.servers import azure as azurite
from tests.servers.azure import Container, azure_server
from tests.servers.gcs import GcsBucket, gcs_server
from tests.storage.places import Folder, Memory, Store

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
STORES = [
    ("lightning.pytorch", "memory"),
    ("pytorch_lightning", "memory"),
    ("lightning.pytorch", "s3"),
    ("lightning.pytorch", "gcs"),
    pytest.param("lightning.pytorch", "azure", marks=pytest.mark.azure),
]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store that a test names."""
    monkeypatch.chdir(tmp_path)
    if request.param == "s3":
        bucket = request.getfixturevalue("bucket")
        yield Store(bucket.url, bucket)
    elif request.param == "memory":
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]
        yield Store("memory:/", Memory())
        MemoryFileSystem.store.clear()
    elif request.param == "gcs":
        with gcs_server() as server:
            GCSFileSystem.clear_instance_cache()
            monkeypatch.setenv("FSSPEC_GCS_TOKEN", "anon")
            monkeypatch.setitem(importlib.import_module("fsspec.config").conf, "gs", {"token": "anon"})
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            gcs = GcsBucket(server)
            yield Store(gcs.url, gcs)
            GCSFileSystem.clear_instance_cache()
    else:
        if not azurite.is_installed():
            pytest.skip(azurite.MISSING)
        (tmp_path.parent / "azure").mkdir(exist_ok=True)
        with azure_server(tmp_path.parent / "azure") as azure:
            AzureBlobFileSystem.clear_instance_cache()
            for name, value in azure.environment.items():
                monkeypatch.setenv(name, value)
            container = Container(azure)
            yield Store(container.url, container)
            AzureBlobFileSystem.clear_instance_cache()


def make_model(pl: Any) -> Any:
    class Model(pl.LightningModule):
        def __init__(self, rate: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(2, 1)
            self.example_input_array = torch.ones(1, 2)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self(batch).pow(2).mean()
            self.log("a/loss", loss)
            if self.global_step >= 2:
                self.log("late", float(self.global_step))  # a column that metrics.csv did not have
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), self.hparams.rate)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)

    torch.manual_seed(1)
    return Model()


def loggers(pl: Any, root: Any) -> list[Any]:
    return [
        pl.loggers.CSVLogger(root, name="csv"),
        pl.loggers.TensorBoardLogger(root, name="", sub_dir="tb", log_graph=True),
    ]


def fit(pl: Any, logger: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(
        logger=logger, max_epochs=1, log_every_n_steps=1, accelerator="cpu", devices=1, **quiet, **options
    )
    trainer.fit(make_model(pl))
    return trainer


def scalars(folder: str, tag: str) -> list[tuple[int, float]]:
    """What TensorBoard shows, which reads from a URL here."""
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    loaded = accumulator.EventAccumulator(folder)
    loaded.Reload()
    return [(event.step, event.value) for event in loaded.Scalars(tag)]


def anonymous(names: list[str]) -> list[str]:
    """File names without what differs from one file of events to the next."""
    return sorted(name.partition(".tfevents.")[0] for name in names)


@pytest.mark.parametrize(("name", "store"), STORES, indirect=["store"])
def test_two_runs_leave_the_same_logs_as_on_a_local_folder(name: str, store: Store, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pl = importlib.import_module(name)
    local = Folder(tmp_path / "logs")
    for root in (str(local.path), f"{store.root}/logs/"):
        for _ in range(2):
            fit(pl, loggers(pl, root))
    names = [name.removeprefix("logs/") for name in store.outside.names()]
    assert anonymous(names) == anonymous(local.names())
    for name in ("csv/version_0/hparams.yaml", "csv/version_1/metrics.csv", "version_1/tb/hparams.yaml"):
        assert store.outside.get(f"logs/{name}") == local.get(name)
    events = [name for name in names if name.startswith("version_1/tb/events")]
    (tmp_path / "copy").mkdir()
    for name in events:
        (tmp_path / "copy" / os.path.basename(name)).write_bytes(store.outside.get(f"logs/{name}"))
    for tag in ("a/loss", "late"):
        assert scalars(str(tmp_path / "copy"), tag) == scalars(str(local.path / "version_1/tb"), tag)
    assert sorted(os.listdir(tmp_path)) == ["copy", "logs"]  # and no folder called `s3:`


@pytest.mark.parametrize("store", ["memory"], indirect=True)
@pytest.mark.parametrize("name", PACKAGES)
def test_tensorboard_reads_segments_of_a_run_that_goes_on(
    name: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    pl = importlib.import_module(name)
    module = importlib.import_module(f"{FABRIC[name]}.loggers.growing_files")
    monkeypatch.setattr(module, "_LARGEST_SEGMENT", 300)
    logger = pl.loggers.TensorBoardLogger(f"{store.root}/logs", name="", version=0)
    written = []
    for step in range(30):
        logger.log_metrics({"x": float(step)}, step)
        logger.save()
        logger._fs.drain()  # which the thread does twice a minute
        written.append((step, float(step)))
        if step % 10 == 9:
            assert scalars(logger.log_dir, "x") == written
    assert len(store.outside.names()) >= 5
    logger.finalize("success")
    logger.log_metrics({"x": 30.0}, 30)  # a new file of events
    logger.finalize("success")
    assert scalars(logger.log_dir, "x") == [*written, (30, 30.0)]


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_no_thread_copies_logs_any_more_when_a_run_has_ended(store: Store) -> None:
    pl = importlib.import_module("lightning.pytorch")
    before = set(threading.enumerate())
    trainer = fit(pl, loggers(pl, f"{store.root}/logs"))
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    assert len(trainer.loggers) == 2  # which are still there


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_run_that_fails_leaves_all_it_has_logged(store: Store) -> None:
    pl = importlib.import_module(PACKAGES[0])

    class Failing(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == 3:
                raise ValueError("this is the end")

    logger = pl.loggers.CSVLogger(Path(store.root) / "logs", name="", version=0)  # a Path that has lost a slash
    with pytest.raises(ValueError, match="this is the end"):
        fit(pl, logger, callbacks=[Failing()])
    rows = list(csv.DictReader(io.StringIO(store.outside.get("logs/version_0/metrics.csv").decode())))
    assert [row["step"] for row in rows] == ["0", "1", "2"]


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_store_that_refuses_ends_training_at_its_begin_and_not_later(
    store: Store, bucket: Bucket, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    pl = importlib.import_module(PACKAGES[0])
    logger = pl.loggers.CSVLogger(f"{store.root}/logs", name="", version=0)
    logger.log_metrics({"x": 1.0}, 0)
    with bucket.refusing(lambda method, path: 403), pytest.raises(PermissionError, match=r"metrics\.csv"):
        logger.save()
    fit(pl, logger)
    with bucket.refusing(lambda method, path: 403 if method == "PUT" and "metrics" in path else None):
        trainer = fit(pl, logger)
    assert trainer.state.finished
    assert "metrics.csv" in caplog.text


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_pickled_logger_goes_on_with_the_same_file(store: Store) -> None:
    pl = importlib.import_module(PACKAGES[0])
    logger = pl.loggers.CSVLogger(f"{store.root}/logs", name="", version=0)
    logger.log_metrics({"x": 1.0}, 0)
    logger.save()
    other = pickle.loads(pickle.dumps(logger))
    other.log_metrics({"y": 2.0}, 1)
    other.finalize("success")
    assert store.outside.get("logs/version_0/metrics.csv") == b"step,x,y\r\n0,1.0,\r\n1,,2.0\r\n"


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_fabrics_loggers_write_to_the_store(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    fabric = importlib.import_module("lightning.fabric.loggers")
    for make in (fabric.CSVLogger, fabric.TensorBoardLogger):
        logger = make(f"{store.root}/{make.__name__}")
        logger.log_metrics({"x": 1.0}, 0)
        logger.finalize("success")
    assert anonymous(store.outside.names()) == [
        "CSVLogger/lightning_logs/version_0/metrics.csv", "TensorBoardLogger/lightning_logs/version_0/events.out",
    ]  # fmt: skip
    assert os.listdir(tmp_path) == []
    again = fabric.CSVLogger(f"{store.root}/CSVLogger", version=0)
    with pytest.warns(UserWarning, match="exists and is not empty. What an earlier run has logged"):
        again.log_metrics({"y": 2.0}, 0)
    again.finalize("success")
    assert store.outside.get("CSVLogger/lightning_logs/version_0/metrics.csv") == b"step,y\r\n0,2.0\r\n"


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_events_of_a_loop_that_flushes_nothing_are_in_the_store_when_the_interpreter_has_ended(store: Store) -> None:
    script = f"""
from lightning.fabric import Fabric
from lightning.fabric.loggers import TensorBoardLogger
fabric = Fabric(accelerator="cpu", loggers=TensorBoardLogger("{store.root}", name="", version=0))
for step in range(3):
    fabric.log("x", float(step), step)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)
    assert scalars(f"{store.root}/version_0", "x") == [(0, 0.0), (1, 1.0), (2, 2.0)]


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_events_of_a_loop_that_flushes_nothing_are_copied_while_it_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning.fabric.loggers.mirror.INTERVAL_S", 0.1)
    fabric = importlib.import_module("lightning.fabric.loggers")
    logger = fabric.TensorBoardLogger(store.root, name="", version=0, flush_secs=0)
    deadline = time.monotonic() + 20
    while not any(name.startswith("version_0/events") for name in store.outside.names()):
        assert time.monotonic() < deadline
        logger.log_metrics({"x": 1.0}, 0)
        time.sleep(0.1)
    logger.finalize("success")
