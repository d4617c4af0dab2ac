"""FSDP's modules, in every mode, load sharded checkpoints of any origin: each value and setting as it was saved."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_5
from tests.strategies.flat_loads import ABSENT, MODES, WHY, WRITERS, Mode
from tests.strategies.forks import Forks

# before, FSDP's own functions are used
pytestmark = pytest.mark.skipif(not _TORCH_GREATER_EQUAL_2_5, reason="an older planner takes no shards but its own")
PLAIN = [Mode(), Mode(orig=False)]


class Checkpoints:
    """Checkpoints of all origins, written when the first is asked for, each by some number of ranks."""

    def __init__(self, forks: Forks, root: Path) -> None:
        self._forks = forks
        self._root = root
        self.of = cache(self._of)

    def _of(self, world: int) -> dict[str, str]:
        paths = {name: f"{self._root}/{world}/{name}" for name in WRITERS if world == 4 or name != "fsdp-hybrid"}
        self.run(world, does="write", paths=paths)
        return paths

    def run(self, world: int, **job: Any) -> list[dict[str, Any]]:
        """Returns what each rank has told, none of which has failed."""
        job = {"task": "flat_loads", "longest_s": 240, **job, "environments": [{}] * world}
        outcomes = self._forks.run(job)
        assert [outcome["error"] for outcome in outcomes] == [None] * world
        return outcomes

    def differences(self, world: int, paths: Sequence[str], ways: Sequence[Any]) -> list[dict[str, list[str]]]:
        """Returns for each rank what it found to be different from what was saved."""
        outcomes = self.run(world, does="load", paths=paths, ways=ways)
        assert all(outcome["count"] == len(paths) * len(ways) for outcome in outcomes)
        return [outcome["different"] for outcome in outcomes]


@pytest.fixture(scope="module")
def checkpoints(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(forks, tmp_path_factory.mktemp("flat"))


def _modes(world: int) -> list[tuple[Any, ...]]:
    return [("load", *mode) for mode in MODES if world == 4 or mode.strategy != "HYBRID_SHARD"]


def test_a_rank_reads_its_part_of_any_checkpoint_into_its_own_tensors(checkpoints: Checkpoints) -> None:
    paths = list(checkpoints.of(2).values())
    assert checkpoints.differences(3, paths, [("load", *mode) for mode in PLAIN]) == [{}] * 3


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_checkpoints_of_any_number_of_ranks_are_loaded_by_any_number(checkpoints: Checkpoints, world: int) -> None:
    paths = [path for other in (1, 2, 3, 4) for path in checkpoints.of(other).values()]
    assert checkpoints.differences(world, paths, [("load", *mode) for mode in PLAIN]) == [{}] * world


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "world"), [(3, 2), (4, 1), (2, 4)])
def test_modules_in_every_mode_are_loaded_without_gathering(checkpoints: Checkpoints, saved: int, world: int) -> None:
    assert checkpoints.differences(world, list(checkpoints.of(saved).values()), _modes(world)) == [{}] * world


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "world"), [(3, 2), (4, 3)])
def test_torch_alone_and_fsdp2_load_what_fsdp_has_saved(checkpoints: Checkpoints, saved: int, world: int) -> None:
    own = [path for name, path in checkpoints.of(saved).items() if name in ("fsdp", "fsdp-flat", "fsdp-hybrid")]
    ways = [*(("load_by_stock", *mode) for mode in PLAIN), ("load_by_fsdp2",)]
    assert checkpoints.differences(world, own, ways) == [{}] * world


@pytest.mark.parametrize(
    "reason", [pytest.param(why, marks=[] if why in ABSENT else [pytest.mark.slow]) for why in WHY]
)
def test_modules_that_need_whole_tensors_are_loaded_by_fsdp_itself_with_one_line_that_says_why(
    checkpoints: Checkpoints, reason: str
) -> None:
    paths = [path for name, path in checkpoints.of(3).items() if name in ("stock", "fsdp", "fsdp2")]
    assert checkpoints.differences(2, paths, [("load_by_fsdps_own", reason)]) == [{}] * 2


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("shape", "ValueError: The parameter 'units.0.norm.weight' has the shape [7, 2], and in the checkpoint [7]"),
        ("missing", "RuntimeError: Could not load the sharded checkpoint"),
        ("optimizer", "KeyError: \"The checkpoint has no optimizer 'other'"),
        ("parameter", "KeyError: \"The checkpoint's optimizer has no parameter 'one'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_before_anything_is_overwritten(
    checkpoints: Checkpoints, what: str, error: str, orig: bool
) -> None:
    for told in checkpoints.differences(2, [checkpoints.of(2)["fsdp"]], [("refuse", what, orig)]):
        ((message, unchanged),) = told.values()
        assert message.startswith(error)
        assert what != "missing" or "Missing key in checkpoint state_dict: model.units.0.more." in message
        assert unchanged == "True"


def test_what_is_missing_is_no_error_if_not_strict(checkpoints: Checkpoints) -> None:
    for told in checkpoints.differences(2, [checkpoints.of(2)["fsdp"]], [("refuse", "missing", True, False)]):
        assert list(told.values()) == [["True"]]


@pytest.mark.parametrize("orig", [True, False])
def test_floating_point_types_are_converted_with_one_warning_that_names_the_first(
    checkpoints: Checkpoints, orig: bool
) -> None:
    first, other = checkpoints.differences(2, [checkpoints.of(2)["fsdp"]], [("refuse", "type", orig)])
    ((warning, right),) = first.values()
    assert warning.startswith("The parameter 'units.0.linear.weight' is of torch.bfloat16, and in the checkpoint of")
    assert "it is converted, as 6 others" in warning
    assert [[right]] == list(other.values()) == [["True"]]
