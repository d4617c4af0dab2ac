"""Tensors that share memory are one record in a sharded checkpoint, which every reader finds by each of their names."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import Metadata

from lightning.fabric.plugins import AsyncCheckpointIO
from lightning.fabric.storage.background.pending import drain
from lightning.fabric.storage.collectives.rank_group import RankGroup
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.sharded import metadata_file
from lightning.fabric.storage.sharded.save_planner import PlanCache, Shard
from lightning.fabric.storage.sharded.writer import ShardWriter
from lightning.fabric.storage.strategies import checkpoint_load, checkpoint_save
from lightning.fabric.storage.tools import consolidate, verify

WEIGHT = torch.arange(5_000.0).reshape(50, 100)


def state() -> dict[str, Any]:
    """With the same values in all, of which only the first three are the same memory in the same way."""
    weight = WEIGHT.clone()
    tied = {"weight": weight, "tied": weight, "view": torch.nn.Parameter(weight)[:]}
    others = {"equal": weight.clone(), "part": weight[:20], "turned": weight.t(), "bits": weight.view(torch.int32)}
    return {"model": {**tied, **others, "note": "x"}}


def save_now(path: Path) -> None:
    checkpoint_save.save_sharded(state(), {"epoch": 1}, path)


def save_in_background(path: Path) -> None:
    saved = state()
    checkpoint_save.save_sharded(saved, {"epoch": 1}, path, AsyncCheckpointIO())
    saved["model"]["weight"].zero_()
    drain()


@pytest.fixture(params=[save_now, save_in_background])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path / "x.ckpt")
    return tmp_path / "x.ckpt"


def shard_of(folder: Path) -> Path:
    return next(found for found in folder.glob("*_0.distcp"))


def places(metadata: Metadata) -> dict[str, int]:
    return {index.fqn.removeprefix("model."): info.offset for index, info in metadata.storage_data.items()}


def test_what_is_the_same_memory_is_one_record_and_what_is_not_has_its_own(saved: Path) -> None:
    metadata, _ = metadata_file.read_metadata(locate(saved))
    found = places(metadata)
    assert found["weight"] == found["tied"] == found["view"]
    assert len(set(found.values())) == len(found) - 2
    values = 4 * WEIGHT.nbytes + WEIGHT[:20].nbytes
    assert values < shard_of(saved).stat().st_size < values + WEIGHT.nbytes


def test_tensors_that_had_the_same_memory_one_after_the_other_are_not_tied(tmp_path: Path) -> None:
    saved, values = state(), {}

    def look(group: RankGroup) -> Shard:
        shard = Shard.of(saved, None, group)
        values.update({item.index.fqn: len(values) for item in shard.plan.items if item.tensor_data})
        made = lambda item: torch.full((300,), float(values[item.index.fqn]))  # noqa: E731
        return replace(shard, resolve=lambda item: made(item) if item.tensor_data else shard.resolve(item))

    group = RankGroup()
    ShardWriter(locate(tmp_path / "x.ckpt"), group).save(lambda: look(group), PlanCache())
    found = places(metadata_file.read_metadata(locate(tmp_path / "x.ckpt"))[0])
    assert len(set(found.values())) == len(found)


def test_every_name_loads_here_and_with_torch(saved: Path) -> None:
    for load in (
        checkpoint_load.load_shards,
        lambda into, path: dcp.load(into, storage_reader=dcp.FileSystemReader(path), no_dist=True),
    ):
        into = {"model": {name: torch.zeros_like(value) for name, value in state()["model"].items() if name != "note"}}
        load(into, saved)
        for name, value in state()["model"].items():
            assert name == "note" or torch.equal(into["model"][name], value), name


def test_one_name_of_tied_tensors_loads_without_the_other(saved: Path) -> None:
    for name in ("weight", "tied"):
        into = {"model": {name: torch.zeros(50, 100)}}
        checkpoint_load.load_shards(into, saved)
        assert torch.equal(into["model"][name], WEIGHT)


def test_tied_tensors_are_verified_once_and_damage_is_told_of_one_of_them(saved: Path) -> None:
    nbytes = sum(file.stat().st_size for file in saved.iterdir())
    assert str(verify.verify(locate(saved))) == f"complete, 4 files, {nbytes} bytes, all checksums right"
    place = places(metadata_file.read_metadata(locate(saved))[0])["tied"] + 1_000
    content = bytearray(shard_of(saved).read_bytes())
    content[place] ^= 1
    shard_of(saved).write_bytes(content)
    (problem,) = verify.verify(locate(saved)).problems
    assert re.search(r"of 'model\.(weight|tied|view)' are damaged: their checksum is wrong", problem)
    with pytest.raises(OSError, match=r"is damaged"):
        checkpoint_load.load_shards({"model": {"tied": torch.zeros(50, 100)}}, saved)


def test_tied_tensors_are_tied_in_the_file_that_is_made_of_the_shards(saved: Path, tmp_path: Path) -> None:
    consolidate.consolidate(locate(saved), locate(tmp_path / "full.ckpt"))
    model = torch.load(tmp_path / "full.ckpt")["model"]
    for name, value in state()["model"].items():
        assert name == "note" or torch.equal(model[name], value), name
    memory = {name: value.data_ptr() for name, value in model.items() if name != "note"}
    assert memory["weight"] == memory["tied"] == memory["view"]
    assert len(set(memory.values())) == len(memory) - 2
    assert (tmp_path / "full.ckpt").stat().st_size < 5 * WEIGHT.nbytes
