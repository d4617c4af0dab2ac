"""What the ranks of a sharded save agree upon, and what they need not say again."""

import pickle
import pickletools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, Metadata, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning.fabric.storage.collectives.rank_group import RankGroup
from lightning.fabric.storage.sharded import save_planner
from lightning.fabric.storage.sharded.checksums import FileRecords, Record
from lightning.fabric.storage.sharded.global_plan import PackedPlan, join_plans
from lightning.fabric.storage.sharded.save_planner import PlanCache
from tests.storage.sharded.thread_ranks import run_ranks


def item(name: str, at: int, size: int, of: int, kind: WriteItemType | None = None) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([at]), torch.Size([size]))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([of]))
    kind = kind or (WriteItemType.TENSOR if size == of else WriteItemType.SHARD)
    return WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data)


def plan_of(rank: int, size: int = 4) -> SavePlan:
    return SavePlan([item("w", rank * size, size, 2 * size), item("step", 0, 1, 1)], planner_data={})


def test_what_has_not_changed_is_not_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    joins = []
    monkeypatch.setattr(save_planner, "join_plans", lambda packed: joins.append(1) or join_plans(packed))
    known = [PlanCache(), PlanCache()]
    before = run_ranks(2, lambda group: known[group.rank].agree(lambda: plan_of(group.rank), group))
    again = run_ranks(2, lambda group: known[group.rank].agree(lambda: plan_of(group.rank), group))
    assert (again, len(joins)) == (before, 1)
    assert [[one.index.fqn for one in plan.items] for plan, _ in again] == [["w", "step"], ["w"]]
    larger = run_ranks(2, lambda group: known[group.rank].agree(lambda: plan_of(group.rank, 8), group))
    assert len(joins) == 2
    assert described(larger[0][1]).state_dict_metadata["w"].size == torch.Size([16])


def test_ranks_that_know_different_plans_agree_anew() -> None:
    known = [PlanCache(), PlanCache()]
    before = run_ranks(2, lambda group: known[group.rank].agree(lambda: plan_of(group.rank), group))
    known[1] = PlanCache()  # as after a failure there
    again = run_ranks(2, lambda group: known[group.rank].agree(lambda: plan_of(group.rank), group))
    assert [plan for plan, _ in again] == [plan for plan, _ in before]
    assert described(again[0][1]) == described(before[0][1])


def joined(*of_ranks: SavePlan) -> tuple[list[list[str]], Metadata]:
    """What each rank writes, by name, and the metadata."""
    answers, global_plan = join_plans([PackedPlan.of(plan) for plan in of_ranks])
    written = [
        [item.index.fqn for item, is_written in zip(plan.items, answer, strict=True) if is_written]
        for plan, answer in zip(of_ranks, answers, strict=True)
    ]
    return written, described(global_plan, [len(names) for names in written])


def described(global_plan: Any, counts: Sequence[int] = (2, 1)) -> Metadata:
    """What is read of the metadata, if the records of each rank are of 10 bytes."""
    places = [np.array([[10 * number, 10] for number in range(count)]).reshape(-1, 2) for count in counts]
    metadata = global_plan.metadata([f"file {rank}" for rank in range(len(counts))], places)
    read: Metadata = pickle.loads(pickle.dumps(metadata))
    return read


def test_what_several_ranks_have_of_a_distributed_tensor_is_written_by_the_one_with_the_least_to_write() -> None:
    shared = item("w", 0, 1, 1, WriteItemType.SHARD)
    heavy = SavePlan([item("large", 0, 100, 100), shared], planner_data={})
    light = SavePlan([shared], planner_data={"w": ("w",)})
    written, metadata = joined(heavy, light)
    assert written == [["large"], ["w"]]
    assert set(metadata.state_dict_metadata) == {"large", "w"}
    assert metadata.planner_data == {"w": ("w",)}


def test_other_tensors_and_objects_are_all_written_by_the_lowest_rank_that_has_them() -> None:
    note = WriteItem(MetadataIndex("note"), WriteItemType.BYTE_IO)
    own = [item("mean", 0, 3, 3), item("variance", 0, 3, 3), note]
    first = SavePlan([item("large", 0, 100, 100)], planner_data={})
    written, _ = joined(first, SavePlan(own, planner_data={}), SavePlan(own, planner_data={}))
    assert written == [["large"], ["mean", "variance", "note"], []]


