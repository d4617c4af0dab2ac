"""The promises of trainings whose optimizers keep all of their state on a device, beside types of few bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from tests.accelerators.device import Device
from tests.accelerators.training import STEPS, Model

OPTIMIZERS = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "capturable": lambda parameters: torch.optim.Adam(parameters, lr=0.01, capturable=True),
}


class Narrow(Model):
    """Has buffers of a byte an element, which change with each step."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.register_buffer("eighth", torch.zeros(33, dtype=torch.float8_e4m3fn))
        self.register_buffer("bytes", torch.zeros(1001, dtype=torch.uint8))

    def training_step(self, batch: Tensor) -> Tensor:
        self.eighth = torch.full((33,), self.global_step + 0.5, device=self.device).to(torch.float8_e4m3fn)
        self.bytes.add_(50)
        return super().training_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


class OptimizersContract:
    @pytest.mark.parametrize("way", ["sync", "background"])
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_training_with_all_state_on_the_device_is_resumed_bit_for_bit(
        self, optimizer: str, way: str, tmp_path: Path, device: Device
    ) -> None:
        whole = self.fit(device, optimizer, way, tmp_path, save=True)
        resumed = self.fit(device, optimizer, way, tmp_path, ckpt_path=tmp_path / "step=3.ckpt")
        assert whole.keys() == resumed.keys()
        for name, value in whole.items():
            assert value.device == resumed[name].device, name
            assert torch.equal(bits(value), bits(resumed[name])), name
        steps = [value for name, value in whole.items() if name.endswith(".step")]
        assert steps
        assert all(step.device == device.device and step.item() == STEPS for step in steps)

    def fit(
        self, device: Device, optimizer: str, way: str, folder: Path, save: bool = False, **options: Any
    ) -> dict[str, Tensor]:
        """Returns all tensors of the end."""
        torch.manual_seed(0)
        model = Narrow(optimizer)
        every_step = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = Trainer(
            plugins=[AsyncCheckpointIO()] if way == "background" else [], default_root_dir=folder, max_epochs=1,
            callbacks=[every_step] if save else [], enable_checkpointing=save, logger=False,
            enable_progress_bar=False, enable_model_summary=False, **device.trainer_options(),
        )  # fmt: skip
        trainer.fit(model, **options)
        moments = trainer.optimizers[0].state_dict()["state"]
        return {
            **model.state_dict(),
            **{f"{at}.{name}": value for at, of in moments.items() for name, value in of.items()},
        }


def bits(tensor: Tensor) -> Tensor:
    """The values on the host, in a type that can be compared everywhere."""
    host = tensor.detach().cpu()
    return host.view(torch.uint8) if host.dtype == torch.float8_e4m3fn else host
