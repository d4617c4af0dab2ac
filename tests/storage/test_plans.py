"""What the ranks of a sharded save agree upon, and what they need not say again."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning.fabric.storage import plans
from lightning.fabric.storage.meeting import Meeting
from lightning.fabric.storage.plans import Plans, join_plans


class Table:
    """Where threads meet as ranks do."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.said: list[Any] = [None] * world
        self.answers: list[Any] = []
        self.barrier = threading.Barrier(world, timeout=20)


class Seat(Meeting):
    def __init__(self, table: Table, rank: int) -> None:
        super().__init__()
        self._table, self.rank, self.world_size = table, rank, table.world

    def _gather(self, said: Any) -> list[Any]:
        self._table.said[self.rank] = said
        self._table.barrier.wait()
        return list(self._table.said) if self.is_coordinator else []

    def _scatter(self, answers: list[Any]) -> Any:
        if self.is_coordinator:
            self._table.answers = answers
        self._table.barrier.wait()
        return self._table.answers[self.rank]


def together(world: int, act: Callable[[Meeting], Any]) -> list[Any]:
    """What each rank's thread returns, or raises."""

    def caught(meeting: Meeting) -> Any:
        try:
            return act(meeting)
        except BaseException as error:
            return error

    table = Table(world)
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(caught, [Seat(table, rank) for rank in range(world)]))


def item(name: str, at: int, size: int, of: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([at]), torch.Size([size]))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([of]))
    kind = WriteItemType.TENSOR if size == of else WriteItemType.SHARD
    return WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data)


def plan_of(rank: int, size: int = 4) -> SavePlan:
    return SavePlan([item("w", rank * size, size, 2 * size), item("step", 0, 1, 1)], planner_data={})


def test_what_has_not_changed_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    joins = []
    monkeypatch.setattr(plans, "join_plans", lambda all_plans: joins.append(1) or join_plans(all_plans))
    known = [Plans(), Plans()]
    before = together(2, lambda meeting: known[meeting.rank].agree(lambda: plan_of(meeting.rank), meeting))
    again = together(2, lambda meeting: known[meeting.rank].agree(lambda: plan_of(meeting.rank), meeting))
    assert (again, len(joins)) == (before, 1)
    assert again[0][1] is not before[0][1]  # for the commit adds to it
    larger = together(2, lambda meeting: known[meeting.rank].agree(lambda: plan_of(meeting.rank, 8), meeting))
    assert len(joins) == 2
    assert larger[0][1].state_dict_metadata["w"].size == torch.Size([16])


def test_ranks_that_know_different_plans_agree_anew() -> None:
    known = [Plans(), Plans()]
    before = together(2, lambda meeting: known[meeting.rank].agree(lambda: plan_of(meeting.rank), meeting))
    known[1] = Plans()  # as after a failure there
    assert together(2, lambda meeting: known[meeting.rank].agree(lambda: plan_of(meeting.rank), meeting)) == before


def test_what_several_ranks_have_is_written_by_the_one_with_the_least_to_write() -> None:
    heavy = SavePlan([item("large", 0, 100, 100), item("step", 0, 1, 1)], planner_data={})
    light = SavePlan([item("step", 0, 1, 1)], planner_data={"step": ("step",)})
    joined, metadata = join_plans([heavy, light])
    assert [[one.index.fqn for one in plan.items] for plan in joined] == [["large"], ["step"]]
    assert set(metadata.state_dict_metadata) == {"large", "step"}
    assert metadata.planner_data == {"step": ("step",)}


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([item("w", 0, 3, 8), item("w", 4, 4, 8)], r"'w' of shape \(8,\) in parts: they have 7 values and not 8"),
        ([item("w", 0, 4, 8), item("w", 6, 4, 8)], r"'w' .* one at \(6,\) of shape \(4,\) is not within it"),
    ],
)
def test_parts_that_do_not_make_up_a_tensor_are_refused(items: list[WriteItem], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        join_plans([SavePlan([one], planner_data={}) for one in items])


def test_a_rank_that_fails_fails_all_of_them_and_knows_its_own_reason() -> None:
    errors: dict[int, BaseException | None] = {}

    def fail(meeting: Meeting) -> None:
        def say() -> None:
            if meeting.rank == 1:
                raise PermissionError("no access")

        try:
            meeting.hold("save", say, lambda said: said)
        finally:
            errors[meeting.rank] = meeting.error

    raised = together(2, fail)
    assert all(isinstance(error, CheckpointException) for error in raised)
    assert [sorted(error.failures) for error in raised] == [[1], [1]]
    assert errors[0] is None
    assert isinstance(errors[1], PermissionError)


def test_rank_zero_that_cannot_decide_fails_all_ranks() -> None:
    def decide(said: list[int]) -> list[int]:
        raise ValueError("no way")

    raised = together(3, lambda meeting: meeting.hold("save", lambda: 1, decide))
    assert [str(error.failures[0][0]) for error in raised] == ["no way"] * 3
