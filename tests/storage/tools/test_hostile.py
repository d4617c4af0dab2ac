"""A stranger's checkpoint runs no code, takes little time and memory, and is refused with a reason."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import metadata as former
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning.fabric.storage.archives.load import archive, load_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.sharded import metadata_file
from lightning.fabric.storage.sharded.global_plan import PackedPlan, join_plans
from lightning.fabric.storage.sharded.metadata_unpickler import unpickle
from lightning.fabric.storage.strategies import checkpoint_load, checkpoint_place
from lightning.fabric.storage.tools import consolidate, verify
from tests.storage import hostile
from tests.storage.states import assert_same


@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured with /proc")
def test_whatever_a_strangers_checkpoint_says_it_takes_little_time_and_memory_and_runs_no_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.storage.hostile", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    reports = {line["case"]: line for line in map(json.loads, result.stdout.splitlines()) if "case" in line}
    assert reports.keys() == hostile.CASES.keys()
    wrong = {name: why for name, report in reports.items() if (why := what_is_wrong(name, report))}
    assert not wrong
    assert not (tmp_path / hostile.MARK).exists()


def what_is_wrong(name: str, report: dict[str, Any]) -> str:
    if "died" in report:
        return f"ended its process: {report['died']}"
    if report["seconds"] > 10 or report["mib"] > 256:
        return f"{report['seconds']} s, {report['mib']} MiB"
    outcomes = report["outcomes"]
    errors = [outcome[0] for outcome in outcomes.values() if outcome]
    if not set(errors) <= {"OSError", "FileNotFoundError", "RuntimeError", "UnpicklingError"}:
        return f"raises {errors}"
    if not outcomes["load"] and not name.startswith("records on top of each other ("):  # of which one is sound
        return "loads"
    if bool(outcomes["verify"]) == (name in hostile.SOUND):
        return f"verify: {outcomes['verify']}"
    return "" if outcomes["consolidate"] else "is consolidated"


@dataclass
class Hyperparameters:
    width: int


@pytest.mark.parametrize("save", [hostile.stock, hostile.ours])
def test_whoever_trusts_a_checkpoint_loads_what_is_no_plain_type(
    tmp_path: Path, save: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": {"w": torch.ones(3), "note": [Hyperparameters(5)]}}
    save(tmp_path / "x.ckpt", state, {"hyperparameters": Hyperparameters(7)})
    into: dict[str, Any] = {"model": {"w": torch.zeros(3), "note": None}}
    with pytest.raises(RuntimeError, match=r"'model\.note'. If you trust the author .* `weights_only=False`"):
        checkpoint_load.load_shards(into, tmp_path / "x.ckpt")
    trusted = checkpoint_place.find_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    checkpoint_load.load_shards(into, trusted)
    assert into["model"]["note"] == [Hyperparameters(5)]
    with pytest.raises(pickle.UnpicklingError):
        checkpoint_load.load_metadata(tmp_path / "x.ckpt")
    assert checkpoint_load.load_metadata(trusted) == {"hyperparameters": Hyperparameters(7)}
    with pytest.raises(
        RuntimeError, match=r"'model\.note' cannot be loaded here: .* TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"
    ):
        consolidate.consolidate(locate(tmp_path / "x.ckpt"), locate(tmp_path / "y.ckpt"))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    consolidate.consolidate(locate(tmp_path / "x.ckpt"), locate(tmp_path / "y.ckpt"))
    assert torch.load(tmp_path / "y.ckpt")["model"]["note"] == [Hyperparameters(5)]


def test_objects_in_shards_come_back_as_they_were(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    objects = {"list": [1, "x", None], "tensors": (shared, shared[1:]), "nothing": None}
    hostile.ours(tmp_path / "x.ckpt", {"model": dict(objects)})
    into: dict[str, Any] = {"model": dict.fromkeys(objects)}
    checkpoint_load.load_shards(into, tmp_path / "x.ckpt")
    assert_same(into["model"], objects)
    into["model"]["tensors"][0][1] = 7
    assert into["model"]["tensors"][1][0] == 7


def test_a_full_state_with_code_is_not_given_to_lazy_loading(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "code": Hyperparameters(3)}, tmp_path / "x.ckpt")
    torch.save({"code": Hyperparameters(3)}, tmp_path / "y.ckpt")
    for name in ("x.ckpt", "y.ckpt"):
        with pytest.raises(pickle.UnpicklingError, match=r"(?s)\.ckpt: .*Hyperparameters"):
            archive(checkpoint_place.FoundCheckpoint(locate(tmp_path / name), weights_only=True))
        trusted = checkpoint_place.FoundCheckpoint(locate(tmp_path / name), weights_only=False)
        assert archive(trusted) == str(tmp_path / name)


@pytest.mark.parametrize("name", sorted(hostile.ARCHIVES))
def test_a_file_in_a_store_is_looked_at_before_torch_gets_it(name: str) -> None:
    content = hostile.ARCHIVES[name]
    fsspec.filesystem("memory").pipe("/hostile/x.ckpt", content)
    with pytest.raises(RuntimeError, match=r"hostile/x\.ckpt is truncated, or is no checkpoint: "):
        load_file("memory://hostile/x.ckpt")


def everything(properties: Any = TensorProperties) -> Metadata:
    """Metadata with all that any release of torch puts into them."""
    tensors = {
        str(dtype): TensorStorageMetadata(
            properties(dtype, layout, memory_format=memory_format),
            torch.Size([4, 2]),
            [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([2, 2])) for at in (0, 2)],
        )
        for dtype, layout, memory_format in [
            (torch.float32, torch.strided, torch.contiguous_format),
            (torch.bfloat16, torch.sparse_coo, torch.channels_last),
            (torch.float8_e4m3fn, torch.strided, torch.preserve_format),
            (torch.complex64, torch.strided, torch.contiguous_format),
            (torch.bool, torch.sparse_csr, torch.contiguous_format),
        ]
    }
    scalar = TensorStorageMetadata(
        properties(torch.int64), torch.Size([]), [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
    )
    infos = {
        MetadataIndex(name, torch.Size([at, 0]), number): _StorageInfo("__0_0.distcp", 100 * at, 2**33)
        for name in tensors
        for number, at in enumerate((0, 2))
    }
    infos[MetadataIndex("object")] = _StorageInfo("folder/__1_0.distcp", 0, 7, ["stream.zstd"])
    infos[MetadataIndex("scalar", torch.Size([]), 0)] = _StorageInfo("__1_0.distcp", 9, 7)
    made = Metadata(
        {**tensors, "scalar": scalar, "object": BytesStorageMetadata()}, {"object": ("object", 0, "x")}, infos
    )
    made.storage_meta = StorageMeta("/tmp/x", "save", None, ["a", "b"])
    return made


@pytest.mark.parametrize("protocol", [4, 5])
def test_what_torch_writes_is_read_as_torch_reads_it(protocol: int) -> None:
    assert unpickle(pickle.dumps(everything(), protocol)) == everything()


def test_what_releases_before_2_3_wrote_is_read() -> None:
    made = unpickle(pickle.dumps(everything(former.TensorProperties), 4))
    assert made == everything()
    assert type(made.state_dict_metadata["scalar"].properties) is TensorProperties


def test_a_place_that_was_a_path_is_read(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "x.ckpt", no_dist=True)
    content = (tmp_path / "x.ckpt" / ".metadata").read_bytes()
    assert b"PosixPath" in content
    assert unpickle(content).storage_data == pickle.loads(content).storage_data


def test_what_is_packed_for_many_ranks_is_read(tmp_path: Path) -> None:
    """Small tensors of many ranks are what makes most objects of few bytes."""
    ranks, tensors = 1024, 30
    plans = [
        PackedPlan.of(SavePlan([part(f"w{at}", rank, ranks) for at in range(tensors)], planner_data={}))
        for rank in range(ranks)
    ]
    written = [np.array([[500 * at, 500] for at in range(tensors)])] * ranks
    packed = join_plans(plans)[1].metadata([f"__{rank}_0.distcp" for rank in range(ranks)], written)
    content = pickle.dumps(packed)
    assert len(content) < 10 * ranks * tensors
    assert unpickle(content) == pickle.loads(content)


def part(name: str, rank: int, ranks: int) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([rank]), torch.Size([1]))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size([ranks]))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def test_metadata_name_no_class_that_torch_does_not_write(tmp_path: Path) -> None:
    hostile.stock(tmp_path / "x.ckpt")
    (tmp_path / "x.ckpt" / ".metadata").write_bytes(pickle.dumps({"a": Hyperparameters(3)}))
    with pytest.raises(
        OSError, match=r"\.metadata is damaged, or no metadata .*Hyperparameters, which no metadata have"
    ):
        metadata_file.read_metadata(locate(tmp_path / "x.ckpt"))


def test_metadata_of_ours_without_their_checksum_are_damaged(tmp_path: Path) -> None:
    hostile.ours(tmp_path / "x.ckpt")
    path = tmp_path / "x.ckpt" / ".metadata"
    path.write_bytes(path.read_bytes().partition(b"\nlightning-crc32")[0])
    assert "its checksum is missing" in verify.verify(locate(tmp_path / "x.ckpt")).problems[0]
