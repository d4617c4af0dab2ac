"""The version that a checkpoint says it was written by: that of the release, for stock not to warn of a newer one."""

import importlib
from pathlib import Path

import pytest
import torch

from build_backend.distribution import PACKAGE_NAMES
from build_backend.upstream import read_pin
from lightning.fabric.storage.archives.save import save_file
from tests.pytorch.test_checkpoint_selection import QUIET
from tests.pytorch.test_training_on_s3 import PACKAGES, make_model

KEY = "pytorch-lightning_version"
RELEASE = read_pin(PACKAGE_NAMES["lightning"]).version
NEWER = "which is newer than your current"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_checkpoint_is_saved_under_the_version_of_the_release(name: str, tmp_path: Path) -> None:
    pl = importlib.import_module(name)
    trainer = pl.Trainer(default_root_dir=tmp_path, max_epochs=1, **QUIET)
    trainer.fit(make_model(pl))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt")[KEY] == RELEASE
    assert pl.__version__.startswith(f"{RELEASE}+io.")


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("version", [f"{RELEASE}+io.1", f"{RELEASE}+io.999", RELEASE])
def test_a_checkpoint_of_this_release_is_not_newer_whatever_build_wrote_it(
    version: str, name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    pl = importlib.import_module(name)
    trainer = pl.Trainer(default_root_dir=tmp_path, max_epochs=2, **QUIET)
    trainer.fit(make_model(pl), ckpt_path=saved_by(version, pl, tmp_path))
    assert trainer.global_step == 4
    assert not [warning for warning in recwarn if NEWER in str(warning.message)]
    loaded, migrations = importlib.import_module(f"{name}.utilities.migration").migrate_checkpoint({KEY: version})
    assert (loaded, migrations) == ({KEY: RELEASE}, {})


def test_a_checkpoint_of_a_newer_release_is(tmp_path: Path) -> None:
    pl = importlib.import_module("lightning.pytorch")
    path = saved_by("999.0.0+io.1", pl, tmp_path)
    with pytest.warns(UserWarning, match=rf"v999\.0\.0, {NEWER}"):
        pl.Trainer(default_root_dir=tmp_path, max_epochs=1, **QUIET).fit(make_model(pl), ckpt_path=path)


def saved_by(version: str, pl: object, folder: Path) -> str:
    trainer = pl.Trainer(default_root_dir=folder, max_epochs=1, **QUIET)  # type: ignore[attr-defined]
    trainer.fit(make_model(pl))
    save_file({**trainer._checkpoint_connector.dump_checkpoint(), KEY: version}, folder / "old.ckpt")
    return f"{folder}/old.ckpt"
