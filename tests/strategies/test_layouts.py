"""A checkpoint continues with another strategy and another number of ranks than it was saved with."""

from pathlib import Path

import pytest

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
