"""The model of saves at scale: cases whose answer is known, and what must hold whatever the numbers are."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCALE = Path(__file__).parents[2] / "benchmarks" / "scale"
MIB = 1 << 20
MB = 10**6


@pytest.fixture(scope="module")
def model() -> ModuleType:
    """The scripts import each other by name, as they do when they are run."""
    sys.path.insert(0, str(SCALE))
    try:
        import model
    finally:
        sys.path.remove(str(SCALE))
    return model


def test_one_part_takes_its_transfer_and_the_latencies(model: ModuleType) -> None:
    store = model.Store(latency=0.5, connection=8 * MIB)
    outcome = model.simulate(16 * MIB, model.Cluster(ranks=1), store, model.Release())
    assert outcome.durable == outcome.stall == pytest.approx(2 + 0.5 + 0.5)  # the part, and then the metadata
    assert (outcome.writes, outcome.retries, outcome.bytes) == (2, 0, 16 * MIB)


def test_parts_one_at_a_time_take_as_long_as_one_after_the_other(model: ModuleType) -> None:
    release = model.Release(part=16 * MIB, in_flight=1, overlaps=False, prepare=1 / (16 * MIB), fixed=3)
    store = model.Store(latency=0.25, connection=8 * MIB)
    outcome = model.simulate(64 * MIB, model.Cluster(ranks=1), store, release)
    assert outcome.durable == pytest.approx(3 + 4 * (1 + 2 + 0.25) + 3 * 0.25)  # begin, complete, and the metadata


def test_ranks_of_a_node_share_its_network(model: ModuleType) -> None:
    cluster = model.Cluster(nodes=3, ranks=4, network=100 * MB)
    outcome = model.simulate(3 * 1000 * MB, cluster, model.Store(), model.Release())
    assert outcome.durable == pytest.approx(10, rel=1e-3)


def test_a_connection_is_no_faster_than_its_limit(model: ModuleType) -> None:
    cluster, store = model.Cluster(ranks=2, network=1000 * MB), model.Store(connection=10 * MB)
    outcome = model.simulate(2 * 128 * MIB, cluster, store, model.Release(in_flight=4))
    assert outcome.durable == pytest.approx(2 * 16 * MIB / (10 * MB), rel=1e-3)  # eight parts of 16 MiB, four at a time


def test_an_asynchronous_save_stalls_for_the_plan_and_the_copy(model: ModuleType) -> None:
    cluster = model.Cluster(nodes=2, ranks=8, network=100 * MB, copy=1000 * MB)
    release = model.Release(asynchronous=True, copies=True, pinned=True)
    planning = model.Planning(local=0.5, global_plan=7, commit=4)
    outcome = model.simulate(16 * 500 * MB, cluster, model.Store(), release, planning)
    assert outcome.stall == pytest.approx(0.5 + 0.5)
    assert outcome.durable == pytest.approx(1 + 7 + 40 + 4, rel=1e-3)
    synchronous = model.simulate(16 * 500 * MB, cluster, model.Store(), replace(release, asynchronous=False), planning)
    assert synchronous.stall == synchronous.durable == outcome.durable


def test_stragglers_delay_durability_and_not_the_stall(model: ModuleType) -> None:
    release = model.Release(asynchronous=True, copies=True, pinned=True)
    even = model.Cluster(nodes=10, ranks=2, network=100 * MB, copy=1000 * MB)
    uneven = replace(even, straggling=0.1, slowness=4)
    one, other = (model.simulate(10_000 * MB, cluster, model.Store(), release) for cluster in (even, uneven))
    assert other.stall == one.stall
    assert other.durable - other.stall == pytest.approx(4 * (one.durable - one.stall), rel=1e-3)


def test_a_store_takes_no_more_writes_than_it_allows_and_all_are_sent_again(model: ModuleType) -> None:
    cluster, store = model.Cluster(nodes=8, ranks=8), model.Store(latency=0.01, writes=100)
    outcome = model.simulate(64 * 160 * MIB, cluster, store, model.Release())
    assert outcome.writes == 64 * (10 + 2) + 1
    assert outcome.retries > 0
    assert outcome.durable >= outcome.writes / 100 - 1  # one second's worth can be saved up


def test_a_store_that_refuses_for_too_long_fails_the_save(model: ModuleType) -> None:
    with pytest.raises(model.SaveFailed, match="more than 5 s"):
        model.simulate(64 * MIB, model.Cluster(ranks=8), model.Store(writes=0.5, patience=5), model.Release())


def test_the_same_seed_gives_the_same_outcome(model: ModuleType) -> None:
    cluster, store = model.Cluster(nodes=4, straggling=0.25, slowness=3), model.Store(writes=50)
    outcomes = [model.simulate(32 * 64 * MIB, cluster, store, model.Release(), seed=seed) for seed in (1, 1, 2)]
    assert outcomes[0] == outcomes[1] != outcomes[2]


def test_nodes_that_stand_for_others_change_little(model: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, store = model.Cluster(nodes=32, network=1000 * MB), model.Store(latency=0.05, writes=400)
    whole = model.simulate(32 * 8 * 160 * MIB, cluster, store, model.Release())
    monkeypatch.setattr(model, "PLAYED", 8)
    part = model.simulate(32 * 8 * 160 * MIB, cluster, store, model.Release())
    assert part.durable == pytest.approx(whole.durable, rel=0.1)
    assert part.writes == pytest.approx(whole.writes, rel=0.001)
    assert part.bytes == pytest.approx(whole.bytes)


@pytest.mark.slow
def test_planning_is_measured(tmp_path: Path) -> None:
    results = tmp_path / "planning.json"
    command = [sys.executable, str(SCALE / "planning.py"), str(results), "--ranks", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    planning = json.loads(results.read_text())["planning"]
    (one,), (flat,) = planning["fsdp2"], planning["fsdp1"]
    for step in ("every rank: plan", "join", "commit", "again: compare", "torch: join", "torch: commit"):
        assert one["steps"][step]["cpu_s"] > 0
    assert "again: join" not in one["steps"]  # the plans are known
    assert one["bytes"]["compare: said"] < one["bytes"]["join: said"] / 1000  # a digest
    assert one["bytes"]["metadata"] > 291 * 3 * 4 * 8 + 4 * 490 * 10**9 / 2**20  # the places, and the checksums
    for step in ("every rank: plan", "join", "commit", "again: compare"):
        assert flat["steps"][step]["cpu_s"] > 0
    assert flat["bytes"]["metadata"] < 1.1 * one["bytes"]["metadata"]
    assert done.stdout.count("| join | ") == 2
