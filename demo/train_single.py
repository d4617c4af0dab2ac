"""Trains one process on a bucket: ``train_single.py URL OUTCOME [--full-report]``.

What differs from a run on a local folder is the value of ``dirpath`` and ``default_root_dir``.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from child import be_quiet, follow_parent

follow_parent()
be_quiet()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, get_worker_info  # noqa: E402

import pytorch_lightning as pl  # noqa: E402
from pytorch_lightning.callbacks import ModelCheckpoint  # noqa: E402

WIDTH = 1024


class Stream(IterableDataset):
    """A data set without a known length, as one that reads from a queue or from archives."""

    def __init__(self, seed: int, batches: int) -> None:
        self.seed, self.batches = seed, batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(self.seed + worker.id)
        for _ in range(self.batches // worker.num_workers):
            yield torch.randn(16, WIDTH, generator=generator)


def open_source(worker: int) -> None:
    """Stands for what a worker does before its first batch: connects, reads an index, fills a cache."""
    time.sleep(1)


class Autoencoder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch), batch)

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("val_loss", self.training_step(batch), batch_size=len(batch))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            print(
                f"      epoch {self.current_epoch}: val_loss {self.trainer.callback_metrics['val_loss']:.4f}",
                flush=True,
            )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream(1, batches=8), batch_size=None, num_workers=2, worker_init_fn=open_source)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Stream(9, batches=2), batch_size=None, num_workers=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def show_report(recorded: dict[str, list[float]], full: str | None) -> None:
    """Prints the profiler report: all of it, or the rows on data loaders and those that took longest."""
    if full is not None:
        print(full, flush=True)
        return
    totals = {name: sum(seconds) for name, seconds in recorded.items()}
    longest = sorted(totals, key=lambda name: -totals[name])[:4]
    print("      From the Fit Profiler Report (all of it: .venv/bin/python demo/run.py --full-report):")
    print(f"      {'Action':<44}{'Num calls':>10}{'Total time (s)':>16}")
    for name in sorted(totals, key=lambda name: -totals[name]):
        if name in longest or (name.endswith(("save_checkpoint", "_dataloader")) and not name.startswith("[")):
            short = re.sub(r"\{.*\}", "", name)
            print(f"      {short:<44}{len(recorded[name]):>10}{totals[name]:>16.3f}")
    sys.stdout.flush()


def main(url: str, outcome: Path, full_report: bool) -> None:
    pl.seed_everything(7, verbose=False)
    checkpoint_callback = ModelCheckpoint(
        dirpath=url, filename="sample-model-{epoch:02d}", save_top_k=1, monitor="val_loss"
    )
    trainer = pl.Trainer(
        callbacks=[checkpoint_callback], default_root_dir=url, max_epochs=3, profiler="simple",
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Autoencoder()
    trainer.fit(model)
    recorded = trainer.profiler.recorded_durations
    show_report(recorded, trainer.profiler.summary() if full_report else None)
    best = checkpoint_callback.best_model_path
    again = Autoencoder.load_from_checkpoint(best)
    for name, tensor in model.state_dict().items():
        if not torch.equal(tensor, again.state_dict()[name]):
            sys.exit(f"{name} came back from {best} with other values than it had")
    print(f"      Read back from {best}: every parameter is as it was.", flush=True)
    outcome.write_text(json.dumps({"best": best, "saves": recorded["save_checkpoint"]}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), "--full-report" in sys.argv)