def test_the_metadata_are_those_that_torch_would_make() -> None:
    matrix = torch.Size([4, 6])

    def part(rank: int) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size([0, 3 * rank]), torch.Size([4, 3]))
        data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), matrix)
        return WriteItem(MetadataIndex("m", chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    scalar = ChunkStorageMetadata(torch.Size(), torch.Size())
    number = TensorWriteData(scalar, TensorProperties(torch.float64), torch.Size())
    plans_of_ranks = [
        SavePlan([part(1), WriteItem(MetadataIndex("n", torch.Size()), WriteItemType.TENSOR, tensor_data=number)]),
        SavePlan([WriteItem(MetadataIndex("object"), WriteItemType.BYTE_IO), part(0), item("long", 0, 2**40, 2**40)]),
    ]
    expected_plans, expected = create_default_global_save_plan(plans_of_ranks)
    _, metadata = joined(*plans_of_ranks)
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.storage_data == {
        one.index: _StorageInfo(f"file {rank}", 10 * place, 10)
        for rank, plan in enumerate(expected_plans)
        for place, one in enumerate(plan.items)
    }
    hints = {index: index.index for index in metadata.storage_data}
    assert hints == {one.index: one.index.index for plan in expected_plans for one in plan.items}
    assert {type(index.offset) for index in metadata.storage_data} == {torch.Size, type(None)}


def objects_in(pickled: bytes) -> int:
    """About how many objects are made when it is read, without those that functions in it make."""
    return sum(1 for _ in pickletools.genops(pickled))


def test_what_rank_zero_unpickles_and_pickles_does_not_grow_by_an_object_for_each_item() -> None:
    def pickled(world: int, tensors: int) -> list[int]:
        plans_of_ranks = [
            SavePlan([item(f"w{number}", 4 * rank, 4, 4 * world) for number in range(tensors)]) for rank in range(world)
        ]
        packed = [PackedPlan.of(plan) for plan in plans_of_ranks]
        answers, global_plan = join_plans(packed)
        records = [Record(100 * number, 100, 100 * number + 50, 16, b"headdatatail") for number in range(tensors)]
        reports = [{f"file {rank}": FileRecords.of(records)} for rank in range(world)]
        places = [file.places for report in reports for file in report.values()]
        metadata = global_plan.metadata([f"file {rank}" for rank in range(world)], places)
        assert len(pickle.loads(pickle.dumps(metadata)).storage_data) == world * tensors
        return [objects_in(pickle.dumps(one)) for one in (packed[0], answers[0], reports[0], metadata)]

    few, more_ranks, more_tensors = pickled(4, 10), pickled(64, 10), pickled(4, 60)
    assert more_ranks[:3] == few[:3]
    assert more_ranks[3] - few[3] <= 2 * 60  # the names of the files
    assert more_tensors[1:3] == few[1:3]
    assert max(few[1:3]) < 30


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([item("w", 0, 3, 8), item("w", 4, 4, 8)], r"'w' of shape \(8,\) in parts: they have 7 values and not 8"),
        ([item("w", 0, 4, 8), item("w", 6, 4, 8)], r"'w' .* one at \(6,\) of shape \(4,\) is not within it"),
        (
            [item("w", 0, 8, 8), WriteItem(MetadataIndex("w"), WriteItemType.BYTE_IO)],
            r"do not mean the same by 'w'",
        ),
        (
            [WriteItem(MetadataIndex("w"), WriteItemType.BYTE_IO), item("w", 0, 8, 8)],
            r"do not mean the same by 'w'",
        ),
    ],
)
def test_parts_that_do_not_make_up_a_tensor_are_refused(items: list[WriteItem], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        joined(*(SavePlan([one], planner_data={}) for one in items))


def test_a_rank_that_fails_fails_all_of_them_and_knows_its_own_reason() -> None:
    errors: dict[int, BaseException | None] = {}

    def fail(group: RankGroup) -> None:
        def say() -> None:
            if group.rank == 1:
                raise PermissionError("no access")

        try:
            group.gather_scatter("save", say, lambda said: said)
        finally:
            errors[group.rank] = group.error

    raised = run_ranks(2, fail)
    assert all(isinstance(error, CheckpointException) for error in raised)
    assert [sorted(error.failures) for error in raised] == [[1], [1]]
    assert errors[0] is None
    assert isinstance(errors[1], PermissionError)


def test_rank_zero_that_cannot_decide_fails_all_ranks() -> None:
    def decide(said: list[int]) -> list[int]:
        raise ValueError("no way")

    raised = run_ranks(3, lambda group: group.gather_scatter("save", lambda: 1, decide))
    assert [str(error.failures[0][0]) for error in raised] == ["no way"] * 3
