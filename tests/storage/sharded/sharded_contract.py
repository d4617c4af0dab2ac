"""What every store promises of sharded checkpoints, as one class of tests, in which the ranks are threads.

A store of :mod:`tests.storage.stores` joins by a subclass, see :mod:`tests.storage.sharded.test_sharded_contract`.
"""

import io
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.storage.collectives.errors import failures_of_ranks
from lightning.fabric.storage.collectives.rank_group import RankGroup
from lightning.fabric.storage.paths.layout import METADATA, STOCK_META
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.sharded.read_plan import read_plan
from lightning.fabric.storage.sharded.save_planner import PlanCache, Shard
from lightning.fabric.storage.sharded.writer import ShardWriter
from lightning.fabric.storage.strategies import checkpoint_load, checkpoint_place
from lightning.fabric.storage.tools import copy
from lightning.fabric.storage.tools.discover import why_incomplete
from lightning.fabric.storage.tools.verify import verify
from lightning.fabric.storage.transport.server_side_copy import copy_file
from lightning.fabric.storage.transport.sink import Sink
from tests.storage.places import NAME, NAMES, Store, remember_listing
from tests.storage.sharded.thread_ranks import run_ranks
from tests.storage.shards import Targets, along, slices
from tests.storage.stores import OnStore

#: Of which some ranks have nothing.
TENSORS = {
    "weight": torch.arange(7 * 3_000, dtype=torch.float32).reshape(7, 3_000),
    "bias": torch.ones(2, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
}
#: The steps, see :class:`Failing`, in which two ranks write their shards, and what is beside these.
UPLOADS = 6


def state_of(number: float) -> dict[str, Any]:
    """What the ranks have together; ``number`` tells one save from another."""
    return {**{name: tensor * number for name, tensor in TENSORS.items()}, "note": f"note {number}"}


def shard_of(state: dict[str, Any], meta: Any, group: RankGroup) -> Shard:
    """What a rank has of a state: a part of each tensor, and all that is no tensor."""
    values: dict[MetadataIndex, Tensor | io.BytesIO] = {}
    items = []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            saved = io.BytesIO()
            torch.save(value, saved)
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
            values[MetadataIndex(name)] = saved
            continue
        for chunk in along(0, group.world_size)(value.size())[group.rank : group.rank + 1]:
            index = MetadataIndex(name, chunk.offsets)
            data = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), value.size())
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            values[index] = value[slices(chunk)].clone()
    plan = SavePlan(items, planner_data={name: (name,) for name in state})
    return Shard(plan, lambda item: values[item.index], meta if group.is_coordinator else None)


@dataclass
class Job:
    """Saves and loads with some ranks."""

    world: int = 2

    def save(self, url: str, number: float, failing: Callable[[RankGroup], None] = lambda group: None) -> list[Any]:
        """Returns what each rank raises, or None of each.

        Args:
            url: The checkpoint's folder.
            number: Of the save.
            failing: Called on each rank when its state is planned. What it raises is the rank's failure.
        """
        place = locate(url)

        def look(group: RankGroup) -> Shard:
            failing(group)
            return shard_of(state_of(number), {"epoch": number}, group)

        def save(group: RankGroup) -> None:
            with failures_of_ranks("save", place, group):
                ShardWriter(place, group).save(lambda: look(group), PlanCache())

        return run_ranks(self.world, save)

    def load(self, path: Any) -> float:
        """Returns the number of the save that there is, if all of it is of the same."""
        found = path if isinstance(path, checkpoint_place.FoundCheckpoint) else checkpoint_place.find_checkpoint(path)
        if found.metadata is None:
            raise FileNotFoundError(str(found))
        loaded = {name: torch.full_like(tensor, -1) for name, tensor in TENSORS.items()}
        number = checkpoint_load.load_metadata(found)["epoch"]
        for rank in range(self.world):
            targets = Targets(found.metadata)
            targets.add_object("note")
            for name, tensor in loaded.items():
                for chunk in along(0, self.world)(tensor.size())[rank : rank + 1]:
                    targets.add(name, tensor[slices(chunk)], chunk)
            read_plan(found.place, found.metadata, targets.plan, targets)
            assert targets.objects == {"note": f"note {number}"}
        for name, tensor in loaded.items():
            assert torch.equal(tensor, TENSORS[name] * number)
        return float(number)


