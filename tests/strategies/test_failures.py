"""Saves of shards that fail on one rank, that are interrupted, and that others read meanwhile."""

import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.servers import Fault
from tests.strategies.forks import Outcome, kill
from tests.strategies.places import S3, Local, without_draws

OLD, NEW, NEXT = 1.0, 2.0, 3.0
#: How soon, in seconds, every rank has to know; a held-up request takes a minute.
SOON = 10.0


def save_job(path: str, value: float, strategy: str = "model_parallel", **more: Any) -> dict[str, Any]:
    job = {"task": "save", "kind": "sharded", "strategy": strategy, "path": path, "value": value, "grace_s": 20}
    return {**job, **more}


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest) -> Local:
    return request.getfixturevalue(request.param)


def saved(place: Local) -> str:
    path = place.new({})
    assert [outcome["error"] for outcome in place.run(save_job(path, OLD), 2)] == [None, None]
    return path


def assert_failed_alike(outcomes: list[Outcome], pattern: str) -> None:
    first, second = outcomes
    assert re.search(pattern, first["error"]), first["error"]
    assert first["error"] == second["error"]
    assert max(first["seconds"], second["seconds"]) < SOON


def assert_old_is_whole(place: Local, path: str) -> None:
    """And that the next save works, and leaves nothing but itself."""
    clean = place.new({})
    job = {"task": "check", "kind": "sharded", "strategy": "model_parallel", "paths": [path, clean], "value": NEXT}
    told = place.run(job, 1)[0]["places"]
    assert (told[0]["error"], told[0]["found"]) == (None, [OLD])
    assert [one["saved"] for one in told] == [[NEXT], [NEXT]]
    assert [without_draws(name) for name in place.names(path)] == [without_draws(name) for name in place.names(clean)]


@pytest.mark.parametrize(("kind", "more"), [("sharded", {}), ("sharded", {"async": True}), ("full", {})])
def test_a_save_that_succeeds_is_logged_once_with_the_bytes_of_all_ranks(
    local: Local, kind: str, more: dict[str, bool]
) -> None:
    path = local.new({})
    outcomes = local.run(save_job(path, NEW, kind=kind, **more), 2)
    size = sum(len(content) for content in local.keep(path).values()) / 2**20
    first, second = (outcome["lines"] for outcome in outcomes)
    assert second == []
    (line,) = first
    assert line.startswith(f"Saved {path}: {size:.1f} MiB, training stalled for ")
    assert float(f"{size:.1f}") > 0
    assert ("in the background" in line) == ("async" in more)


class Holding:
    """Holds up requests of a rank until it is told to go on, or a minute has passed."""

    def __init__(self, rank: int, pattern: str) -> None:
        self._rank = rank
        self._pattern = re.compile(pattern)
        self._goes_on = threading.Event()
        self.holds = threading.Event()

    def __call__(self, rank: int, method: str, path: str) -> Fault | None:
        if rank == self._rank and self._pattern.search(f"{method} {path}"):
            self.holds.set()
            self._goes_on.wait(60)
            return Fault.RESET
        return None

    def __enter__(self) -> "Holding":
        return self

    def __exit__(self, *_: object) -> None:
        self._goes_on.set()


