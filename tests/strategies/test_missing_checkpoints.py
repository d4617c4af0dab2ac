"""A path that was mistyped is the same error, which says what to do, whatever loads from it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers import Bucket


def told() -> None:
    """Prints what each way to load raises; in a process of its own, for the strategies make a process group."""
    import torch
    from torch.distributed._composable.fsdp import fully_shard

    from lightning.fabric import Fabric
    from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
    from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
    from tests.pytorch.background_runs import Model, make_trainer

    class EvaluatedModel(Model):
        def test_step(self, batch: Any) -> None:
            self.layer(batch)

        validation_step = predict_step = test_step
        val_dataloader = predict_dataloader = Model.train_dataloader

    class ShardedModel(EvaluatedModel):
        def configure_model(self) -> None:
            self.layer = fully_shard(torch.nn.Linear(2, 2), mesh=self.device_mesh["data_parallel"])

    class OnCPU(FSDPStrategy):  # the strategy itself is refused there
        pass

    class FabricOnCPU(FabricFSDP):
        pass

    def shard(model: Any, mesh: Any) -> Any:
        return fully_shard(model, mesh=mesh["data_parallel"])

    gloo: dict[str, Any] = {"process_group_backend": "gloo"}
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": 1}
    folder, *paths = sys.argv[1:]

    def train(verb: str, strategy: Any, model: type[Model], path: str) -> None:
        trainer = make_trainer(TorchCheckpointIO(), folder, strategy=strategy(), enable_checkpointing=False)
        getattr(trainer, verb)(model([1.0]), ckpt_path=path)

    def load(strategy: Any, path: str) -> None:
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy())
        fabric.launch()
        fabric.load(path, {"model": fabric.setup_module(torch.nn.Linear(2, 2))})

    ways: dict[str, Any] = {
        "Fabric": lambda path: load(lambda: "auto", path),
        "Fabric, FSDP": lambda path: load(lambda: FabricOnCPU(**gloo), path),
        "Fabric, ModelParallel": lambda path: load(lambda: FabricModelParallel(shard, **sizes, **gloo), path),
        "load_raw": lambda path: Fabric(accelerator="cpu", devices=1).load_raw(path, torch.nn.Linear(2, 2)),
        "load_from_checkpoint": lambda path: EvaluatedModel.load_from_checkpoint(path, scores=[1.0]),
    }
    for verb in ("fit", "validate", "test", "predict"):
        strategies = {
            "one device": (lambda: "auto", EvaluatedModel),
            "DDP": (lambda: DDPStrategy(**gloo), EvaluatedModel),
            "FSDP": (lambda: OnCPU(**gloo), EvaluatedModel),
            "ModelParallel": (lambda: ModelParallelStrategy(**sizes, **gloo), ShardedModel),
        }
        for name, (strategy, model) in strategies.items():
            ways[f"{verb}, {name}"] = lambda path, verb=verb, strategy=strategy, model=model: train(
                verb, strategy, model, path
            )
    errors: dict[str, list[str]] = {}
    for name, way in ways.items():
        for path in paths:
            try:
                way(path)
            except Exception as error:
                errors.setdefault(name, []).append(f"{type(error).__name__}: {error}")
    Path(folder, "errors.json").write_text(json.dumps(errors))


def test_a_mistyped_path_is_the_same_error_for_every_strategy(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    url = f"{bucket.url}/run/latest.ckpt"
    paths = [str(tmp_path / "run" / "latest.ckpt"), str(tmp_path / "rum" / "last.ckpt"), url, "s3://nope/last.ckpt"]
    command = [sys.executable, "-m", __name__, str(tmp_path), *paths]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, env=os.environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    begin = "FileNotFoundError: Checkpoint file not found: "
    expected = [
        f"{begin}{paths[0]}. Correct the path: there is no 'latest.ckpt' in {tmp_path / 'run'}.",
        f"{begin}{paths[1]}. Correct the path: there is no 'rum' in {tmp_path}.",
        f"{begin}{url}. Correct the URL: upper and lower case and every slash count in the names of a store.",
        f"{begin}s3://nope/last.ckpt. There is no bucket 'nope': make it, or correct the URL or the endpoint.",
    ]
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert errors == dict.fromkeys(errors, expected)
    assert len(errors) == 21


def test_a_folder_that_is_no_checkpoint_is_not_called_missing(tmp_path: Path) -> None:
    from lightning.fabric.storage.strategies.checkpoint_place import find_to_load

    with pytest.raises(ValueError, match="holds no sharded checkpoint"):
        find_to_load(tmp_path)
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        find_to_load(tmp_path / "none")


if __name__ == "__main__":
    told()
