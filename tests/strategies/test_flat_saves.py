"""Saves of FSDP modules from their flat shards, beside those that FSDP's own functions make of the same state."""

from pathlib import Path
from typing import Any

import pytest

from tests.strategies.flat_saves import HYBRID_MODES, MODES
from tests.strategies.forks import Forks


def found_by_ranks(forks: Forks, folder: Path, world: int, **job: Any) -> list[Any]:
    outcomes = forks.run(
        {"task": "flat saves", "folder": str(folder), "environments": [{}] * world, "longest_s": 150.0, **job}
    )
    assert [outcome["error"] for outcome in outcomes] == [None] * world
    return [outcome["found"] for outcome in outcomes]


def test_what_torch_alone_loads_is_bit_for_bit_what_fsdp_would_have_saved(forks: Forks, tmp_path: Path) -> None:
    for found in found_by_ranks(forks, tmp_path, 3, modes=list(MODES)):
        assert found == {name: [] for name in MODES}


def test_replicas_are_written_once(forks: Forks, tmp_path: Path) -> None:
    for found in found_by_ranks(forks, tmp_path, 4, modes=list(HYBRID_MODES)):
        assert found == {name: [] for name in HYBRID_MODES}


def test_of_what_several_ranks_have_only_the_one_that_writes_it_makes_a_copy(forks: Forks, tmp_path: Path) -> None:
    ranks = found_by_ranks(forks, tmp_path, 4, replicas=True)
    for name in HYBRID_MODES:
        found = [rank[name] for rank in ranks]
        assert found[0]["differs"] == []
        for number in range(3):
            assert 0 < sum(rank["copied"][number] for rank in found) <= found[0]["whole"]
        assert "bad.1" in found[1]["error"]
        for rank in (found[0], *found[2:]):
            assert "rank 1: ValueError" in rank["error"]


@pytest.fixture(scope="module")
def fallbacks(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return found_by_ranks(forks, tmp_path_factory.mktemp("fallbacks"), 2, fallbacks=True)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("no attribute", "object has no attribute '_strides'"),
        ("hook", "blocks.1 has a state-dict hook that may need it, hooked.<locals>.<lambda>"),
        ("computes", "NeedsWholeTensor: 'sum' needs the whole tensor"),
        ("subclass", "Hidden is a class of its own"),
        ("older torch", "before PyTorch 2.5 a planner takes no shards but its own"),
    ],
)
def test_fsdp_saves_what_is_not_described_and_one_line_says_why(fallbacks: list[Any], case: str, reason: str) -> None:
    first, other = (found[case] for found in fallbacks)
    assert (first["differs"], other["lines"]) == ([], [])
    (line,) = first["lines"]
    assert line.startswith("INFO FSDP gathers and copies the state of ")
    assert reason in line


@pytest.fixture(scope="module")
def others(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return found_by_ranks(forks, tmp_path_factory.mktemp("others"), 2)


def test_a_module_that_leaves_out_and_renames_entries_is_described(others: list[Any]) -> None:
    expected = ["frozen._extra_state", "frozen.bias", "frozen.weight", "last.weight", "output"]
    assert [found["filtered"] for found in others] == [expected] * 2


def test_parameters_that_were_given_other_memory_are_saved_with_it(others: list[Any]) -> None:
    assert [found["replaced"] for found in others] == [[], []]


def test_a_state_of_an_optimizer_that_is_not_flat_fails_the_save_on_every_rank(others: list[Any]) -> None:
    for found in others:
        assert "the states of an optimizer have the shape of their parameters" in found["odd"]


def test_a_rank_that_has_nothing_of_a_parameter_does_not_say_how_often_it_was_stepped(others: list[Any]) -> None:
    assert others[0]["steps"] == [2.0]


def test_parameters_that_are_gathered_to_be_changed_are_saved_as_they_are_then(others: list[Any]) -> None:
    assert [found["gathered"] for found in others] == [[3.0], [3.0]]


def test_a_hook_that_changes_what_is_saved_does_so_as_with_fsdp2(forks: Forks, tmp_path: Path) -> None:
    first, _ = found_by_ranks(forks, tmp_path, 2, hooks=True)
    assert first["differs"] == []
    kept = ["net.0.0.bias", "net.0.0.weight", "net.1.0.bias", "net.2.bias"]
    assert first["names"] == ["added", "copied", "halved", *kept, "renamed", "shapes"]
