"""Flat ranges of tensors as boxes, what a shard of one allows, and when ranks agree that theirs make up a module."""

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from lightning.fabric.storage.background.staged_shard import stage
from lightning.fabric.storage.background.staging import Staging
from lightning.fabric.storage.collectives.rank_group import RankGroup
from lightning.fabric.storage.sharded.describable import describable, is_shard
from lightning.fabric.storage.sharded.flat_shard import FlatShard, boxes_of
from lightning.fabric.storage.sharded.save_planner import Shard
from lightning.fabric.storage.strategies import flat_load
from lightning.fabric.storage.strategies.flat_parts import Description, FlatPart, agree
from lightning.fabric.storage.strategies.flat_states import LocalStates
from lightning.fabric.storage.strategies.optimizer_state import Numbered

SHAPES = [(), (1,), (7,), (5, 1), (1, 5), (3, 4), (2, 3, 4), (3, 1, 2, 2)]


def ranges(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.combinations_with_replacement(range(math.prod(shape) + 1), 2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_boxes_of_every_range_have_each_of_its_values_once_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    for start, stop in ranges(shape):
        boxes = list(boxes_of(shape, start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        found = [
            whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))].flatten()
            for box in boxes
        ]
        assert [int(values[0]) for values in found] == [box.start for box in boxes]
        assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == list(range(start, stop))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_shard_describes_the_memory_that_it_is_on_in_any_order_of_dimensions(shape: tuple[int, ...]) -> None:
    for dims in itertools.permutations(range(len(shape))):
        in_memory = torch.arange(math.prod(shape)).view([shape[dim] for dim in dims])
        whole = in_memory.permute([dims.index(dim) for dim in range(len(shape))])
        for start, stop in ranges(shape):
            local = in_memory.flatten()[start:stop].clone()
            shard = FlatShard(local, start, stop, shape, dims)
            found = torch.full(shape, -1)
            for offsets, values in shard.boxes():
                found[tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))] = values
                assert values.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            assert torch.equal(found[found >= 0].sort().values, local)
            assert torch.equal(found[found >= 0], whole[found >= 0])


def shard_of(start: int = 3, stop: int = 9) -> FlatShard:
    return FlatShard(torch.arange(float(start), stop), start, stop, (4, 3))


def test_a_shard_knows_what_the_whole_tensor_is_and_its_own_part() -> None:
    shard = shard_of()
    assert (shard.shape, shard.dtype, shard.device, shard.numel()) == ((4, 3), torch.float32, torch.device("cpu"), 12)
    assert shard.to_local().tolist() == [3, 4, 5, 6, 7, 8]
    assert repr(shard) == "FlatShard(3:9 of (4, 3), dtype=torch.float32, device='cpu')"
    assert is_shard(shard)
    assert describable({"model": {"w": shard}})["model"]["w"] is shard


@pytest.mark.parametrize("copied", [torch.clone, copy.deepcopy, lambda shard: {"w": copy.deepcopy(shard)}["w"]])
def test_a_copy_of_a_shard_is_a_shard_with_memory_of_its_own(copied: Callable[[Tensor], Any]) -> None:
    shard = shard_of()
    own = copied(shard)
    shard.to_local().zero_()
    assert isinstance(own, FlatShard)
    assert (own.shape, own.range, own.to_local().tolist()) == ((4, 3), (3, 9), [3, 4, 5, 6, 7, 8])


def test_a_shard_is_converted_part_by_part() -> None:
    half = shard_of().to(torch.float16, memory_format=torch.preserve_format)
    assert (half.dtype, half.to_local().dtype, half.range) == (torch.float16, torch.float16, (3, 9))
    detached = (shard := shard_of()).detach()
    assert detached.to_local().data_ptr() == shard.to_local().data_ptr()


@pytest.mark.parametrize(
    "use",
    [
        torch.sum, lambda shard: shard + 1, lambda shard: shard[0], lambda shard: torch.cat([torch.ones(4, 3), shard]),
        lambda shard: torch.ones(4, 3).copy_(shard), lambda shard: shard.zero_(), lambda shard: shard.view(-1),
        Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, pickle.dumps,
        lambda shard: torch.equal(shard, shard),
    ],
)  # fmt: skip
def test_using_a_shard_as_the_whole_tensor_is_an_error_that_says_how_to_get_that(use: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"needs the whole.*3:9 of \(4, 3\).*summon_full_params.*'full'.*to_local"):
        use(shard_of())


def test_shards_are_planned_box_by_box_and_loaded_in_place() -> None:
    shard = shard_of(4, 11)
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": shard}, is_coordinator=True)
    items = planner.create_local_plan().items
    chunks = [item.tensor_data.chunk for item in items]
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks] == [
        ((1, 1), (1, 2)), ((2, 0), (1, 3)), ((3, 0), (1, 2)),
    ]  # fmt: skip
    assert [planner.resolve_data(item).tolist() for item in items] == [[[4, 5]], [[6, 7, 8]], [[9, 10]]]

    saved = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((4, 3)), chunks)
    loader = DefaultLoadPlanner()
    target = FlatShard(torch.zeros(4), 5, 9, (4, 3))
    loader.set_up_planner({"w": target}, Metadata({"w": saved}), is_coordinator=True)
    for item in loader.create_local_plan().items:
        values = torch.full(item.lengths, float(item.storage_index.offset[0]))
        loader.resolve_tensor(item).copy_(values)
    assert target.to_local().tolist() == [1, 2, 2, 2]


