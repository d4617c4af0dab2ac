"""Checkpoints that hold more than plain Python types, in one process."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.strategies.checkpoint_place import find_checkpoint
from lightning.fabric.strategies.model_parallel import _load_raw_module_state_from_path
from lightning.fabric.utilities.load import _lazy_load
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.tuner import Tuner
from tests.pytorch.test_same_on_every_store import QUIET


@dataclass
class Settings:
    depth: int = 3


class Model(LightningModule):
    def __init__(self, settings: Any = None, lr: float = 0.01, batch_size: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, settings.depth if settings else 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=self.hparams.batch_size)


def test_the_tuner_restores_what_it_has_saved_itself(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, **QUIET)
    model = Model(Settings())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert Tuner(trainer).scale_batch_size(model, steps_per_trial=1, max_trials=2) == 4
    assert Tuner(trainer).lr_find(model, num_training=3) is not None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("allowed", "is_loaded"), [(False, True), (True, False), (None, False)])
def test_the_command_line_takes_hyperparameters_from_what_it_may_load(
    allowed: bool | None, is_loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, **QUIET)
    trainer.fit(Model(Settings(depth=5)))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    monkeypatch.chdir(tmp_path)
    options = {f"trainer.{name}": value for name, value in QUIET.items()}
    arguments = ["fit", f"--ckpt_path={tmp_path}/x.ckpt", "--trainer.max_epochs=2"]
    arguments += [f"--{name}={str(value).lower()}" for name, value in options.items()]
    arguments += [] if allowed is None else [f"--weights_only={str(allowed).lower()}"]
    if is_loaded:
        assert LightningCLI(Model, args=arguments, save_config_callback=None).model.layer.out_features == 5
    else:
        with pytest.raises(pickle.UnpicklingError, match="Settings"):
            LightningCLI(Model, args=arguments, save_config_callback=None)


def test_what_is_loaded_straight_into_a_module_is_what_may_be_loaded(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 1)
    save_file({**torch.nn.Linear(2, 1).state_dict(), "settings": Settings()}, tmp_path / "x.ckpt")
    for loads in (
        lambda found: _load_raw_module_state_from_path(found, module, world_size=1, strict=False),
        _lazy_load,
    ):
        loads(find_checkpoint(tmp_path / "x.ckpt", weights_only=False))
        with pytest.raises(pickle.UnpicklingError, match="Settings"):
            loads(find_checkpoint(tmp_path / "x.ckpt", weights_only=True))
