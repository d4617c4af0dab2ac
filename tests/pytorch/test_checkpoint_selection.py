"""Incomplete checkpoints are never chosen, in runs of a real Trainer."""

import importlib
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import save

from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.tools.discover import largest_version, newest_complete_version, times_of_complete
from lightning.pytorch.trainer.states import TrainerFn
from tests.pytorch.test_training_on_s3 import PACKAGES, make_model
from tests.servers import Bucket

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def make_run(pl: Any, root: Path | str, epochs: int, **options: Any) -> Any:
    callbacks = importlib.import_module(f"{pl.__name__}.callbacks")
    options = {"monitor": "val_loss", "mode": "max", "filename": "{epoch}", **options}
    callback = callbacks.ModelCheckpoint(dirpath=f"{root}/checkpoints", **options)
    return pl.Trainer(callbacks=[callback], default_root_dir=root, max_epochs=epochs, devices=1, **QUIET)


def make_shards(place: Path) -> None:
    """A complete sharded checkpoint in the format of stock Lightning."""
    save({"w": torch.ones(3)}, checkpoint_id=place)
    save_file({"epoch": 1}, place / "meta.pt")


def lose(name: str) -> Callable[[Path], None]:
    def damage(place: Path) -> None:
        make_shards(place)
        (place / name).unlink()

    return damage


def cut(place: Path) -> None:
    save_file({"w": torch.ones(3000)}, place)
    os.truncate(place, 5000)


