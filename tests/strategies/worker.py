"""Trains with two gloo ranks; run as a script, since Lightning starts the second rank by running the script again.

``worker.py RUN_FOLDER`` reads ``case.json`` there and writes one ``rank-N.pt`` a rank: parameters, optimizer state and
loop counters as they are at the end, in the rank's own shards.
"""

import importlib
import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._tensor import DTensor  # its name in PyTorch 2.4 too

RUN = Path(sys.argv[1])
CASE: dict[str, Any] = json.loads((RUN / "case.json").read_text())
TWIN = CASE["package"] == "pytorch_lightning"
L = importlib.import_module("pytorch_lightning" if TWIN else "lightning.pytorch")
FABRIC = importlib.import_module("lightning_fabric" if TWIN else "lightning.fabric")


def strategy(module: Any) -> Any:
    if CASE["strategy"] == "ddp":
        return "ddp"
    sharded = CASE["kind"] == "sharded"
    if CASE["strategy"] == "model_parallel":
        arguments = {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": sharded}
        if module is FABRIC.strategies:
            arguments["parallelize_fn"] = parallelize
        return module.ModelParallelStrategy(**arguments)

    class CPUFSDPStrategy(module.FSDPStrategy):
        """Lightning accepts FSDP on the CPU for a subclass only."""

    return CPUFSDPStrategy(state_dict_type=CASE["kind"], auto_wrap_policy={Block})


def plugins(package: Any) -> list[Any]:
    if not CASE.get("in_background"):
        return []
    return [importlib.import_module(f"{package.__name__}.plugins").AsyncCheckpointIO()]


@dataclass
class Settings:
    """A hyperparameter of no plain type: checkpoints with it load with ``weights_only=False`` only."""

    depth: int = 3


class Block(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.ReLU())


def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed._composable.fsdp import fully_shard

    for block in [m for m in module.modules() if isinstance(m, Block)]:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(module, mesh=mesh["data_parallel"])


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(Block(16), Block(16), nn.Linear(16, 2))


def data() -> torch.utils.data.Dataset:
    return torch.utils.data.TensorDataset(torch.randn(32, 16, generator=torch.Generator().manual_seed(3)))


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.batches_seen = 0
        if CASE.get("settings"):
            self.save_hyperparameters({"settings": Settings()})
        if CASE["strategy"] != "model_parallel":
            self.net = network()

    def configure_model(self) -> None:
        if CASE["strategy"] == "model_parallel" and not hasattr(self, "net"):
            self.net = parallelize(network(), self.device_mesh)

    def training_step(self, batch: Any) -> torch.Tensor:
        self.batches_seen += 1
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any) -> None:
        self.net(batch[0])

    predict_step = test_step = validation_step

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(data(), batch_size=4)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def local(value: Any) -> Any:
    """A copy of what this rank holds of a tensor."""
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {names[id(p)]: {k: local(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"parameters": {n: local(p) for n, p in model.named_parameters()}, "optimizer": state, "groups": groups}


def make_trainer(**options: Any) -> Any:
    return L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy(L.strategies), max_epochs=CASE["epochs"], logger=False,
        plugins=plugins(L), default_root_dir=RUN, enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def with_trainer() -> dict[str, Any]:
    callbacks = importlib.import_module(f"{L.__name__}.callbacks")
    checkpoint = callbacks.ModelCheckpoint(
        dirpath=CASE["url"], filename="{epoch}", save_top_k=-1, save_last=CASE.get("save_last")
    )
    trainer = make_trainer(callbacks=[checkpoint])
    model = Model()
    trainer.fit(model, ckpt_path=CASE.get("resume"), weights_only=CASE.get("weights_only"))
    result = {
        **shards(trainer.strategy.model, trainer.optimizers[0]),
        "loops": trainer.fit_loop.state_dict(),
        "counters": (trainer.current_epoch, trainer.global_step),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "batches_seen": model.batches_seen,
        "rank": trainer.global_rank,
    }
    if CASE.get("evaluate"):
        result["refused"] = evaluate()
    return result


def evaluate() -> str:
    """Why the checkpoint was not loaded when nothing but plain types was allowed."""
    trainer = make_trainer(enable_checkpointing=False)
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(Model(), loader, ckpt_path=CASE["resume"], weights_only=False)
    try:
        trainer.validate(Model(), loader, ckpt_path=CASE["resume"], weights_only=True)
    except pickle.UnpicklingError as error:
        return str(error)
    return ""


def with_fabric() -> dict[str, Any]:
    fabric = FABRIC.Fabric(accelerator="cpu", devices=2, strategy=strategy(FABRIC.strategies), plugins=plugins(FABRIC))
    fabric.launch()
    model = fabric.setup_module(network())
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.01))
    state = {"model": model, "optimizer": optimizer, "epoch": 0, "note": "fresh"}
    if CASE.get("resume"):
        rest = fabric.load(CASE["resume"], state, weights_only=CASE.get("weights_only"))
        assert rest == {}, rest
    batches_seen = 0
    while state["epoch"] < CASE["epochs"]:
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data(), batch_size=4), move_to_device=False)
        for (batch,) in loader:
            optimizer.zero_grad()
            fabric.backward(model(batch).pow(2).mean())
            optimizer.step()
            batches_seen += 1
        state["epoch"] += 1
        state["note"] = f"after {state['epoch']}"
        fabric.save(f"{CASE['url']}/epoch={state['epoch'] - 1}.ckpt", state)
    result = shards(model.module, optimizer.optimizer)
    return {
        **result,
        "loops": (state["epoch"], state["note"]),
        "batches_seen": batches_seen,
        "rank": fabric.global_rank,
    }


if __name__ == "__main__":
    outcome = with_trainer() if CASE["api"] == "trainer" else with_fabric()
    torch.save(outcome, RUN / f"rank-{outcome['rank']}.pt")
