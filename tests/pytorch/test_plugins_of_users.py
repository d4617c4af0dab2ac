"""Checkpoint plugins that do not save at the path that they are given: only they know where a checkpoint is."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.strategies.checkpoint_save import save_full
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from tests.pytorch.test_same_on_every_store import QUIET, Model
from tests.servers import Bucket
from tests.storage.places import Folder, Outside


class Appending(TorchCheckpointIO):
    """Saves at the path with something at its end."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, f"{path}.pt", storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_checkpoint(f"{path}.pt", *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        super().remove_checkpoint(f"{path}.pt")


class Elsewhere(CheckpointIO):
    """Saves in a dictionary. Paths are keys and nothing else."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.saved[str(path)] = torch.utils._pytree.tree_map(
            lambda value: value.clone() if isinstance(value, torch.Tensor) else value, checkpoint
        )

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        return dict(self.saved[str(path)])

    def remove_checkpoint(self, path: Any) -> None:
        self.saved.pop(str(path), None)


Plugin = Callable[[], CheckpointIO]
PLUGINS = [pytest.param(Appending, id="plain"), pytest.param(lambda: AsyncCheckpointIO(Appending()), id="background")]


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Outside]:
    if request.param == "local":
        return str(tmp_path), Folder(tmp_path)
    bucket: Bucket = request.getfixturevalue("bucket")
    return bucket.url, bucket


def make_run(root: str, plugin: CheckpointIO, epochs: int, **options: Any) -> Trainer:
    options = {"monitor": "val/loss", "mode": "max", "filename": "{epoch}", **options}
    callback = ModelCheckpoint(dirpath=f"{root}/run", **options)
    return Trainer(callbacks=[callback], plugins=[plugin], default_root_dir=root, max_epochs=epochs, **QUIET)


def names(trainer: Trainer) -> list[str]:
    callback = trainer.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    return sorted({f"run/{os.path.basename(path)}.pt" for path in (*callback.best_k_models, callback.last_model_path)})


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_resumed_run_remembers_its_checkpoints_and_removes_those_that_are_replaced(
    plugin: Plugin, place: tuple[str, Outside], recwarn: pytest.WarningsRecorder
) -> None:
    root, outside = place
    first = make_run(root, plugin(), 2, save_top_k=2, save_last=True, mode="min")
    first.fit(Model())
    assert outside.names() == ["run/epoch=0.ckpt.pt", "run/epoch=1.ckpt.pt", "run/last.ckpt.pt"]
    resumed = make_run(root, plugin(), 4, save_top_k=2, save_last=True, mode="min")
    resumed.fit(Model(), ckpt_path=f"{root}/run/last.ckpt")
    assert outside.names() == ["run/epoch=2.ckpt.pt", "run/epoch=3.ckpt.pt", "run/last.ckpt.pt"] == names(resumed)
    assert not [warning for warning in recwarn if "no longer counts" in str(warning.message)]
    resumed.test(ckpt_path="best", verbose=False)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_last_checkpoint_is_one_where_no_link_can_be_made(plugin: Plugin, place: tuple[str, Outside]) -> None:
    root, outside = place
    make_run(root, plugin(), 2, save_top_k=1, save_last="link").fit(Model())  # the first one is the best
    assert outside.names() == ["run/epoch=0.ckpt.pt", "run/last.ckpt.pt"]
    assert Appending().load_checkpoint(f"{root}/run/last.ckpt")["global_step"] == 2
    resumed = make_run(root, plugin(), 3, save_top_k=3, save_last="link")
    resumed.fit(Model(), ckpt_path="last")
    assert resumed.ckpt_path == f"{root}/run/last.ckpt"
    assert resumed.global_step == 6
    assert Appending().load_checkpoint(f"{root}/run/last.ckpt")["global_step"] == 6


def test_a_link_is_made_where_a_plugin_saves_at_the_path(tmp_path: Path) -> None:
    class Telling(TorchCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            super().save_checkpoint(*args, **kwargs)

    make_run(str(tmp_path), Telling(), 2, save_top_k=-1, save_last="link").fit(Model())
    assert os.readlink(tmp_path / "run/last.ckpt") == "epoch=1.ckpt"


@pytest.mark.parametrize("plugin", PLUGINS)
def test_checkpoints_of_one_name_do_not_overwrite_each_other(plugin: Plugin, place: tuple[str, Outside]) -> None:
    root, outside = place
    make_run(root, plugin(), 2, save_top_k=-1, filename="x").fit(Model())
    make_run(root, plugin(), 1, save_top_k=-1, filename="x").fit(Model())
    assert outside.names() == ["run/x-v1.ckpt.pt", "run/x-v2.ckpt.pt", "run/x.ckpt.pt"]


def test_a_slurm_job_goes_on_from_its_newest_checkpoint(place: tuple[str, Outside]) -> None:
    root, _ = place
    first = make_run(root, Appending(), 1)
    first.fit(Model())
    for number in (1, 2):
        path = first._checkpoint_connector.hpc_save_path(root)
        assert path == f"{root}/hpc_ckpt_{number}.ckpt"
        first.save_checkpoint(path)
    resumed = make_run(root, Appending(), 2)
    resumed.fit(Model(), ckpt_path="hpc")
    assert resumed.ckpt_path == f"{root}/hpc_ckpt_2.ckpt"
    assert resumed.global_step == 4


def test_paths_need_not_be_those_of_a_file_system(place: tuple[str, Outside], tmp_path: Path) -> None:
    root, outside = place
    plugin = Elsewhere()
    first = make_run(root, plugin, 2, save_top_k=1, save_last=True, monitor=None)
    first.fit(Model())
    last = f"{root}/run/last.ckpt"
    first.test(ckpt_path="last", verbose=False)
    assert first.ckpt_path == last
    plugin.saved["database://runs/1"] = plugin.saved[last]
    resumed = make_run(root, plugin, 3, save_top_k=1, monitor=None)
    resumed.fit(Model(), ckpt_path="database://runs/1")
    assert resumed.global_step == 6
    assert f"{root}/run/epoch=1.ckpt" not in plugin.saved  # which the third epoch's has replaced
    assert outside.names() == []


def test_what_a_plugin_has_saved_as_a_folder_is_not_removed_as_shards_that_a_file_replaces(bucket: Bucket) -> None:
    class Folders(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, f"{path}/__0_0.distcp")
            super().save_checkpoint({}, f"{path}/.metadata")

    save_full({"w": torch.ones(3)}, None, locate(f"{bucket.url}/x.ckpt"), Folders())
    assert bucket.names() == ["x.ckpt/.metadata", "x.ckpt/__0_0.distcp"]
