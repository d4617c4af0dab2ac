from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning.fabric.storage import checkpoints
from lightning.fabric.storage.location import locate
from lightning.fabric.storage.save import save_file
from tests.servers import Bucket
from tests.storage import tree  # noqa: F401  # registers the protocol


@pytest.mark.parametrize("path", ["s3://bucket/x.ckpt", Path("s3://bucket/x.ckpt")])
def test_an_older_torch_gets_one_clear_message_for_a_url(path: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_TORCH_GREATER_EQUAL_2_4", False)
    with pytest.raises(NotImplementedError, match=r"need PyTorch 2\.4 or newer.*local path instead of s3://bucket/x"):
        checkpoints.locate_checkpoint(path)
    assert checkpoints.locate_checkpoint("run/x.ckpt") == Path("run/x.ckpt")


@pytest.fixture(params=["local", "s3", "memory", "tree", "ftp"])
def place(request: pytest.FixtureRequest, bucket: Bucket, ftp: str, tmp_path: Path) -> Path | str:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    roots = {"local": tmp_path, "s3": bucket.url, "memory": "memory://run", "tree": f"tree://{tmp_path}", "ftp": ftp}
    return locate(f"{roots[request.param]}/x.ckpt")


def make_shards(place: Path | str) -> None:
    checkpoints.make_shard_folder(place)
    save_file("shard", checkpoints.join(place, "__0_0.distcp"))
    checkpoints.save_metadata({"epoch": 1}, place)


def test_a_full_file_that_cannot_be_saved_leaves_the_shards_that_it_replaces(place: Path | str) -> None:
    make_shards(place)

    with pytest.raises(RuntimeError, match="no luck"), checkpoints.replacing_shards(place):
        raise RuntimeError("no luck")
    assert checkpoints.is_sharded_checkpoint(place)
    assert checkpoints.load_metadata(place) == {"epoch": 1}


def test_a_full_file_takes_the_place_of_shards(place: Path | str) -> None:
    make_shards(place)
    checkpoints.save_full({"w": torch.ones(2)}, place)
    assert not checkpoints.is_sharded_checkpoint(place)
    assert checkpoints.is_full_checkpoint(place)
    assert torch.equal(checkpoints.load_full(place)["w"], torch.ones(2))


def test_shards_take_the_place_of_a_full_file(place: Path | str) -> None:
    checkpoints.save_full({"w": torch.ones(2)}, place)
    make_shards(place)
    assert checkpoints.is_sharded_checkpoint(place)
    assert not checkpoints.is_full_checkpoint(place)


def test_a_rank_that_does_not_save_leaves_the_shards_to_the_one_that_does(place: Path | str) -> None:
    make_shards(place)
    with checkpoints.replacing_shards(place, on_this_rank=False):
        pass
    assert checkpoints.is_sharded_checkpoint(place)


def test_a_folder_that_is_no_checkpoint_is_in_the_way_only_where_names_are_not_shared(place: Path | str) -> None:
    save_file("mine", checkpoints.join(place, "notes.pt"))
    assert checkpoints.is_folder(place) is not str(place).startswith("s3:")
    assert not checkpoints.is_sharded_checkpoint(place)
