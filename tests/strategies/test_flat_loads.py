"""FSDP's modules, in every mode, load sharded checkpoints of any origin: each value and each setting as it was saved."""

from pathlib import Path

import pytest

from tests.strategies.flat_loads import MODES, WRITERS
from tests.strategies.places import Local

WORLDS = (1, 2, 3, 4)


def _run(local: Local, world: int, **job: object) -> list[dict[str, object]]:
    outcomes = local.run({"task": "flat_loads", "longest_s": 200, **job}, world)
    assert [outcome["error"] for outcome in outcomes] == [None] * world
    return outcomes


def test_x(local: Local, tmp_path: Path) -> None:
    paths = {writer: str(tmp_path / writer) for writer in WRITERS}
    _run(local, 2, does="write", paths=paths)
    for outcome in _run(local, 2, does="load", paths=list(paths.values()), modes=MODES):
        import json; print(json.dumps(outcome["different"], indent=1))
