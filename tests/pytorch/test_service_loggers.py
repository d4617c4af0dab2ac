"""Loggers of services, whose packages are not installed here: what these are told of a folder."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.mark.parametrize("name", PACKAGES)
def test_wandb_gets_a_local_folder_and_checkpoints_the_url(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = importlib.import_module(f"{name}.loggers.wandb")
    monkeypatch.setattr(module, "_WANDB_AVAILABLE", True)
    logger = module.WandbLogger(save_dir=Path("s3://bucket/logs"), offline=True)
    assert Path(logger._wandb_init["dir"]).is_dir()
    assert logger.save_dir == "s3://bucket/logs"
    local = module.WandbLogger(save_dir=tmp_path, offline=True)
    assert local._wandb_init["dir"] == local.save_dir == str(tmp_path)
    assert module.WandbLogger(save_dir=None, offline=True).save_dir is None


@pytest.mark.parametrize("name", PACKAGES)
def test_comet_gets_a_local_folder_and_checkpoints_the_url(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configurations: list[dict[str, Any]] = []

    def configure(**options: Any) -> Any:
        configurations.append(options)
        return SimpleNamespace(**options)

    fake: Any = ModuleType("comet_ml")
    fake.ExperimentConfig = configure
    monkeypatch.setitem(sys.modules, "comet_ml", fake)
    module = importlib.import_module(f"{name}.loggers.comet")
    monkeypatch.setattr(module, "_COMET_AVAILABLE", True)
    monkeypatch.setattr(module.CometLogger, "_create_experiment", lambda self: None)
    logger = module.CometLogger(offline_directory="s3://bucket/logs")
    assert Path(configurations[-1]["offline_directory"]).is_dir()
    assert logger.save_dir == "s3://bucket/logs"
    local = module.CometLogger(offline_directory=str(tmp_path))
    assert configurations[-1]["offline_directory"] == local.save_dir == str(tmp_path)


@pytest.mark.parametrize("name", PACKAGES)
def test_mlflow_refuses_a_url_for_its_files_and_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"{name}.loggers.mlflow")
    monkeypatch.setattr(module, "_MLFLOW_AVAILABLE", True)
    with pytest.raises(ValueError, match=r"s3://bucket/logs is not a local folder.*tracking_uri"):
        module.MLFlowLogger(save_dir="s3://bucket/logs")
