"""Storage that is slower than the time limit of the process group, for the ranks of :mod:`tests.strategies.ranks`.

A job says which rank is slow (``slow``), in doing what (``act``), for how many ``seconds`` (at its first call, or at
each), and how many seconds a collective call may take from then on (``limit_s``).
"""

import functools
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import lightning.pytorch as L
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.storage.archives import load
from lightning.fabric.storage.collectives import channel
from lightning.fabric.storage.transport import open as transport
from lightning.fabric.storage.transport import sink
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from tests.strategies.forks import Job

ACTS: dict[str, tuple[Any, str]] = {
    "write": (sink.Sink, "write"),
    "read": (transport._Named, "read_into"),
    "open": (load, "open_checkpoint"),
    "remove": (TorchCheckpointIO, "remove_checkpoint"),
    "link": (os, "symlink"),
    "finalize": (CSVLogger, "finalize"),
}


def begin(job: Job, rank: int) -> None:
    """From now on the storage is slow."""
    if "limit_s" in job:
        torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=job["limit_s"]), None)
    if "patience_s" in job:
        channel.training_channel().patience = timedelta(seconds=job["patience_s"])
    if job.get("slow") == rank:
        owner, name = ACTS[job["act"]]
        setattr(owner, name, _slowly(getattr(owner, name), job["seconds"], job.get("each", False)))


def _slowly(function: Callable[..., Any], seconds: float, each: bool) -> Any:
    calls: list[None] = []

    @functools.wraps(function)
    def slow(*arguments: Any, **named: Any) -> Any:
        calls.append(None)
        if each or len(calls) == 1:
            time.sleep(seconds)
        return function(*arguments, **named)

    return slow


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).sum()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 4))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Begin(Callback):
    def __init__(self, job: Job) -> None:
        self.job = job

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        begin(self.job, trainer.global_rank)


def fit(job: Job, world: int) -> list[str]:
    """Trains with DDP, resumes if the job says so, and meets with all ranks at the end. Returns what was saved."""
    folder = Path(job["path"]).parent
    saved = ModelCheckpoint(folder, filename="{epoch}", save_top_k=1, save_last="link")
    trainer = L.Trainer(
        accelerator="cpu", devices=world, strategy=DDPStrategy(), max_epochs=job["epochs"],
        plugins=[AsyncCheckpointIO()] if job.get("async") else [], callbacks=[Begin(job), saved],
        logger=CSVLogger(folder), default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), ckpt_path=job.get("resume"))
    trainer.strategy.barrier()
    return sorted(path.name for path in folder.glob("epoch=*.ckpt"))
