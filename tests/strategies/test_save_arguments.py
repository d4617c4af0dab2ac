"""What FSDP and ModelParallel do with the arguments of a save, and with the state until the writer asks for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.strategies import checkpoint_load
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy, model_parallel
from lightning.pytorch.strategies import FSDPStrategy as TrainerFSDP
from lightning.pytorch.strategies import ModelParallelStrategy as TrainerModelParallel
from tests.servers import Bucket


@pytest.mark.parametrize(
    ("strategy", "load"),
    [
        (TrainerFSDP(state_dict_type="sharded"), checkpoint_load.load_metadata),
        (TrainerModelParallel(), checkpoint_load.load_metadata),
        (TrainerFSDP(state_dict_type="full"), load_file),
        (TrainerModelParallel(save_distributed_checkpoint=False), load_file),
    ],
)
def test_the_storage_options_of_a_save_in_a_trainer_reach_the_store(
    strategy: Any, load: Callable[[str], Any], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"endpoint_url": bucket.server.environment["AWS_ENDPOINT_URL"]}
    url = f"{bucket.url}/x.ckpt"
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        checkpoint = {"state_dict": {"w": torch.ones(3)}, "optimizer_states": [], "epoch": 4}
        strategy.save_checkpoint(checkpoint, url, storage_options=options)
    assert load(url)["epoch"] == 4


@pytest.mark.parametrize("strategy", [FSDPStrategy(), ModelParallelStrategy(lambda module, mesh: module)])
def test_fabrics_strategies_take_storage_options_and_refuse_what_are_none(strategy: Any) -> None:
    with pytest.raises(ValueError, match="Could not find a"):  # there is no model, but nothing against the options
        strategy.save_checkpoint("s3://bucket/x.ckpt", {"epoch": 1}, storage_options={"anon": True})
    with pytest.raises(TypeError, match="Storage options are a dictionary"):
        strategy.save_checkpoint("s3://bucket/x.ckpt", {"epoch": 1}, storage_options="anon")


class Asked(Exception):
    """Ends what would come after the question for the state."""


@pytest.fixture
def offloaded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each state dict that was asked for was to be copied to the host."""
    seen = []

    def ask(*arguments: Any, options: Any) -> dict[str, Any]:
        seen.append(options.cpu_offload)
        raise Asked

    for name in ("get_model_state_dict", "get_optimizer_state_dict"):
        monkeypatch.setattr(f"torch.distributed.checkpoint.state_dict.{name}", ask)
    return seen


@pytest.mark.parametrize("sharded", [True, False])
def test_sharded_state_stays_on_its_device_until_the_writer_asks_for_it(
    sharded: bool, offloaded: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(module.parameters())  # which has a state at once
    trainers = TrainerModelParallel(save_distributed_checkpoint=sharded)
    trainers.model = module
    monkeypatch.setattr(model_parallel, "_has_dtensor_modules", lambda module: isinstance(module, nn.Module))
    fabrics = ModelParallelStrategy(lambda module, mesh: module, save_distributed_checkpoint=sharded)
    for ask in (
        trainers.lightning_module_state_dict,
        lambda: trainers.optimizer_state(optimizer),
        lambda: fabrics.save_checkpoint("memory://x.ckpt", {"model": module}),
        lambda: model_parallel._save_checkpoint(
            locate("x.ckpt"), {"optimizer": optimizer, "model": module}, not sharded, 0
        ),
    ):
        with pytest.raises(Asked):
            ask()
    assert offloaded == [not sharded] * 4