def saved(url: str, number: float, world: int = 2) -> None:
    assert Job(world).save(url, number) == [None] * world


class Failing:
    """Makes something fail at one of its steps.

    Args:
        step: The number of the step.
        error: Raised instead of the step; an interruption comes when the step is done.
    """

    def __init__(self, step: int, error: type[BaseException]) -> None:
        self.has_failed = False
        self._step = step
        self._error = error
        self._steps = itertools.count()

    def step(self, act: Callable[..., Any], *arguments: Any) -> Any:
        fails = next(self._steps) == self._step
        self.has_failed |= fails
        if fails and issubclass(self._error, Exception):
            raise self._error("refused")
        done = act(*arguments)
        if fails:
            raise self._error
        return done

    def in_saves(self, patch: pytest.MonkeyPatch) -> None:
        """Each file has two steps: it is begun, and committed."""
        write, commit = Sink.write, Sink.commit
        begun: list[Sink] = []

        def failing_write(sink: Sink, data: Any) -> int:
            if any(sink is other for other in begun):
                return write(sink, data)
            begun.append(sink)
            return self.step(write, sink, data)

        patch.setattr(Sink, "write", failing_write)
        patch.setattr(Sink, "commit", lambda sink: self.step(commit, sink))

    def in_copies(self, patch: pytest.MonkeyPatch) -> None:
        """Each file is a step."""
        patch.setattr(copy, "copy_file", lambda source, target: self.step(copy_file, source, target))