DAMAGES = [
    pytest.param(Path.mkdir, r"\.metadata", id="empty folder"),
    pytest.param(lose(".metadata"), r"\.metadata", id="shards alone"),
    pytest.param(lose("meta.pt"), r"meta\.pt", id="no loop state"),
    pytest.param(lose("__0_0.distcp"), r"__0_0\.distcp", id="no shard"),
    pytest.param(Path.touch, "is empty", id="empty file"),
    pytest.param(cut, "is cut off", id="truncated file"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_a_run_goes_on_from_the_last_checkpoint_that_is_complete(
    damage: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    pl = importlib.import_module("lightning.pytorch")
    straight = make_model(pl)
    make_run(pl, tmp_path / "straight", epochs=2, save_last=True).fit(straight)
    make_run(pl, tmp_path, epochs=1, save_last=True).fit(make_model(pl))
    damage(tmp_path / "checkpoints" / "last-v1.ckpt")

    resumed = make_model(pl)
    with pytest.warns(UserWarning, match=rf"Skipping .*last-v1\.ckpt', which is not complete: .*{reason}"):
        make_run(pl, tmp_path, epochs=2, save_last=True).fit(resumed, ckpt_path="last")
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("place", ["local", "s3"])
@pytest.mark.parametrize("name", PACKAGES)
def test_where_the_last_checkpoint_is_incomplete_a_run_goes_on_from_the_newest_complete_one_beside_it(
    name: str, place: str, bucket: Bucket, tmp_path: Path
) -> None:
    pl = importlib.import_module(name)
    root = str(tmp_path) if place == "local" else f"{bucket.url}/run"
    make_run(pl, root, epochs=2, save_last=True, save_top_k=-1).fit(make_model(pl))
    for other in ("pretrained.ckpt", "epoch=7.txt"):  # newer ones, which no ModelCheckpoint has saved
        save_file({"w": 1}, f"{root}/checkpoints/{other}")
    if place == "local":
        os.unlink(tmp_path / "checkpoints" / "last.ckpt")
        lose(".metadata")(tmp_path / "checkpoints" / "last.ckpt")
    else:
        bucket.put("run/checkpoints/last.ckpt", b"")
        bucket.put("run/checkpoints/epoch=5.ckpt/__0_0.distcp", b"1")  # incomplete as well

    trainer = make_run(pl, root, epochs=3, save_last=True, save_top_k=-1)
    with pytest.warns(
        UserWarning, match=r"last checkpoint is not complete .*last\.ckpt.*goes on from .*epoch=1\.ckpt"
    ) as warned:
        trainer.fit(make_model(pl), ckpt_path="last")
    assert not [one for one in warned if re.search(r"Skipping .*last\.ckpt", str(one.message))]  # which says the same
    assert trainer.ckpt_path == f"{root}/checkpoints/epoch=1.ckpt"
    assert trainer.global_step == 6


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({}, ["epoch=0-step=10.ckpt", "epoch=0-step=10-v1.ckpt"]),
        ({"filename": "{epoch:02d}-{val_loss:.2f}"}, ["epoch=07-val_loss=0.12.ckpt"]),
        ({"filename": "run(1)-{step}", "auto_insert_metric_name": False}, ["run(1)-10.ckpt"]),
        ({"filename": "best"}, ["best.ckpt", "best-v2.ckpt"]),
        ({"filename": "best", "save_weights_only": True}, []),
    ],
)
def test_what_a_callback_has_saved_is_known_by_the_name_that_it_gives(
    options: dict[str, Any], saved: list[str], tmp_path: Path
) -> None:
    from lightning.pytorch.callbacks.last_checkpoint import _saved_by

    others = ["last.ckpt", "last-v1.ckpt", "pretrained.ckpt", "best.txt", "hpc_ckpt_1.ckpt", "best.ckpt.0123.old"]
    for name in {*saved, *others}:
        (tmp_path / name).touch()
    callback = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint(tmp_path, **options)
    assert sorted(map(os.path.basename, _saved_by(callback, str(tmp_path)))) == sorted(saved)


@pytest.mark.parametrize("left", ["incomplete", "dangling link", "moved away"])
def test_a_run_does_not_start_anew_where_none_of_its_checkpoints_is_complete(left: str, tmp_path: Path) -> None:
    pl = importlib.import_module("lightning.pytorch")
    folder = tmp_path / "checkpoints"
    if left == "dangling link":
        folder.mkdir()
        (folder / "last.ckpt").symlink_to("epoch=1.ckpt")
    elif left == "moved away":  # by a save that was killed before the new one had the name
        make_shards(folder / "last.ckpt.0123456789ab.old")
    else:
        lose(".metadata")(folder / "last.ckpt")
    save_file({"w": 1}, folder / "pretrained.ckpt")
    trainer = make_run(pl, tmp_path, epochs=1, save_last=True)
    with pytest.raises(FileNotFoundError, match=r"last\.ckpt.*`ckpt_path`"):
        trainer.fit(make_model(pl), ckpt_path="last")
    assert trainer.global_step == 0


def test_the_first_run_of_all_starts_from_scratch(tmp_path: Path) -> None:
    pl = importlib.import_module("lightning.pytorch")
    trainer = make_run(pl, tmp_path, epochs=1, save_last=True)
    with pytest.warns(UserWarning, match="no last checkpoint available"):
        trainer.fit(make_model(pl), ckpt_path="last")
    assert trainer.global_step == 2


@pytest.mark.parametrize(("save_last", "hint"), [(True, ""), (None, " Set `ModelCheckpoint(..., save_last=True)`.")])
def test_a_first_run_is_advised_to_keep_last_checkpoints_only_if_it_does_not(
    save_last: bool | None, hint: str, tmp_path: Path
) -> None:
    pl = importlib.import_module(PACKAGES[0])
    with pytest.warns(UserWarning, match="no last checkpoint available") as warned:
        make_run(pl, tmp_path, 1, save_last=save_last).fit(make_model(pl), ckpt_path="last")
    (told,) = [str(warning.message) for warning in warned if "no last checkpoint" in str(warning.message)]
    assert told.endswith(f"no last checkpoint available in {tmp_path}/checkpoints: none is loaded.{hint}")


def test_a_folder_is_as_old_as_its_commit(tmp_path: Path) -> None:
    """A save into the older one, which failed, has changed the folder itself since."""
    for name, time in (("older.ckpt", 1000), ("newer.ckpt", 2000)):
        make_shards(tmp_path / name)
        os.utime(tmp_path / name / ".metadata", (time, time))
    (tmp_path / "older.ckpt" / "__0123456789ab_0_0.distcp").touch()
    paths = [str(tmp_path / name) for name in ("older.ckpt", "newer.ckpt", "none.ckpt")]
    times = times_of_complete(paths)
    assert sorted(times, key=lambda path: times[path]) == paths[:2]


@pytest.mark.parametrize("names", [["latest", "checkpoint"], [".metadata", "common.pt", "__0_0.distcp"]])
def test_folders_of_other_strategies_and_plugins_are_left_to_them(names: list[str], tmp_path: Path) -> None:
    """DeepSpeed saves folders, and so do plugins that use torch.distributed.checkpoint in their own way."""
    path = tmp_path / "last.ckpt"
    save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    path.mkdir()
    for name in names:
        (path / name).write_bytes((tmp_path / "dcp" / ".metadata").read_bytes())
    assert list(times_of_complete([str(path)])) == [str(path)]


def test_the_checkpoint_of_an_exception_on_a_store_is_chosen_only_when_it_is_complete(
    bucket: Bucket, tmp_path: Path
) -> None:
    pl = importlib.import_module("lightning.pytorch")
    callback = pl.callbacks.OnExceptionCheckpoint(f"{bucket.url}/run")
    trainer = pl.Trainer(callbacks=[callback], default_root_dir=tmp_path, max_epochs=1, devices=1, **QUIET)
    trainer.fit(make_model(pl))
    trainer.save_checkpoint(f"{bucket.url}/run/whole.ckpt")
    whole = bucket.get("run/whole.ckpt")

    def choose() -> str | None:
        chosen: str | None = trainer._checkpoint_connector._select_ckpt_path(TrainerFn.FITTING, "last", True, True)
        return chosen

    bucket.put("run/on_exception.ckpt/__0_0.distcp", b"1")
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint .*on_exception\.ckpt.*\.metadata"):
        choose()
    bucket.put("run/on_exception.ckpt", whole)
    assert choose() == callback.ckpt_path
    with bucket.refusing(lambda method, path: 403), pytest.raises(PermissionError):  # rather than to start anew
        choose()


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("place", ["local", "s3"])
def test_a_slurm_job_goes_on_from_its_newest_complete_checkpoint(
    name: str, place: str, bucket: Bucket, tmp_path: Path
) -> None:
    pl = importlib.import_module(name)
    root = str(tmp_path) if place == "local" else f"{bucket.url}/run"
    trainer = make_run(pl, root, epochs=1)
    trainer.fit(make_model(pl))
    for version in (8, 9):
        trainer.save_checkpoint(f"{root}/hpc_ckpt_{version}.ckpt")
    parts = ["hpc_ckpt_10.ckpt/__0_0.distcp", "hpc_ckpt_8.ckpt.0123456789ab.old/.metadata"]
    for part in ["hpc_ckpt_best.ckpt", "hpc_ckpt_.ckpt", *parts]:
        if place == "local":
            (tmp_path / part).parent.mkdir(exist_ok=True)
            (tmp_path / part).write_bytes(b"1")
        else:
            bucket.put(f"run/{part}", b"1")

    resumed = make_run(pl, root, epochs=2)
    with pytest.warns(UserWarning, match=r"Skipping .*hpc_ckpt_10\.ckpt', which is not complete"):
        resumed.fit(make_model(pl), ckpt_path="hpc")
    assert resumed.ckpt_path == f"{root}/hpc_ckpt_9.ckpt"
    assert resumed.global_step == 4
    # a save does not go where something is, whatever that is
    assert resumed._checkpoint_connector.hpc_save_path(root) == f"{root}/hpc_ckpt_11.ckpt"


def test_a_folder_without_checkpoints_of_slurm_has_no_newest(tmp_path: Path) -> None:
    (tmp_path / "hpc_ckpt_x.ckpt").touch()
    assert newest_complete_version(tmp_path) is None
    assert newest_complete_version(tmp_path / "none") is None
    assert largest_version(tmp_path / "none", "ckpt_") is None


@pytest.mark.parametrize("ckpt_path", [None, "hpc"])
def test_a_slurm_job_does_not_start_anew_where_none_of_its_checkpoints_is_complete(
    ckpt_path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = importlib.import_module("lightning.pytorch")
    lose(".metadata")(tmp_path / "hpc_ckpt_1.ckpt")
    assert largest_version(tmp_path, "ckpt_") == 1
    trainer = make_run(pl, tmp_path, epochs=1)
    for name, value in {"NTASKS": "1", "JOB_NAME": "train", "JOB_ID": "7", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with (
        pytest.warns(UserWarning, match="Skipping"),
        pytest.raises(FileNotFoundError, match=r"hpc_ckpt_1\.ckpt.*\.metadata.*`ckpt_path`"),
    ):
        trainer.fit(make_model(pl), ckpt_path=ckpt_path)
    assert trainer.global_step == 0


@pytest.mark.parametrize("name", PACKAGES)
def test_checkpoints_that_are_gone_do_not_count_among_the_best(name: str, tmp_path: Path) -> None:
    pl = importlib.import_module(name)
    first = make_run(pl, tmp_path, epochs=3, save_top_k=3, save_last=True)
    first.fit(make_model(pl))
    folder = tmp_path / "checkpoints"
    ranking = sorted(first.checkpoint_callback.best_k_models, key=first.checkpoint_callback.best_k_models.get)[::-1]
    assert ranking == [f"{folder}/epoch={epoch}.ckpt" for epoch in range(3)]  # the loss only falls
    os.unlink(ranking[0])
    os.unlink(ranking[1])
    lose(".metadata")(Path(ranking[1]))  # as when its removal was interrupted
    os.rename(folder / "last.ckpt", tmp_path / "x.ckpt")

    second = make_run(pl, tmp_path, epochs=5, save_top_k=3, save_last=True)
    with pytest.warns(UserWarning, match="no longer counts") as warned:
        second.fit(make_model(pl), ckpt_path=tmp_path / "x.ckpt")
    told = [str(warning.message) for warning in warned if "no longer counts 3" in str(warning.message)]
    assert len(told) == 1
    for lost in (ranking[0], ranking[1], f"{folder}/last.ckpt"):
        assert lost in told[0]
    callback = second.checkpoint_callback
    assert sorted(callback.best_k_models) == [f"{folder}/epoch={epoch}.ckpt" for epoch in (2, 3, 4)]
    assert all(map(os.path.isfile, callback.best_k_models))
    assert callback.best_model_path == ranking[2]
    assert callback.best_model_score == callback.best_k_models[ranking[2]]
    assert callback.kth_best_model_path == f"{folder}/epoch=4.ckpt"
    assert callback.last_model_path == f"{folder}/last.ckpt"
    second.validate(make_model(pl), ckpt_path="best")


def test_a_full_ranking_stays_one_when_fewer_are_to_be_kept(tmp_path: Path) -> None:
    pl = importlib.import_module("lightning.pytorch")
    first = make_run(pl, tmp_path, epochs=3, save_top_k=3)
    first.fit(make_model(pl))
    os.rename(tmp_path / "checkpoints" / "epoch=2.ckpt", tmp_path / "x.ckpt")
    second = make_run(pl, tmp_path, epochs=4, save_top_k=2)
    with pytest.warns(UserWarning, match="no longer counts 1 of"):
        second.fit(make_model(pl), ckpt_path=tmp_path / "x.ckpt")
    assert sorted(map(os.path.basename, second.checkpoint_callback.best_k_models)) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["epoch=0.ckpt", "epoch=1.ckpt"]


def test_checkpoints_that_are_there_are_remembered(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    pl = importlib.import_module("lightning.pytorch")
    first = make_run(pl, tmp_path, epochs=2, save_top_k=2, save_last=True)
    first.fit(make_model(pl))
    second = make_run(pl, tmp_path, epochs=2, save_top_k=2, save_last=True)
    second.fit(make_model(pl), ckpt_path="last")
    for name in ("best_k_models", "best_model_path", "best_model_score", "kth_best_model_path", "last_model_path"):
        assert getattr(second.checkpoint_callback, name) == getattr(first.checkpoint_callback, name)
    assert not [warning for warning in recwarn if "no longer" in str(warning.message)]


def test_what_a_store_does_not_tell_of_the_own_folder_is_not_forgotten(bucket: Bucket, tmp_path: Path) -> None:
    pl = importlib.import_module("lightning.pytorch")
    first = make_run(pl, bucket.url, epochs=2, save_top_k=2)
    first.fit(make_model(pl))
    path = tmp_path / "x.ckpt"
    first.save_checkpoint(path)
    second = make_run(pl, bucket.url, epochs=2, save_top_k=2)
    best = first.checkpoint_callback.best_model_path
    listings = itertools.count()

    def after_the_first_listing(method: str, path: str) -> int | None:  # which tells whether the folder is empty
        return 403 if "list-type=2" in path and next(listings) > 0 else None

    with (
        bucket.refusing(after_the_first_listing),
        pytest.warns(UserWarning, match=r"Could not look whether 2 checkpoints .*epoch=0\.ckpt.*PermissionError"),
    ):
        second.fit(make_model(pl), ckpt_path=path)
    assert next(listings) > 1
    assert sorted(second.checkpoint_callback.best_k_models) == sorted(first.checkpoint_callback.best_k_models)
    assert second.checkpoint_callback.best_model_path == best
