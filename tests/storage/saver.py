"""A process that saves 60 MiB in parts of 5 MiB: `python -m tests.storage.saver URL plugin|trainer [fsspec]`.

With `fsspec` it does without obstore.
"""

import signal
import sys
from typing import Any

import torch

from lightning.fabric.storage.transport import multipart

PARAMETERS = 15 * 2**20
NEW = 2.0


def save_with_plugin(url: str) -> None:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    TorchCheckpointIO().save_checkpoint({"w": torch.full((PARAMETERS,), NEW)}, url)


def save_with_trainer(url: str) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.full((PARAMETERS,), NEW))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.w[:1].sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(1, 1))

    folder, _, name = url.rpartition("/")
    callback = ModelCheckpoint(folder, filename=name.removesuffix(".ckpt"), enable_version_counter=False)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        callbacks=[callback], default_root_dir=folder, max_epochs=2, accelerator="cpu", devices=1, **quiet
    )
    trainer.fit(Model())
    sys.exit("was not asked to terminate")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    url, saver, *engine = sys.argv[1:]
    if engine == ["fsspec"]:
        sys.modules["obstore"] = None
    multipart.SMALLEST_PART = 5 * 2**20
    {"plugin": save_with_plugin, "trainer": save_with_trainer}[saver](url)
