from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import lightning.pytorch as L
from lightning.fabric import Fabric, cli
from tests.servers import Bucket
from tests.strategies.trainings import Ranks, Runs, differences


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


State = dict[str, tuple[torch.Tensor, torch.Tensor]]


def whole(ranks: Ranks) -> State:
    """Each parameter and a part of its optimizer's state, of the shards of all ranks."""
    return {
        name.replace("_fsdp_wrapped_module.", ""): (
            torch.cat([rank["parameters"][name].flatten() for rank in ranks]),
            torch.cat([rank["optimizer"][name]["exp_avg"].flatten() for rank in ranks if name in rank["optimizer"]]),
        )
        for name in ranks[0]["parameters"]
    }


def loaded_by_one_process(file: str, tmp_path: Path) -> State:
    """The same, when a run has gone on from the file for one epoch."""
    model = Model()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, ckpt_path=file)
    assert trainer.global_step == 4 + 8  # two ranks did four steps of the first epoch together
    return model.loaded


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().flatten() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_what_fabric_consolidates_in_a_bucket_loads_wherever_a_file_of_the_trainer_does(
    runs: Runs, tmp_path: Path, bucket: Bucket, strategy: str
) -> None:
    case = {"api": "trainer", "package": "lightning", "epochs": 1}
    ranks = runs.train(**case, strategy=strategy, kind="sharded", url=bucket.url)
    saved, one = whole(ranks), f"{bucket.url}/one.ckpt"
    arguments = ["consolidate", f"{bucket.url}/epoch=0.ckpt", "--output_file", one]
    assert CliRunner().invoke(cli._main, arguments).exit_code == 0

    assert differences(saved, loaded_by_one_process(one, tmp_path)) == []
    of_model = {name: parameter for name, (parameter, _) in saved.items()}
    assert differences(of_model, weights(Model.load_from_checkpoint(one))) == []
    in_fabric = Model()
    rest = Fabric(accelerator="cpu", devices=1).load(one, {"state_dict": in_fabric})
    assert differences(of_model, weights(in_fabric)) == []
    assert (rest["global_step"], len(rest["optimizer_states"])) == (4, 1)

    for other in (strategy, "ddp"):
        again = runs.train(**case, strategy=other, kind="full", url=f"{bucket.url}/again", resume=one)
        assert differences(again[0]["counters"], ranks[0]["counters"]) == []
        assert differences(again[0]["schedulers"], ranks[0]["schedulers"]) == []
        for rank in again if other == "ddp" else [again]:
            assert differences(saved, whole([rank] if other == "ddp" else rank)) == []
