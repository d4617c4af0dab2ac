"""One of two gloo ranks that load checkpoints from S3: ``node_worker.py URL FOLDER``, with LOCAL_RANK set.

Writes what it saw to ``FOLDER/rank-N.json``. Each step loads a key of its own, so that the test can count the requests.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lightning.pytorch as L
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.storage.archives import node_cache
from lightning.pytorch.plugins.io import AsyncCheckpointIO

RANK = int(os.environ.get("LOCAL_RANK", 0))


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).pow(2).mean()

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 256), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class LoadsOnRankZero(TorchCheckpointIO):
    """A user's way to download once."""

    def load_checkpoint(self, path: Any, **options: Any) -> Any:
        self.given = path
        loaded = [super().load_checkpoint(path, **options) if RANK == 0 else None]
        torch.distributed.broadcast_object_list(loaded, src=0)
        return loaded[0]


def trainer(epochs: int, devices: int, **options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(
        accelerator="cpu", devices=devices, max_epochs=epochs, enable_model_summary=False, **quiet, **options
    )


def checksum(state: dict[str, torch.Tensor]) -> float:
    return sum(value.double().abs().sum().item() for value in state.values())


def shared_memory() -> list[str]:
    """The copies that this process still has open or mapped."""
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    return [line for line in [*links, *Path("/proc/self/maps").read_text().splitlines()] if "memfd:lightning" in line]


def failure(load: Callable[[], Any]) -> tuple[str, str]:
    try:
        load()
    except Exception as error:
        return type(error).__name__, str(error)
    return "no error", ""


def main(url: str, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    model = Model()
    resumed = trainer(2, 2, strategy="ddp", plugins=[AsyncCheckpointIO()], default_root_dir=folder)
    resumed.fit(model, ckpt_path=f"{url}/resumed")
    seen["resumed"] = (resumed.current_epoch, resumed.global_step, checksum(model.state_dict()))

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loaded = fabric.load(f"{url}/loaded")["state_dict"]
    seen["left after a load"] = shared_memory()
    seen["loaded"] = checksum(loaded)
    for tensor in loaded.values():
        tensor.zero_()
    seen["loaded again"] = checksum(fabric.load(f"{url}/loaded_again")["state_dict"])

    seen["weights only"] = failure(lambda: fabric.load(f"{url}/odd", weights_only=True))[0]
    seen["not weights only"] = sorted(fabric.load(f"{url}/odd", weights_only=False))
    seen["over http"] = sorted(fabric.load(f"{os.environ['AWS_ENDPOINT_URL']}/{url.partition('://')[2]}/over_http"))
    began = time.monotonic()
    seen["missing"] = failure(lambda: fabric.load(f"{url}/missing"))
    seen["refused"] = failure(lambda: fabric.load(f"{url}/refused"))
    seen["folder"] = failure(lambda: fabric.load(f"{url}/folder"))
    seen["seconds until all were told"] = time.monotonic() - began

    mixed = fabric.load(folder / "local" if RANK == 0 else f"{url}/mixed")["state_dict"]
    seen["mixed"] = checksum(mixed)
    open_copy, machine = node_cache._open, node_cache._machine
    if RANK == 1:
        node_cache._open = lambda offer, stack: open_copy(offer._replace(place="/proc/self/fd/99999"), stack)
    seen["out of reach"] = checksum(fabric.load(f"{url}/out_of_reach")["state_dict"])
    if RANK == 1:
        node_cache._open, node_cache._machine = open_copy, lambda: "another machine"
    seen["two machines"] = checksum(fabric.load(f"{url}/two_machines")["state_dict"])
    node_cache._machine = machine

    if RANK == 1:
        seen["alone"] = [
            checksum(Model.load_from_checkpoint(f"{url}/alone").state_dict()),
            checksum(fabric.strategy.load_checkpoint(f"{url}/alone")["state_dict"]),
        ]
        fabric.load_raw(f"{url}/raw", model.layer)
        model = Model()
        trainer(2, 1, default_root_dir=folder).fit(model, ckpt_path=f"{url}/alone")
        seen["alone"].append(checksum(model.state_dict()))
    fabric.barrier()

    fabric.strategy.checkpoint_io = plugin = LoadsOnRankZero()
    seen["loaded by a plugin"] = (checksum(fabric.load(f"{url}/plugin")["state_dict"]), plugin.given)
    seen["left"] = shared_memory()
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    (Path(sys.argv[2]) / f"rank-{RANK}.json").write_text(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
