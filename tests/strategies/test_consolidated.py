import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning.pytorch as L
from lightning.fabric.storage.load import load_file
from tests.servers import Bucket
from tests.strategies.trainings import Runs, differences


class Model(L.LightningModule):
    """The one of ``worker.py``, for one process."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 2)
        )

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0]).pow(2).mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 16)), batch_size=4)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def on_train_start(self) -> None:
        """Keeps what has been loaded."""
        state = self.optimizers().optimizer.state
        self.loaded = {
            name: (parameter.detach().flatten().clone(), state[parameter]["exp_avg"].flatten().clone())
            for name, parameter in self.named_parameters()
        }


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_one_process_resumes_from_what_was_consolidated_in_a_bucket(
    runs: Runs, tmp_path: Path, bucket: Bucket, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"api": "trainer", "strategy": strategy, "kind": "sharded", "package": "lightning", "url": bucket.url}
    ranks = runs.train(**case, epochs=1)
    name = "lightning.pytorch.utilities.consolidate_checkpoint"
    monkeypatch.setattr(sys, "argv", [name, f"{bucket.url}/epoch=0.ckpt", "--output_file", f"{bucket.url}/one.ckpt"])
    monkeypatch.delitem(sys.modules, name, raising=False)
    runpy.run_module(name, run_name="__main__")

    model = Model()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, ckpt_path=f"{bucket.url}/one.ckpt")
    saved = {
        name.replace("_fsdp_wrapped_module.", ""): (
            torch.cat([rank["parameters"][name].flatten() for rank in ranks]),
            torch.cat([rank["optimizer"][name]["exp_avg"].flatten() for rank in ranks if name in rank["optimizer"]]),
        )
        for name in ranks[0]["parameters"]
    }
    assert differences(saved, model.loaded) == []
    assert trainer.global_step == 4 + 8  # two ranks did four steps of the first epoch together
    assert load_file(f"{bucket.url}/one.ckpt")["global_step"] == 4
