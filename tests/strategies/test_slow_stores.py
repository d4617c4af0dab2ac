"""Ranks that wait for one whose storage takes longer than a collective call may."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.strategies.forks import Outcome
from tests.strategies.places import Local

VALUE = 2.0
#: How long a collective call may take, and how long the storage does, in seconds.
LIMIT_S, SLOW_S = 2.5, 3.5
JOBS_AT_A_TIME = 6

Job = dict[str, Any]


def slow(rank: int, act: str, **more: Any) -> Job:
    return {"slow": rank, "act": act, "seconds": SLOW_S, "limit_s": LIMIT_S, **more}


def save_job(path: str, strategy: str, kind: str, **more: Any) -> Job:
    return {"task": "save", "strategy": strategy, "kind": kind, "path": path, "value": VALUE, **more}


def at_once(cases: dict[str, Callable[[], list[Outcome]]]) -> dict[str, list[Outcome]]:
    """Runs all of them, for most of what each does is to wait."""
    with ThreadPoolExecutor(JOBS_AT_A_TIME) as threads:
        return dict(zip(cases, threads.map(lambda run: run(), cases.values()), strict=True))


def errors(outcomes: dict[str, list[Outcome]]) -> dict[str, list[str | None]]:
    return {case: [outcome["error"] for outcome in of_case] for case, of_case in outcomes.items()}


#: The strategy, the kind of checkpoint, and who is slow.
SAVES = [
    ("model_parallel", "sharded", 1),
    ("model_parallel", "full", 0),
    ("fsdp", "sharded", 0),
    ("fsdp", "full", 0),
    ("ddp", "full", 0),
]


def test_no_rank_gives_up_one_that_uploads_for_longer_than_the_limit_of_the_strategy(local: Local) -> None:
    def run(strategy: str, kind: str, rank: int, is_async: bool) -> list[Outcome]:
        return local.run(save_job(local.new({}), strategy, kind, **{"async": is_async}, **slow(rank, "write")), 2)

    cases = [(*case, False) for case in SAVES] + [("model_parallel", "sharded", 1, True)]
    outcomes = at_once({f"{case}": lambda case=case: run(*case) for case in cases})  # type: ignore[misc]
    assert errors(outcomes) == {f"{case}": [None, None] for case in cases}
    assert min(max(one["seconds"] for one in of_case) for of_case in outcomes.values()) > SLOW_S


def test_no_rank_gives_up_one_that_downloads_for_longer_than_the_limit_of_the_strategy(local: Local) -> None:
    def run(strategy: str, kind: str, rank: int) -> list[Outcome]:
        path = local.new({})
        assert [one["error"] for one in local.run(save_job(path, strategy, kind), 2)] == [None, None]
        act = "read" if kind == "sharded" else "open"
        return local.run({**save_job(path, strategy, kind), "task": "load", **slow(rank, act)}, 2)

    cases = [
        ("model_parallel", "sharded", 0),
        ("model_parallel", "full", 1),
        ("fsdp", "sharded", 1),
        ("fsdp", "full", 0),
        ("ddp", "full", 0),
    ]
    outcomes = at_once({f"{case}": lambda case=case: run(*case) for case in cases})  # type: ignore[misc]
    assert errors(outcomes) == {f"{case}": [None, None] for case in cases}
    assert [one["found"] for of_case in outcomes.values() for one in of_case] == [[VALUE]] * 2 * len(cases)


def test_a_run_outlives_all_that_it_waits_for_storage(local: Local) -> None:
    def run(rank: int, act: str, **more: Any) -> list[Outcome]:
        path = local.new({})
        first = local.run({"task": "fit", "path": path, "epochs": 1}, 2)
        assert [one["error"] for one in first] == [None, None]
        more = {"resume": path.replace("last.ckpt", "epoch=0.ckpt"), "epochs": 3, **more}
        return local.run({"task": "fit", "path": path, **slow(rank, act), **more}, 2)

    cases = {
        "save": (0, "write"),
        "save in the background": (0, "write", True),
        "resume, first rank": (0, "open"),
        "resume, second rank": (1, "open"),
        "remove": (0, "remove"),
        "link": (0, "link"),
        "write logs": (0, "finalize"),
    }
    outcomes = at_once(
        {
            name: lambda rank=rank, act=act, more=more: run(rank, act, **{"async": bool(more)})  # type: ignore[misc]
            for name, (rank, act, *more) in cases.items()
        }
    )
    assert errors(outcomes) == {name: [None, None] for name in cases}
    assert [one["saved"] for of_case in outcomes.values() for one in of_case] == [
        ["epoch=0.ckpt", "epoch=2.ckpt"]
    ] * 2 * len(cases)


@pytest.mark.parametrize(("strategy", "kind", "rank"), [("model_parallel", "sharded", 1), ("ddp", "full", 0)])
def test_all_ranks_fail_when_one_makes_no_progress_and_are_told_which(
    local: Local, strategy: str, kind: str, rank: int
) -> None:
    path = local.new({})
    outcomes = local.run(save_job(path, strategy, kind, patience_s=1, **slow(rank, "write")), 2)
    for outcome in outcomes:
        assert outcome["error"].startswith("TimeoutError: ")
        assert f"rank {rank} has made no progress for 1 seconds" in outcome["error"]
    assert kind == "full" or all("last.ckpt" in outcome["error"] for outcome in outcomes)
    assert outcomes[1 - rank]["seconds"] < SLOW_S < outcomes[rank]["seconds"]


def test_a_rank_that_waits_for_others_in_the_background_is_not_taken_for_one_that_makes_no_progress(
    local: Local,
) -> None:
    job = {"task": "check", "strategy": "model_parallel", "kind": "sharded", "paths": [local.new({})], "value": VALUE}
    more = {"seconds": 0.1, "each": True, "patience_s": 1, "limit_s": 60, "async": True}
    outcomes = local.run({**job, **slow(0, "write"), **more}, 2)
    assert [outcome["places"][0]["saved"] for outcome in outcomes] == [[VALUE]] * 2


def test_a_rank_that_writes_slowly_is_not_taken_for_one_that_makes_no_progress(local: Local) -> None:
    more = {"seconds": 0.15, "each": True, "patience_s": 1, "limit_s": 60}
    outcomes = local.run(save_job(local.new({}), "model_parallel", "sharded", **{**slow(1, "write"), **more}), 2)
    assert [outcome["error"] for outcome in outcomes] == [None, None]
    assert outcomes[0]["seconds"] > 2
