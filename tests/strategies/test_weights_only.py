"""Checkpoints that hold more than plain Python types, and what `weights_only` makes of them, with two ranks."""

from pathlib import Path

import pytest

from tests.strategies.trainings import Runs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("strategy", ["fsdp", "model_parallel"])
def test_the_trainer_resumes_and_evaluates_with_as_much_as_it_is_allowed_to_load(
    strategy: str, kind: str, runs: Runs, tmp_path: Path
) -> None:
    case = {"api": "trainer", "strategy": strategy, "kind": kind, "package": "lightning", "settings": True}
    case |= {"url": str(tmp_path / "checkpoints"), "resume": None}
    runs.train(**case, epochs=1)
    case["resume"] = f"{case['url']}/epoch=0.ckpt"
    for rank in runs.train(**case, epochs=2, weights_only=False, evaluate=True):
        assert rank["batches_seen"] == 4  # of the second epoch
        assert "Settings" in rank["refused"]