def test_a_tensor_without_values_is_in_the_plan_and_a_rank_without_its_values_is_not() -> None:
    planner = DefaultSavePlanner()
    state = {"none": FlatShard(torch.empty(0), 0, 0, (0, 4)), "others": FlatShard(torch.empty(0), 0, 0, (3, 4))}
    planner.set_up_planner(state, is_coordinator=True)
    (item,) = planner.create_local_plan().items
    assert (item.index.fqn, tuple(item.tensor_data.chunk.sizes)) == ("none", (0, 4))
    assert planner.resolve_data(item).shape == (0, 4)


def test_a_part_of_another_size_is_refused_when_it_is_planned() -> None:
    with pytest.raises(ValueError, match=r"shape \(5,\) is not a flat part of 6 values of one of shape \(4, 3\)"):
        FlatShard(torch.zeros(5), 3, 9, (4, 3)).__create_chunk_list__()


def test_all_boxes_are_staged_in_one_copy_of_just_their_bytes() -> None:
    memory = torch.arange(100.0)  # of a flat parameter
    state = {"w": FlatShard(memory[10:21], 1, 12, (3, 4)), "b": FlatShard(memory[30:37], 0, 7, (9,))}
    shard = Shard.of({"model": state}, None, RankGroup())
    staged, arrived = stage(shard, shard.plan.items, Staging())
    assert staged.size == (11 + 7) * 4
    memory.zero_()
    shard = arrived()
    found = torch.cat([shard.resolve(item).flatten() for item in shard.plan.items])
    assert found.tolist() == [*range(10, 21), *range(30, 37)]


def part(start: int, stop: int, name: str = "w") -> FlatPart:
    local = torch.zeros(stop - start)
    return FlatPart(name, local, [], torch.Size((2, 3)), (0, 1), (start, stop), 0, len(local), False, local)


def agreed(*ranks: list[tuple[int, int]], names: str = "wwwwww") -> str | None:
    """What several ranks agree on, each of which has some ranges of one parameter each."""
    from lightning.fabric.storage.strategies import flat_parts

    parts = [[part(*range_) for range_ in of_rank] for of_rank in ranks]
    described = [
        Description.of([part(*range_, name) for range_ in of_rank], None)
        for of_rank, name in zip(ranks, names, strict=False)
    ]
    return flat_parts._reason_against(described, parts[0])


def test_ranges_that_follow_each_other_make_up_a_parameter_whoever_has_them() -> None:
    assert agreed([(0, 6)]) is None
    assert agreed([(4, 6)], [(0, 0)], [(0, 4)]) is None
    assert agreed([(0, 4)], [(4, 6)], [(0, 4)], [(4, 6)]) is None, "replicas"


@pytest.mark.parametrize("ranks", [[[(0, 5)]], [[(1, 6)]], [[(0, 3)], [(2, 6)]], [[(0, 2)], [(3, 6)]], [[(0, 0)]]])
def test_ranges_that_lack_or_repeat_a_value_do_not(ranks: list[list[tuple[int, int]]]) -> None:
    assert agreed(*ranks) == "the ranks do not have each value of 'w' once"


def test_ranks_with_other_parameters_do_not_agree() -> None:
    assert agreed([(0, 3)], [(3, 6)], names="wv") == "rank 1 has other parameters than rank 0"


def test_a_reason_of_one_rank_is_that_of_all() -> None:
    assert agree(lambda: Description.of([], "no such attribute"), []) == "no such attribute"


def test_an_interruption_while_ranks_agree_is_no_reason() -> None:
    def interrupted() -> Description:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        agree(interrupted, [])


def test_a_type_from_which_none_is_converted_is_refused_by_name() -> None:
    saved = TensorStorageMetadata(TensorProperties(torch.int64), torch.Size((2, 3)), [])
    with pytest.raises(
        ValueError, match=r"'w' is of torch.float32, and in the checkpoint of torch.int64: load it into"
    ):
        flat_load._check([part(0, 6)], {("w",): saved})


def test_of_a_flat_parameter_the_parts_without_a_saved_state_get_zeros() -> None:
    flat = torch.nn.Parameter(torch.ones(8))
    shape = torch.Size((4,))
    parts = [FlatPart(name, flat, [], shape, (0,), (0, 4), at, 8, False, flat[at : at + 4]) for name, at in PARTS]
    optimizer = torch.optim.SGD([flat], lr=1.0, momentum=0.5)
    optimizer.state[flat]["momentum_buffer"] = torch.full((8,), 9.0)
    numbered = Numbered({flat: 0}, [{**optimizer.param_groups[0], "params": [0]}], {"v", "w"})
    saved = TensorStorageMetadata(TensorProperties(torch.float32), shape, [])
    with uninitialized_memory_filled():
        entries = {("state", "w", "momentum_buffer"): saved}
        states = LocalStates(optimizer, numbered, parts, {flat: ["v", "w"]}, entries)
    states.targets["w"]["momentum_buffer"].to_local().fill_(3.0)
    states.put_in()
    assert optimizer.state[flat]["momentum_buffer"].tolist() == [0.0] * 4 + [3.0] * 4


PARTS = [("v", 0), ("w", 4)]


@contextmanager
def uninitialized_memory_filled() -> Iterator[None]:
    """Has torch fill with NaN what it would leave as it is, which may be zeros by chance."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
