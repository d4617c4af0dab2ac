"""Ranks that are killed while they save. They leave the complete old checkpoint or the complete new one."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from tests.strategies.forks import Job, Outcome, numbered
from tests.strategies.places import S3, Local, Point, without_draws

OLD, NEW, NEXT = 1.0, 2.0, 3.0
#: Acts that decide, before and after which a rank is always killed.
DECISIVE = re.compile(r"\.metadata|meta\.pt|rename|exchange|remove|rmdir|DELETE")
JOBS_AT_A_TIME = 3
#: How many others are tried at least.
FEW = 4


#: What was there before, what is saved with which strategy, whether in the background, and at how many points at least
#: each rank is killed.
CASES = {
    "first": (None, "sharded", "model_parallel", False, 20),
    "overwrite": ("sharded", "sharded", "fsdp", False, 20),
    "overwrite_in_the_background": ("sharded", "sharded", "model_parallel", True, 20),
    "full_to_sharded": ("full", "sharded", "model_parallel", False, 10),
    "sharded_to_full": ("sharded", "full", "fsdp", False, 10),
    "sharded_to_full_in_the_background": ("sharded", "full", "fsdp", True, 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind_of_place", ["local", "s3"])
def test_a_killed_rank_leaves_the_old_checkpoint_or_the_new_one(
    kind_of_place: str, case: str, request: pytest.FixtureRequest
) -> None:
    place: Local = request.getfixturevalue(kind_of_place)
    before, kind, strategy, is_async, least = CASES[case]
    job = {"task": "save", "kind": kind, "strategy": strategy, "value": NEW, "async": is_async}
    base = place.keep(before and saved(place, before))
    path = place.new(base)
    outcomes, acts = place.acts({**job, "path": path})
    assert [outcome["error"] for outcome in outcomes] == [None, None]
    if isinstance(place, S3):
        assert all(outcome["native"] for outcome, done in zip(outcomes, acts, strict=True) if done)

    points = [point for victim in (0, 1) for point in chosen(place.points(victim, acts), least)]
    with ThreadPoolExecutor(JOBS_AT_A_TIME) as threads:
        killed = list(threads.map(lambda point: try_point(place, base, job, point), points))
        shares = [killed[number::JOBS_AT_A_TIME] for number in range(JOBS_AT_A_TIME)]
        shares[0].append(Killed(None, place.new({}), [], []))
        checked = list(threads.map(lambda share: check(place, share, kind), shares))
    (clean,) = (one for one in checked[0] if one.killed.point is None)
    assert (clean.found, clean.saved) == ("nothing", [NEXT])

    allowed = {OLD, NEW} if before else {"nothing", NEW}
    tried = [one for share in checked for one in share if one is not clean]
    assert [told for one in tried for told in one.problems(allowed, clean, kind)] == []
    assert {one.found for one in tried} == allowed  # so that the points are around the one that decides
    assert min(sum(point.victim == victim for point in points) for victim in (0, 1)) >= least


def saved(place: Local, kind: str) -> str:
    """Where there is a checkpoint of the old state."""
    path = place.new({})
    job = {"task": "save", "path": path, "kind": kind, "strategy": "model_parallel", "value": OLD}
    assert [outcome["error"] for outcome in place.run(job, 2)] == [None, None]
    return path


@dataclass
class Killed:
    """What a save left in which a rank was killed."""

    point: Point | None
    path: str
    outcomes: list[Outcome]
    left: list[str]


def try_point(place: Local, base: Any, job: Job, point: Point) -> Killed:
    path = place.new(base)
    outcomes = place.kill({**job, "path": path}, point)
    return Killed(point, path, outcomes, place.names(path))


@dataclass
class Checked:
    """What another process found there, and what it saved."""

    killed: Killed
    found: Any
    error: str | None
    saved: Any
    names: list[str]

    def problems(self, allowed: set[Any], clean: "Checked", kind: str) -> list[str]:
        point = self.killed.point
        wrong = []
        if self.killed.outcomes[point.victim]["signal"] != signal.SIGKILL:
            wrong.append("the rank was not killed")
        other = self.killed.outcomes[1 - point.victim]
        has_raised = other["signal"] is None and other["error"] is not None
        if kind == "sharded" and has_raised and "last.ckpt" not in other["error"]:
            wrong.append(f"the other rank does not tell what it is about: {other['error']}")
        if self.found not in allowed:
            wrong.append(f"found {self.found} ({self.error}), and there was {self.killed.left}")
        if self.saved != [NEXT]:
            wrong.append(f"the next save: {self.saved}")
        if stale := sorted({*map(without_draws, self.names)} - {*map(without_draws, clean.names)}):
            wrong.append(f"after the next save there is still {stale}")
        return [f"{point}: {told}" for told in wrong]


def check(place: Local, killed: list[Killed], kind: str) -> list[Checked]:
    """Loads in a fresh process of another world size, and saves anew."""
    job = {"task": "check", "kind": kind, "strategy": "model_parallel", "value": NEXT}
    (outcome,) = place.run({**job, "paths": [one.path for one in killed]}, 1)
    return [
        Checked(one, found(told), told["error"], told["saved"], place.names(one.path))
        for one, told in zip(killed, outcome["places"], strict=True)
    ]


def found(told: dict[str, Any]) -> Any:
    if told["error"] is not None:
        is_refused = re.match(r"(FileNotFoundError|ValueError): .*\w\.ckpt", told["error"])
        return "nothing" if is_refused else "an error"
    return told["found"][0] if len(told["found"]) == 1 else f"a mix of {told['found']}"


@pytest.mark.slow
@pytest.mark.parametrize("kind_of_place", ["local", "s3"])
def test_a_run_that_saves_in_the_background_has_a_complete_checkpoint_whenever_a_rank_is_killed(
    kind_of_place: str, request: pytest.FixtureRequest
) -> None:
    place: Local = request.getfixturevalue(kind_of_place)
    values = [1.0, 2.0, 3.0]
    job = {"task": "save_many", "kind": "sharded", "strategy": "model_parallel", "values": values, "async": True}
    first = place.new({})
    save = {"task": "save", "kind": "sharded", "strategy": "model_parallel", "value": values[0]}
    assert [outcome["error"] for outcome in place.run({**save, "path": numbered(first, values[0])}, 2)] == [None, None]
    base = place.keep(first)
    outcomes, acts = place.acts({**job, "path": place.new(base)})
    assert [outcome["error"] for outcome in outcomes] == [None, None]

    points = [point for victim in (0, 1) for point in chosen(place.points(victim, acts), 20)]
    with ThreadPoolExecutor(JOBS_AT_A_TIME) as threads:
        killed = list(threads.map(lambda point: try_point(place, base, job, point), points))
        shares = [killed[number::JOBS_AT_A_TIME] for number in range(JOBS_AT_A_TIME)]
        kept = [
            one for share in threads.map(lambda share: found_by_value(place, share, values), shares) for one in share
        ]
    wrong = {value: found for one in kept for value, found in one.items() if found not in ("nothing", value)}
    assert wrong == {}
    assert all(set(one.values()) - {"nothing"} for one in kept)
    assert {value for one in kept for value in one.values()} == {"nothing", *values}


def found_by_value(place: Local, killed: list[Killed], values: list[float]) -> list[dict[float, Any]]:
    """What is found where each value was saved, in a fresh process."""
    job = {"task": "check", "kind": "sharded", "strategy": "model_parallel"}
    paths = [numbered(one.path, value) for one in killed for value in values]
    (outcome,) = place.run({**job, "paths": paths}, 1)
    told = [found(one) for one in outcome["places"]]
    return [dict(zip(values, told[at : at + len(values)], strict=True)) for at in range(0, len(told), len(values))]


def chosen(points: list[Point], least: int) -> list[Point]:
    """All that decide, and others spread over all there are: a few, or as many as make it ``least``."""
    kept = {point for point in points if DECISIVE.search(point.act)}
    wanted = max(least, len(kept) + FEW)
    for tell_little in (False, True):
        others = [point for point in points if point not in kept and (point.act == "write") == tell_little]
        count = min(len(others), max(wanted - len(kept), 0))
        kept |= {others[number * len(others) // count] for number in range(count)}
    return [point for point in points if point in kept]
