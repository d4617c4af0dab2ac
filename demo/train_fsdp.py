"""Trains with FSDP on two processes of this machine's CPU: ``train_fsdp.py URL OUTCOME EPOCHS [RESUME_FROM]``.

Each rank writes ``OUTCOME/rank-N.json``: fingerprints of its shards of the parameters and the optimizer state, and the
loop counters. Lightning starts the second rank by running this script again.
"""

import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from child import be_quiet, follow_parent

follow_parent()
be_quiet()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import lightning as L  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402

WIDTH = 1024


class CPUFSDPStrategy(FSDPStrategy):
    """Lightning refuses FSDP itself without a GPU, but not a class derived from it."""


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.batches = 0

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        self.batches += 1
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[0])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            loss = self.trainer.callback_metrics["loss"]
            print(f"        epoch {self.current_epoch}: loss {loss:.6f}", flush=True)

    def train_dataloader(self) -> DataLoader:
        samples = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(samples), batch_size=8, shuffle=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)]


def fingerprint(value: Any) -> Any:
    """The hash of a tensor's bits, with its type and shape; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    bits = value.detach().contiguous().flatten().view(torch.uint8).numpy()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(bits).hexdigest()}"


def outcome_of(trainer: L.Trainer, model: Model) -> dict[str, Any]:
    optimizer = trainer.optimizers[0]
    parameters = dict(trainer.strategy.model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        "parameters": {name: fingerprint(parameter) for name, parameter in parameters.items()},
        "optimizer": {
            f"{names[id(parameter)]} {key}": fingerprint(value)
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
        },
        "hyperparameters": [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "loops": trainer.fit_loop.state_dict(),
        "counters": [trainer.current_epoch, trainer.global_step],
        "batches": model.batches,
        "saves": trainer.profiler.recorded_durations["save_checkpoint"],
    }


def main(url: str, outcome: Path, epochs: int, resume: str | None) -> None:
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, max_epochs=epochs, default_root_dir=url, profiler="simple", logger=False,
        strategy=CPUFSDPStrategy(state_dict_type="sharded", auto_wrap_policy={nn.Sequential}),
        callbacks=[ModelCheckpoint(dirpath=url, filename="{epoch}", save_top_k=-1, every_n_epochs=2)],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    if resume:
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # that is why
    model = Model()
    trainer.fit(model, ckpt_path=resume)
    result = json.dumps(outcome_of(trainer, model), default=str)
    (outcome / f"rank-{trainer.global_rank}.json").write_text(result)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
