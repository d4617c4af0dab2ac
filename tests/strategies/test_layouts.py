"""A checkpoint continues with another strategy and another number of ranks than it was saved with."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.strategies.places import Local


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "world"),
    [
        ("fsdp", "model_parallel", 2),
        ("model_parallel", "fsdp", 2),
        ("fsdp", "model_parallel", 1),
        ("model_parallel", "model_parallel", 3),
    ],
)
def test_every_element_is_where_it_was_when_another_strategy_or_number_of_ranks_loads(
    local: Local, saved_by: str, loaded_by: str, world: int, tmp_path: Path
) -> None:
    job = {"task": "spread", "kind": "sharded"}
    path = str(tmp_path / "x.ckpt")
    saved = local.run({**job, "strategy": saved_by, "save": path}, 2)
    for outcome in [*saved, *local.run({**job, "strategy": loaded_by, "load": path}, world)]:
        assert outcome.get("right") == [True] * 3, outcome


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True])
def test_each_rank_saves_its_part_of_tied_weights_once(local: Local, in_background: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    job = {"task": "tied", "kind": "sharded", "strategy": "model_parallel", "value": 5.0, "async": in_background}
    outcomes = local.run({**job, "path": str(path)}, 2)
    shards = sorted(path.glob("*_0.distcp"), key=lambda shard: shard.name[-10:])
    for outcome, shard in zip(outcomes, shards, strict=True):
        assert outcome.get("found") == [5.0], outcome
        assert outcome["nbytes"] < shard.stat().st_size < 1.1 * outcome["nbytes"]
    dcp_to_torch_save(path, tmp_path / "whole.ckpt")
    whole = torch.load(tmp_path / "whole.ckpt")["model"]
    assert sorted(whole) == ["0.weight", "1.weight"]
    assert [weight.unique().tolist() for weight in whole.values()] == [[5.0], [5.0]]