#: Where the upload of a rank is held up: in one of many parts, and when its shard, or the loop state, has been sent.
HELD = {"a part": ("partNumber=[2-9]", 2**12), "the end": ("POST .*uploadId=", 2**16), "meta": ("_meta.distcp", 2**16)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "held", "is_async"),
    [
        ("fsdp", "a part", False),
        ("model_parallel", "the end", False),
        ("fsdp", "meta", False),
        ("fsdp", "the end", True),
    ],
)
def test_a_refused_shard_fails_the_save_on_every_rank_though_another_one_uploads_for_minutes(
    s3: S3, strategy: str, held: str, is_async: bool
) -> None:
    path = saved(s3)
    pattern, part_size = HELD[held]
    with Holding(0, pattern) as holding:

        def follow(rank: int, method: str, path: str) -> Any:
            if rank == 1 and method in ("PUT", "POST"):
                holding.holds.wait(60)
                return 403
            return holding(rank, method, path)

        more = {"part_size": part_size, "async": is_async}
        outcomes = s3.run_followed(save_job(path, NEW, strategy, **more), follow)
        assert holding.holds.is_set()
        assert_failed_alike(outcomes, r"PermissionError: Could not save the sharded checkpoint .*rank 1: Permission")
    assert_old_is_whole(s3, path)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_under_one_rank_fails_the_save_on_every_rank(local: Local, rank: int) -> None:
    path = saved(local)
    before = local.names(path)
    outcomes = local.run(save_job(path, NEW, full_disk=rank), 2)
    assert_failed_alike(outcomes, f"OSError: Could not save the sharded checkpoint .*rank {rank}: .*File too large")
    assert local.names(path) == before  # what the other rank has written would keep the disk full
    assert_old_is_whole(local, path)


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_a_save_that_fails_at_a_new_path_leaves_nothing_of_any_rank(local: Local, is_async: bool) -> None:
    path = local.new({})
    outcomes = local.run(save_job(path, NEW, full_disk=1, **{"async": is_async}), 2)
    assert_failed_alike(outcomes, "OSError: Could not save the sharded checkpoint .*rank 1: .*File too large")
    assert local.names(path) == []


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "is_async"), [("fsdp", False), ("model_parallel", False), ("fsdp", True)])
def test_loop_state_that_cannot_be_pickled_fails_the_save_on_every_rank(
    place: Local, strategy: str, is_async: bool
) -> None:
    path = saved(place)
    before = place.names(path)
    outcomes = place.run(save_job(path, NEW, strategy, unpicklable=True, **{"async": is_async}), 2)
    assert_failed_alike(outcomes, "Could not save the sharded checkpoint .*rank 0: .*pickle")
    assert place.names(path) == before
    assert_old_is_whole(place, path)


@pytest.mark.slow
@pytest.mark.parametrize("held", HELD)
def test_ctrl_c_in_the_middle_of_an_upload_takes_the_save_back(s3: S3, held: str) -> None:
    path = saved(s3)
    pattern, part_size = HELD[held]
    with Holding(0, pattern) as holding:
        ranks: list[int] = []

        def interrupt() -> None:
            assert holding.holds.wait(60)
            for pid in ranks:
                kill(pid, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        outcomes = s3.run_followed(save_job(path, NEW, part_size=part_size), holding, ranks.extend)
        thread.join()
    for outcome in outcomes:
        assert outcome["error"].startswith("KeyboardInterrupt"), outcome
        assert outcome["seconds"] < SOON
    assert_old_is_whole(s3, path)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["write", "fsync", "rename .*_meta.distcp", "rename .*.metadata"])
def test_ctrl_c_in_the_middle_of_a_local_save_takes_it_back(local: Local, act: str) -> None:
    path = saved(local)
    _, acts = local.acts(save_job(local.new(local.keep(path)), NEW))
    number = next(number for number, done in enumerate(acts[0], 1) if re.match(act, done))
    stop = {"victims": [1, 0], "signal": signal.SIGINT, "actor": 0, "event": number}
    outcomes = local.run(save_job(path, NEW, stop=stop), 2)
    assert [outcome["error"] for outcome in outcomes] == ["KeyboardInterrupt: "] * 2
    assert_old_is_whole(local, path)


@pytest.mark.slow
def test_who_loads_during_an_overwrite_gets_one_save_or_is_told_to_load_again(place: Local) -> None:
    base = place.keep(saved(place))
    job = {"task": "load", "kind": "sharded", "strategy": "model_parallel"}
    path = place.new(base)
    (told,), (acts,) = place.acts({**job, "path": path}, world=1)
    assert told["found"] == [OLD]

    def load_while_others_save(number: int) -> str | None:
        path = place.new(base)
        told = place.load({**job, "path": path}, number, save_job(path, NEW))
        is_fine = told["found"] in ([OLD], [NEW]) or re.match(r"\w+Error: .*[Ll]oad it again", told["error"] or "")
        return None if is_fine else f"replaced before {acts[number - 1]}: {told['found']}, {told['error']}"

    with ThreadPoolExecutor(3) as threads:
        assert [told for told in threads.map(load_while_others_save, range(1, len(acts) + 1)) if told] == []


@pytest.mark.parametrize(("kind", "strategy"), [("sharded", "fsdp"), ("full", "fsdp"), ("sharded", "model_parallel")])
def test_a_load_waits_for_what_is_being_saved(local: Local, kind: str, strategy: str) -> None:
    paths = [local.new({})]
    job = {"task": "check", "kind": kind, "strategy": strategy, "paths": paths, "value": NEW, "async": True}
    outcomes = local.run(job, 2)
    assert [outcome["places"][0]["saved"] for outcome in outcomes] == [[NEW]] * 2
