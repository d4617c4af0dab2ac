"""Small training runs under a profiler, with data loaders that take a second to start or to be constructed.

A module of its own, since spawned workers import it.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

SECONDS = 1.0


class SlowToSend(Dataset):
    """Takes its time to be pickled, which happens for each worker that is spawned."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)

    def __getstate__(self) -> dict[str, Any]:
        time.sleep(SECONDS)
        return {}


def loader(**options: Any) -> DataLoader:
    return DataLoader(SlowToSend(), batch_size=2, num_workers=1, multiprocessing_context="spawn", **options)


def slowly_constructed_loader() -> DataLoader:
    time.sleep(SECONDS)
    return DataLoader(torch.ones(4, 2), batch_size=2)


#: The second one is made of the same patches and modules, with other names.
PACKAGES: list[Any] = ["lightning.pytorch"]
if importlib.util.find_spec("pytorch_lightning.profilers"):  # not so in a checkout of Lightning
    PACKAGES.append(pytest.param("pytorch_lightning", marks=pytest.mark.slow))


def package(name: str) -> Any:
    importlib.import_module(f"{name}.profilers")
    return importlib.import_module(name)


def model(pl: Any, make_loader: Callable[[], Any]) -> Any:
    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).sum()

        def validation_step(self, batch: torch.Tensor) -> None:
            self.layer(batch)

        test_step = validation_step

        def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def _loader(self) -> Any:
            return make_loader()

        train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader

    return Model()


def trainer(pl: Any, profiler: Any, root: Path, **options: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu", devices=1, profiler=profiler, default_root_dir=root, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0, **options},
    )  # fmt: skip
