"""The same script leaves the same in a folder and on a store: files, what is in them, paths, counters, weights."""

import gc
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import yaml
from adlfs import AzureBlobFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.sftp import SFTPFileSystem
from gcsfs import GCSFileSystem

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from tests.servers import azure as azurite
from tests.servers.azure import AzureServer, Container, azure_server
from tests.servers.gcs import GcsBucket, GcsServer, gcs_server
from tests.servers.sftp import sftp_server
from tests.storage.places import Folder, Memory, Store

QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1,
}  # fmt: skip
#: By epoch, with ties.
SCORES = (3.0, 1.0, 2.0, 1.0, 2.0, 0.0)


class Model(LightningModule):
    def __init__(self, lr: float = 0.01, width: int = 2, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.layer(batch) - 10).pow(2).mean()

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("score", SCORES[self.current_epoch])
        self.log("val/loss", (self.layer(batch) - 10).pow(2).mean())

    def test_step(self, batch: torch.Tensor) -> None:
        self.log("test", self.layer(batch).mean())

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, self.hparams.width), batch_size=self.hparams.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def fit(root: str, epochs: int, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(callbacks=list(callbacks), default_root_dir=root, max_epochs=epochs, **{**QUIET, **options})
    trainer.fit(Model(), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    ("root", "logs", "dirpath", "is_told"),
    [
        ("memory://run", "{}/logs", None, True),
        ("memory://run", "memory://run/logs", None, False),
        ("memory://run", None, None, False),
        ("memory://run", "{}/logs", "{}/checkpoints", False),
        ("{}/run", "{}/logs", None, False),
    ],
)
def test_checkpoints_that_a_local_logger_keeps_from_the_url_of_the_trainer_are_a_warning(
    root: str, logs: str | None, dirpath: str | None, is_told: bool, tmp_path: Path
) -> None:
    checkpoint = ModelCheckpoint(dirpath and dirpath.format(tmp_path))
    logger = CSVLogger(logs.format(tmp_path)) if logs else False
    trainer = Trainer(
        default_root_dir=root.format(tmp_path), callbacks=[checkpoint], **{**QUIET, "logger": logger}, max_epochs=1
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(Model())
    told = [str(one.message) for one in caught if "on this machine" in str(one.message)]
    folder = f"{tmp_path}/logs/lightning_logs/version_0/checkpoints"
    assert len(told) == is_told
    assert not is_told or told[0].startswith(f"Checkpoints go to {folder} on this machine, to the folder of CSVLogger")
    assert os.path.isdir(folder) == is_told or not root.startswith("memory")
    MemoryFileSystem.store.clear()


def facts(trainer: Trainer) -> dict[str, Any]:
    """What a run has come to."""
    return {
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "resumed": trainer.ckpt_path,
        "weights": trainer.lightning_module.layer.weight.tolist() if trainer.lightning_module else None,
        "callbacks": [one.state_dict() for one in trainer.checkpoint_callbacks],
    }


def ranked_with_ties(root: str) -> Any:
    callback = ModelCheckpoint(f"{root}/run", monitor="score", save_top_k=2, filename="{epoch}-{score}")
    return facts(fit(root, 5, callback))


def all_of_them_by_steps(root: str) -> Any:
    return facts(fit(root, 2, ModelCheckpoint(f"{root}/run", save_top_k=-1, every_n_train_steps=3)))


def every_other_epoch(root: str) -> Any:
    return facts(fit(root, 4, ModelCheckpoint(f"{root}/run", save_top_k=-1, every_n_epochs=2)))


def names_with_versions(root: str) -> Any:
    return facts(fit(root, 3, ModelCheckpoint(f"{root}/run", save_top_k=-1, monitor="score", filename="x")))


def names_without_versions(root: str) -> Any:
    options = {"save_top_k": 2, "monitor": "score", "filename": "x", "enable_version_counter": False}
    return facts(fit(root, 3, ModelCheckpoint(f"{root}/run", save_last=True, **options)))


def another_name_of_the_last(root: str) -> Any:
    class Callback(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "newest"

    made = [facts(fit(root, 2, Callback(f"{root}/run", save_last=True)))]
    return [*made, facts(fit(root, 4, Callback(f"{root}/run", save_last=True), ckpt_path="last"))]


def a_last_name_with_the_epoch(root: str) -> Any:
    class Callback(ModelCheckpoint):
        CHECKPOINT_NAME_LAST = "last-{epoch}"

    made = [facts(fit(root, 2, Callback(f"{root}/run", save_last=True)))]
    return [*made, facts(fit(root, 4, Callback(f"{root}/run", save_last=True), ckpt_path="last"))]


def metrics_with_slashes(root: str) -> Any:
    names = [("{epoch}-{val/loss:.2f}", True), ("epoch={epoch}-loss={val/loss:.2f}", False)]
    callbacks = [
        ModelCheckpoint(f"{root}/run", monitor="val/loss", filename=name, auto_insert_metric_name=insert, save_top_k=k)
        for k, (name, insert) in enumerate(names, 1)
    ]
    callbacks[1].mode = "min"
    return [facts(fit(f"{root}/{number}", 3, one)) for number, one in enumerate(callbacks)]


def weights_alone(root: str) -> Any:
    return facts(fit(root, 2, ModelCheckpoint(f"{root}/run", save_weights_only=True, save_last=True)))


def resumed_from(choice: str, save_last: Any, **options: Any) -> Callable[[str], Any]:
    """A run in two parts, with another one from the first epoch's checkpoint after that."""

    def case(root: str) -> Any:
        def checkpoint() -> ModelCheckpoint:
            return ModelCheckpoint(
                f"{root}/run", monitor="score", save_top_k=2, save_last=save_last, filename="{epoch}", **options
            )

        first = fit(root, 2, checkpoint())
        path = f"{root}/run/epoch=0.ckpt" if choice == "path" else choice
        if choice == "best":
            path = first.checkpoint_callback.best_model_path
        second = fit(root, 4, checkpoint(), ckpt_path=path)
        third = fit(root, 6, checkpoint(), ckpt_path="last")
        return [facts(run) for run in (first, second, third)]

    return case


def saves_in_the_background(root: str) -> Any:
    def checkpoint() -> ModelCheckpoint:
        return ModelCheckpoint(f"{root}/run", monitor="score", save_top_k=1, save_last="link", filename="{epoch}")

    first = fit(root, 3, checkpoint(), plugins=[AsyncCheckpointIO()])
    second = fit(root, 5, checkpoint(), plugins=[AsyncCheckpointIO()], ckpt_path="last")
    return [facts(first), facts(second)]


def folders_of_loggers(root: str) -> Any:
    first = fit(root, 2, ModelCheckpoint(save_last=True), logger=CSVLogger(root, "logs"))
    second = fit(root, 2, ModelCheckpoint(save_last=True), logger=CSVLogger(f"{root}/", "logs"))
    third = fit(root, 3, ModelCheckpoint(save_last=True), logger=CSVLogger(root, "logs", version=1), ckpt_path="last")
    return [facts(first), facts(second), facts(third), first.log_dir, second.log_dir, second.logger.root_dir]


def folders_without_names(root: str) -> Any:
    first = fit(f"{root}/", 2, ModelCheckpoint(save_last=True))
    second = fit(root, 3, ModelCheckpoint(save_last=True), ckpt_path="last")
    return [facts(first), facts(second), first.default_root_dir, second.log_dir]


def slashes_at_the_end(root: str) -> Any:
    first = fit(f"{root}//", 2, ModelCheckpoint(f"{root}/run//", save_last=True))
    second = fit(f"{root}/", 3, ModelCheckpoint(f"{root}/run", save_last=True), ckpt_path="last")
    return [facts(first), facts(second), first.default_root_dir, second.checkpoint_callback.dirpath]


def another_folder(root: str) -> Any:
    first = fit(root, 2, ModelCheckpoint(f"{root}/one", monitor="score", save_last=True))
    best = first.checkpoint_callback.best_model_path
    second = fit(root, 6, ModelCheckpoint(f"{root}/two", monitor="score", save_last=True), ckpt_path=best)
    return [facts(first), facts(second)]


def interrupted_by_an_exception(root: str) -> Any:
    class Failing(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 3:
                raise ZeroDivisionError

    callbacks = [OnExceptionCheckpoint(f"{root}/run"), ModelCheckpoint(f"{root}/run", save_on_exception=True)]
    with pytest.raises(ZeroDivisionError):
        fit(root, 3, Failing(), *callbacks)
    (left,) = [name for name in fsspec.url_to_fs(f"{root}/run")[0].ls(f"{root}/run", detail=False) if "exc" in name]
    resumed = fit(root, 3, *callbacks)
    return [os.path.basename(left), facts(resumed)]


def tuned(root: str) -> Any:
    found = []
    model = Model()
    trainer = Trainer(default_root_dir=root, max_epochs=1, **QUIET)
    tuner = Tuner(trainer)
    gc.freeze()  # the tuner collects garbage, which takes a second where so much is loaded
    found.append(tuner.scale_batch_size(model, max_trials=2, steps_per_trial=1))
    found.append(tuner.lr_find(model, num_training=4).suggestion(skip_begin=0, skip_end=0))
    gc.unfreeze()
    trainer.fit(model)
    return [found, facts(trainer), model.hparams.batch_size]


def command_line(root: str) -> Any:
    def run(*arguments: str) -> Any:
        options = [
            f"--trainer.default_root_dir={root}", "--trainer.accelerator=cpu", "--trainer.devices=1",
            "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--trainer.logger=false",
            "--trainer.callbacks=ModelCheckpoint", f"--trainer.callbacks.dirpath={root}/run",
        ]  # fmt: skip
        return LightningCLI(Model, seed_everything_default=1, args=[arguments[0], *options, *arguments[1:]])

    first = run("fit", "--trainer.max_epochs=1", "--model.width=3")
    path = first.trainer.checkpoint_callback.best_model_path
    with pytest.raises(RuntimeError, match=r"expected .*config\.yaml to NOT exist"):
        run("fit", "--trainer.max_epochs=1")
    second = run("validate", f"--ckpt_path={path}", f"--trainer.default_root_dir={root}/again")  # of its width
    return [facts(first.trainer), second.model.hparams.width, second.trainer.callback_metrics["val/loss"].item()]


def loaded_again(root: str) -> Any:
    class Wider(Model):
        pass

    trainer = fit(root, 2, ModelCheckpoint(f"{root}/run"))
    best = trainer.checkpoint_callback.best_model_path
    return [Model.load_from_checkpoint(best).layer.weight.tolist(), dict(Wider.load_from_checkpoint(best).hparams)]


def evaluated(root: str) -> Any:
    trainer = fit(root, 3, ModelCheckpoint(f"{root}/run", monitor="score", save_last=True, filename="{epoch}"))
    found: list[Any] = []
    for path in ("best", "last", f"{root}/run/epoch=1.ckpt"):
        found += [trainer.validate(ckpt_path=path, verbose=False), trainer.ckpt_path]
        found += [trainer.test(ckpt_path=path, verbose=False), trainer.ckpt_path]
        found += [[one.tolist() for one in trainer.predict(ckpt_path=path)], trainer.ckpt_path]
    return found


def requeued_by_slurm(root: str) -> Any:
    environment = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    environment |= {"SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "1", "SLURM_NTASKS_PER_NODE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        runs = []
        for epochs in (1, 2):
            runs.append(fit(f"{root}/new/", epochs))
            runs[-1].save_checkpoint(runs[-1]._checkpoint_connector.hpc_save_path(runs[-1].default_root_dir))
        return [facts(run) for run in runs]


def local_urls(root: str) -> Any:
    as_url = root if "://" in root else f"file://{root}"
    first = fit(as_url, 2, ModelCheckpoint(f"{as_url}/run", save_last=True))
    second = fit(as_url, 3, ModelCheckpoint(f"{as_url}/run", save_last=True), ckpt_path="last")
    third = fit(as_url, 4, ModelCheckpoint(f"{as_url}/run", save_last=True), ckpt_path=f"{as_url}/run/last.ckpt")
    return [facts(first), facts(second), {**facts(third), "resumed": None}, first.default_root_dir]


def path_objects(root: str) -> Any:
    path = Path(root)
    first = fit(path, 2, ModelCheckpoint(path / "run", save_last=True), OnExceptionCheckpoint(path / "run"))
    last = path / "run" / "last.ckpt"
    second = fit(path, 3, ModelCheckpoint(path / "run"), ckpt_path=last)
    model = Model.load_from_checkpoint(last)
    second.save_checkpoint(path / "by hand.ckpt")
    made = [facts(first), {**facts(second), "resumed": None}, first.default_root_dir, second.log_dir]
    return [*made, model.layer.weight.tolist()]


CASES = [
    ranked_with_ties,
    all_of_them_by_steps,
    every_other_epoch,
    names_with_versions,
    names_without_versions,
    another_name_of_the_last,
    a_last_name_with_the_epoch,
    metrics_with_slashes,
    weights_alone,
    pytest.param(resumed_from("last", True), id="resumed_from_the_last"),
    pytest.param(resumed_from("best", True), id="resumed_from_the_best"),
    pytest.param(resumed_from("path", True), id="resumed_from_an_older_one"),
    pytest.param(resumed_from("last", "link"), id="resumed_from_a_link"),
    pytest.param(resumed_from("best", "link", every_n_train_steps=1), id="resumed_beside_a_link"),
    saves_in_the_background,
    folders_of_loggers,
    folders_without_names,
    slashes_at_the_end,
    another_folder,
    interrupted_by_an_exception,
    tuned,
    command_line,
    loaded_again,
    evaluated,
    requeued_by_slurm,
    local_urls,
    path_objects,
]


def relative(value: Any, root: str) -> Any:
    """``value`` without its place: paths begin with ROOT."""
    if isinstance(value, dict):
        return {relative(key, root): relative(one, root) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [relative(one, root) for one in value]
    if isinstance(value, (str, Path)):
        return str(value).replace(root, "ROOT")
    return value.tolist() if isinstance(value, torch.Tensor) else value


def content(name: str, data: bytes, root: str) -> Any:
    if name.endswith(".ckpt"):
        checkpoint = torch.load(io.BytesIO(data), weights_only=False)
        checkpoint["callbacks"] = {key: one for key, one in checkpoint.get("callbacks", {}).items()}
        return relative({key: one for key, one in checkpoint.items() if key != "hparams_type"}, root)
    text = data.decode()
    return relative(yaml.safe_load(text) if name.endswith(".yaml") else text, root)


def outcome(case: Callable[[str], Any], store: Store) -> Any:
    """What a case returns, and what it leaves in its place."""
    returned = relative(case(store.root), store.root)
    return returned, {name: content(name, store.outside.get(name), store.root) for name in store.outside.names()}


@pytest.fixture(autouse=True)
def nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No case leaves anything in the working folder, such as one called ``s3:``."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    assert os.listdir(tmp_path / "here") == []


@pytest.fixture
def local(tmp_path: Path) -> Store:
    (tmp_path / "there").mkdir()
    place = os.path.realpath(tmp_path / "there")
    return Store(place, Folder(Path(place)))


@pytest.fixture
def memory() -> Iterator[Store]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield Store("memory://place", Within("place"))
    MemoryFileSystem.store.clear()


class Within(Memory):
    """A folder in memory."""

    def __init__(self, folder: str) -> None:
        self._folder = f"{folder}/"

    def names(self) -> list[str]:
        return [name.removeprefix(self._folder) for name in super().names()]

    def get(self, name: str) -> bytes:
        return super().get(self._folder + name)


def assert_same(case: Callable[[str], Any], local: Store, store: Store) -> None:
    expected, expected_files = outcome(case, local)
    returned, files = outcome(case, store)
    assert sorted(files) == sorted(expected_files)
    assert files == expected_files
    assert returned == expected


@pytest.mark.parametrize("case", CASES)
def test_memory_is_left_as_a_local_folder(case: Callable[[str], Any], local: Store, memory: Store) -> None:
    assert_same(case, local, memory)


@pytest.fixture(scope="module")
def gcs() -> Iterator[GcsServer]:
    with gcs_server() as running:
        yield running
    GCSFileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def sftp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("sftp")
    with sftp_server(folder) as url:
        yield url, folder
    SFTPFileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    if not azurite.is_installed():
        pytest.skip(azurite.MISSING)
    with azure_server(tmp_path_factory.mktemp("azurite")) as running:
        yield running
    AzureBlobFileSystem.clear_instance_cache()


@pytest.fixture(params=["s3", "gcs", "sftp", pytest.param("azure", marks=pytest.mark.azure)])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "s3":
        bucket = request.getfixturevalue("bucket")
        return Store(bucket.url, bucket)
    server = request.getfixturevalue(request.param)
    if request.param == "sftp":
        url, folder = server
        shutil.rmtree(folder)
        folder.mkdir()
        return Store(url, Folder(folder))
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})
    place = GcsBucket(server) if request.param == "gcs" else Container(server)
    return Store(place.url, place)


def a_long_run(root: str) -> Any:
    """Most of the cases above, in one."""
    made = [saves_in_the_background(f"{root}/1"), requeued_by_slurm(f"{root}/2"), slashes_at_the_end(f"{root}/3")]
    return [*made, path_objects(f"{root}/4"), interrupted_by_an_exception(f"{root}/5")]


def test_each_store_is_left_as_a_local_folder(local: Store, store: Store) -> None:
    assert_same(a_long_run, local, store)