class ShardedContract(OnStore):
    """The tests."""

    # What is saved is loaded

    @pytest.mark.parametrize(("world", "other"), [(1, 3), (3, 2), (9, 1)])
    def test_what_some_ranks_save_is_loaded_by_as_many_and_by_others(
        self, store: Store, world: int, other: int
    ) -> None:
        saved(store.url, 2, world)
        assert Job(other).load(store.url) == 2
        assert str(verify(locate(store.url))).endswith("all checksums right")
        self.assert_nothing_is_unfinished(store)

    def test_torch_alone_reads_the_files(self, store: Store, tmp_path: Path) -> None:
        saved(store.url, 3)
        (tmp_path / "files").mkdir()
        for name in store.outside.names():
            (tmp_path / "files" / name.rpartition("/")[2]).write_bytes(store.outside.get(name))
        dcp_to_torch_save(tmp_path / "files", tmp_path / "one.pt")
        loaded = torch.load(tmp_path / "one.pt")
        assert loaded.pop("note") == "note 3"
        assert {name: torch.equal(loaded[name], TENSORS[name] * 3) for name in loaded} == dict.fromkeys(TENSORS, True)
        assert torch.load(tmp_path / "files" / STOCK_META) == {"epoch": 3}

    @pytest.mark.parametrize("name", NAMES)
    def test_names_are_literal(self, store: Store, name: str) -> None:
        path = f"{name}/{name}.ckpt"
        url = f"{store.root}/{path}"
        for other in ("a1/a1.ckpt/x", "ab/ab.ckpt/x", "a/a.ckpt/x", "a b/a b.ckpt/x"):  # what it could be taken for
            store.outside.put(other, b"other")
        before = store.outside.names()
        if name in self.refused_names:
            for error in Job().save(url, 1):
                assert re.search(re.escape(path), str(error))
            assert store.outside.names() == before
            return
        saved(url, 1)
        assert {found.rpartition("/")[0] for found in store.outside.names() if found not in before} == {path}
        assert Job().load(url) == 1
        TorchCheckpointIO().remove_checkpoint(url)
        assert store.outside.names() == before

    # Overwriting, and failures in the middle of it

    @pytest.mark.parametrize("worlds", [(3, 2), (2, 3)])
    def test_an_overwrite_leaves_nothing_of_the_earlier_save(self, store: Store, worlds: tuple[int, int]) -> None:
        before: set[str] = set()
        for number, world in enumerate(worlds, 1):
            saved(store.url, number, world)
            assert Job().load(store.url) == number
            names = {name.removeprefix(f"{NAME}/") for name in store.outside.names()}
            assert names & before <= {METADATA, STOCK_META}
            assert len(names) == world + 3
            before = names

    @pytest.mark.parametrize("error", [PermissionError, KeyboardInterrupt])
    def test_a_save_that_fails_at_any_step_leaves_the_old_checkpoint_or_the_new_one(
        self, store: Store, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        saved(store.url, 1)
        number, there = 2, 1
        for step in itertools.count():
            before = store.outside.names()
            failing = Failing(step, error)
            with monkeypatch.context() as patch:
                failing.in_saves(patch)
                raised = Job().save(store.url, number)
            assert all(one is not None for one in raised) is failing.has_failed
            loaded = Job().load(store.url)
            assert loaded in (there, number)
            if failing.has_failed and step < UPLOADS and error is PermissionError:
                assert store.outside.names() == before
            if not failing.has_failed:
                break
            number, there = number + 1, int(loaded)
        assert loaded == number
        assert len(store.outside.names()) == 2 + 3
        assert step == 2 * len(store.outside.names())  # each file has been begun, and has been committed
        self.assert_nothing_is_unfinished(store)

    @pytest.mark.parametrize("error", [PermissionError, KeyboardInterrupt])
    def test_a_first_save_that_fails_before_its_commit_is_no_checkpoint(
        self, store: Store, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for step in range(UPLOADS + 1):
            with monkeypatch.context() as patch:
                Failing(step, error).in_saves(patch)
                assert None not in Job().save(store.url, 1)
            with pytest.raises(FileNotFoundError):
                Job().load(store.url)
            # else a file that nobody knows the name of may be left, or all of them
            assert error is KeyboardInterrupt or step == UPLOADS or store.outside.names() == []
        saved(store.url, 2)
        assert Job().load(store.url) == 2
        assert len(store.outside.names()) == 2 + 3

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_that_has_nothing_to_save_fails_all_and_leaves_the_old_checkpoint(
        self, store: Store, rank: int
    ) -> None:
        saved(store.url, 1)
        before = store.outside.names()

        def fail(group: RankGroup) -> None:
            if group.rank == rank:
                raise ValueError("no state")

        for error in Job().save(store.url, 2, fail):
            assert re.search(rf"rank {rank}: ValueError: no state", str(error))
        assert store.outside.names() == before
        assert Job().load(store.url) == 1

    def test_what_was_found_before_an_overwrite_is_not_mixed_with_it(self, store: Store) -> None:
        saved(store.url, 1)
        found = checkpoint_place.find_checkpoint(store.url)
        saved(store.url, 2)
        with pytest.raises(FileNotFoundError, match=r"is missing.*replaced while it was loaded. Load it again"):
            Job().load(found)
        assert Job().load(store.url) == 2

    # Damage

    def file(self, store: Store, which: str) -> str:
        (name,) = [name for name in store.outside.names() if name.endswith(which)]
        return name

    @pytest.mark.parametrize("which", ["_0_0.distcp", "_1_0.distcp", "_meta.distcp", METADATA])
    def test_a_missing_file_is_told_by_its_name(self, store: Store, which: str) -> None:
        saved(store.url, 1)
        remember_listing(store.url)
        lost = self.file(store, which)
        store.outside.remove(lost)
        missing = rf"incomplete: {re.escape(lost.rpartition('/')[2])} is missing"
        with pytest.raises(FileNotFoundError, match=missing):
            Job().load(store.url)
        assert re.search(missing, str(verify(locate(store.url)).problems))
        assert why_incomplete(store.url) is not None

    @pytest.mark.parametrize("which", ["_0_0.distcp", "_1_0.distcp", "_meta.distcp"])
    def test_a_truncated_file_is_told_by_its_name(self, store: Store, which: str) -> None:
        saved(store.url, 1)
        remember_listing(store.url)
        name = self.file(store, which)
        whole = store.outside.get(name)
        for kept in (len(whole) - 1, 0):
            store.outside.put(name, whole[:kept])
            short = rf"{re.escape(name.rpartition('/')[2])} \({kept} of {len(whole)} bytes\)"
            with pytest.raises(FileNotFoundError, match=short):
                Job().load(store.url)
            assert re.search(short, str(verify(locate(store.url)).problems))
            assert why_incomplete(store.url) is not None

    @pytest.mark.parametrize("which", ["_0_0.distcp", "_1_0.distcp", "_meta.distcp", METADATA])
    def test_a_damaged_byte_is_told_by_the_name_of_its_file(self, store: Store, which: str) -> None:
        saved(store.url, 1)
        name = self.file(store, which)
        damaged = bytearray(store.outside.get(name))
        damaged[len(damaged) // 2] ^= 4
        store.outside.put(name, bytes(damaged))
        with pytest.raises(OSError, match=rf"{re.escape(name)} is damaged"):
            Job().load(store.url)
        assert re.search(rf"{re.escape(name)}.* damaged", str(verify(locate(store.url)).problems))

    # Copies and removal

    def test_a_copy_takes_the_place_of_another_one_and_is_one_of_its_own(self, store: Store) -> None:
        last = f"{store.root}/run/last.ckpt"
        for number, world in ((1, 3), (2, 2)):
            saved(f"{store.root}/run/{number}.ckpt", number, world)
            copy.duplicate(f"{store.root}/run/{number}.ckpt", last)
            assert Job().load(last) == number
            assert locate(last).list_names() == locate(f"{store.root}/run/{number}.ckpt").list_names()
        for number in (1, 2):
            assert Job().load(f"{store.root}/run/{number}.ckpt") == number
            TorchCheckpointIO().remove_checkpoint(f"{store.root}/run/{number}.ckpt")
        assert Job().load(last) == 2
        assert not verify(locate(last)).problems

    @pytest.mark.parametrize(
        ("step", "error", "expected"),
        [
            pytest.param(0, PermissionError, 1, id="shard refused"),
            pytest.param(3, PermissionError, 1, id="metadata refused"),
            pytest.param(3, KeyboardInterrupt, 2, id="metadata interrupted"),
            pytest.param(4, KeyboardInterrupt, 2, id="meta.pt interrupted"),
        ],
    )
    def test_a_copy_that_fails_leaves_the_old_checkpoint_or_the_new_one(
        self, store: Store, step: int, error: type[BaseException], expected: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, two, last = (f"{store.root}/run/{name}.ckpt" for name in ("one", "two", "last"))
        saved(one, 1)
        saved(two, 2)
        copy.duplicate(one, last)
        with monkeypatch.context() as patch:
            Failing(step, error).in_copies(patch)
            with pytest.raises(error):
                copy.duplicate(two, last)
        assert Job().load(last) == expected
        assert expected == 2 or locate(last).list_names() == locate(one).list_names()
        copy.duplicate(two, last)
        assert Job().load(last) == 2
        assert locate(last).list_names() == locate(two).list_names()

    def test_removal_takes_one_folder_and_is_content_with_none(self, store: Store) -> None:
        stay = ["run/x", "run/x.ckpt.bak", "run/x.ckpt2/y", "run2/x.ckpt"]
        for name in stay:
            store.outside.put(name, b"mine")
        saved(store.url, 1)
        for name in (NAME, NAME, "run/x.*", "nowhere/x.ckpt"):
            TorchCheckpointIO().remove_checkpoint(f"{store.root}/{name}")
            assert store.outside.names() == stay
        with pytest.raises(FileNotFoundError, match=r"run/x\.ckpt"):
            Job().load(store.url)
