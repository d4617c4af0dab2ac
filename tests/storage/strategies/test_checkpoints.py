from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import s3fs
import torch

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.strategies import checkpoint_load, checkpoint_place, checkpoint_save, full_state
from lightning.fabric.storage.tools.copy import duplicate
from lightning.fabric.storage.transport import retry
from tests.servers import Bucket
from tests.servers.credentials import SECRET
from tests.storage import tree  # noqa: F401  # registers the protocol


@pytest.mark.parametrize("path", ["s3://bucket/x.ckpt", Path("s3://bucket/x.ckpt")])
def test_an_older_torch_gets_one_clear_message_for_a_url(path: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_place, "_TORCH_GREATER_EQUAL_2_4", False)
    with pytest.raises(NotImplementedError, match=r"need PyTorch 2\.4 or newer.*local path instead of s3://bucket/x"):
        checkpoint_place.locate_checkpoint(path)
    assert checkpoint_place.locate_checkpoint("run/x.ckpt").raw == "run/x.ckpt"


@pytest.fixture(params=["local", "s3", "memory", "tree", "generic", "ftp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind = request.param
    if kind == "local":
        root = str(tmp_path)
    elif kind in ("tree", "generic"):
        root = f"{kind}://{tmp_path}"
    elif kind == "s3":
        root = request.getfixturevalue("bucket").url
    else:
        root = request.getfixturevalue(kind)
    return locate(f"{root}/run/x.ckpt")


def make_shards(place: Place) -> None:
    checkpoint_save.save_sharded({"w": torch.full((3,), 7.0)}, {"epoch": 1}, place)


def assert_shards(place: Place) -> None:
    found = checkpoint_place.find_checkpoint(place)
    assert checkpoint_place.is_sharded_checkpoint(found)
    assert not checkpoint_place.is_full_checkpoint(found)
    state = {"w": torch.zeros(3)}
    checkpoint_load.load_shards(state, found)
    assert state["w"].tolist() == [7, 7, 7]
    assert checkpoint_load.load_metadata(found) == {"epoch": 1}


def test_a_full_file_that_cannot_be_saved_leaves_the_shards_that_it_replaces(place: Place) -> None:
    make_shards(place)

    with pytest.raises(RuntimeError, match="no luck"), checkpoint_save.saving_full(place, TorchCheckpointIO(), {}):
        raise RuntimeError("no luck")
    assert_shards(place)


def test_a_full_file_takes_the_place_of_shards(place: Place) -> None:
    make_shards(place)
    checkpoint_save.save_full({"w": torch.ones(2)}, None, place)
    assert not checkpoint_place.is_sharded_checkpoint(place)
    assert checkpoint_place.is_full_checkpoint(place)
    assert torch.equal(full_state.load_whole(place.raw)["w"], torch.ones(2))


def test_shards_take_the_place_of_a_full_file(place: Place) -> None:
    checkpoint_save.save_full({"w": torch.ones(2)}, None, place)
    make_shards(place)
    assert_shards(place)
    assert not checkpoint_place.is_full_checkpoint(place)


def test_a_folder_that_is_no_checkpoint_is_in_the_way_only_where_names_are_not_shared(place: Place) -> None:
    save_file("mine", place / "notes.pt")
    is_in_the_way = not str(place).startswith("s3:")
    with pytest.raises(IsADirectoryError) if is_in_the_way else nullcontext():
        checkpoint_place.refuse_folder(place)
    make_shards(place)
    checkpoint_place.refuse_folder(place)


@pytest.mark.parametrize("front", ["fabric", "pytorch"])
@pytest.mark.parametrize("kind", ["fsdp", "model_parallel"])
def test_the_error_about_a_folder_in_the_way_hides_the_password(front: str, kind: str, ftp: str) -> None:
    strategies = pytest.importorskip(f"lightning.{front}.strategies")
    if kind == "fsdp":
        strategy = strategies.FSDPStrategy(state_dict_type="full")
    else:
        arguments = {"parallelize_fn": lambda module, mesh: module} if front == "fabric" else {}
        strategy = strategies.ModelParallelStrategy(save_distributed_checkpoint=False, **arguments)
    path, state = f"{ftp}/x.ckpt", dict[str, object]()
    save_file("mine", f"{path}/notes.pt")
    with pytest.raises(IsADirectoryError, match=r"ftp://.*/x\.ckpt is a folder") as raised:
        strategy.save_checkpoint(*((path, state) if front == "fabric" else (state, path)))
    assert SECRET not in str(raised.value)


def refuse_removal(method: str, path: str) -> int | None:
    return 403 if method == "DELETE" or "?delete" in path else None


def test_a_full_file_that_cannot_be_removed_after_the_shards_are_saved_is_a_warning(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    place = locate(f"{bucket.url}/x.ckpt")
    checkpoint_save.save_full({"w": torch.ones(2)}, None, place)
    with bucket.refusing(refuse_removal):
        make_shards(place)
    assert "Could not remove" in caplog.text
    assert checkpoint_place.is_sharded_checkpoint(place)  # and the folder is what counts


def test_shards_that_cannot_be_removed_after_the_full_file_is_saved_are_an_error_that_says_so(bucket: Bucket) -> None:
    place = locate(f"{bucket.url}/x.ckpt")
    make_shards(place)
    with bucket.refusing(refuse_removal), pytest.raises(OSError, match="still what would be loaded"):
        checkpoint_save.save_full({"w": torch.ones(2)}, None, place)


def test_whoever_may_only_write_can_save(bucket: Bucket) -> None:
    place = locate(f"{bucket.url}/x.ckpt")
    with bucket.refusing(lambda method, path: None if method in ("PUT", "POST") else 403):
        checkpoint_save.save_full({"w": torch.ones(2)}, None, place)
        make_shards(place.beside("-shards"))
    assert checkpoint_place.is_full_checkpoint(place)
    assert_shards(place.beside("-shards"))


@pytest.mark.parametrize("refused", ["DELETE", "GET"])  # removal, and the listing before it
def test_old_shards_that_cannot_be_removed_do_not_fail_the_save(
    refused: str, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    place = locate(f"{bucket.url}/x.ckpt")
    checkpoint_save.save_sharded({"w": torch.ones(3)}, None, place)
    with bucket.refusing(lambda method, path: 403 if method == refused else None):
        checkpoint_save.save_sharded({"w": torch.full((3,), 2.0)}, None, place)
    assert "Could not remove what earlier saves have left" in caplog.text
    state = {"w": torch.zeros(3)}
    checkpoint_load.load_shards(state, place)
    assert state["w"].tolist() == [2, 2, 2]
    assert len([name for name in bucket.names() if name.endswith(".distcp")]) == 2
    checkpoint_save.save_sharded({"w": torch.ones(3)}, None, place)
    assert len([name for name in bucket.names() if name.endswith(".distcp")]) == 1


@pytest.mark.parametrize("part", [".metadata", ".distcp"])
def test_a_shard_that_cannot_be_read_is_an_oserror_that_names_the_checkpoint(part: str, bucket: Bucket) -> None:
    place = locate(f"{bucket.url}/x.ckpt")
    checkpoint_save.save_sharded({"w": torch.ones(3), "optimizer": {"w": torch.ones(3)}}, None, place)
    with (
        bucket.refusing(lambda method, path: 403 if part in path else None),
        pytest.raises(OSError, match=rf"Could not (read|load the sharded checkpoint) {place}.*Forbidden"),
    ):
        checkpoint_load.load_shards({"w": torch.zeros(3)}, place)


SHARDS, FILE = "shards", "file"


def save_as(kind: str, url: str) -> None:
    save = checkpoint_save.save_sharded if kind == SHARDS else checkpoint_save.save_full
    save({"w": torch.arange(4.0)}, {"note": kind}, locate(url))


@pytest.mark.parametrize(
    ("before", "act", "expected"),
    [
        (SHARDS, lambda url: save_as(SHARDS, f"{url}/a"), SHARDS),
        (FILE, lambda url: save_as(SHARDS, f"{url}/a"), SHARDS),
        (SHARDS, lambda url: save_as(FILE, f"{url}/a"), FILE),
        (SHARDS, lambda url: duplicate(f"{url}/shards", f"{url}/a"), SHARDS),
        (FILE, lambda url: duplicate(f"{url}/shards", f"{url}/a"), SHARDS),
        (SHARDS, lambda url: duplicate(f"{url}/file", f"{url}/a"), FILE),
        (SHARDS, lambda url: checkpoint_place.find_to_load(f"{url}/a"), SHARDS),
        (FILE, lambda url: checkpoint_place.find_to_load(f"{url}/a"), FILE),
    ],
)
def test_no_question_and_no_removal_gives_up_when_a_store_is_away_for_a_moment(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, before: str, act: Any, expected: str
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    s3fs.S3FileSystem.clear_instance_cache()
    for kind, name in ((SHARDS, "shards"), (FILE, "file"), (before, "a")):
        save_as(kind, f"{bucket.url}/{name}")
    refused: set[tuple[str, str]] = set()

    def once(method: str, path: str) -> int | None:
        if (method, path) in refused:
            return None
        refused.add((method, path))
        return 503

    with bucket.refusing(once):
        act(bucket.url)
    assert {"HEAD", "GET"} & {method for method, _ in refused}
    found = checkpoint_place.find_to_load(f"{bucket.url}/a")
    assert (SHARDS if found.metadata is not None else FILE) == expected
    names = [name.removeprefix("a/") for name in bucket.names("a")]
    if expected == SHARDS:
        assert set(names) == {".metadata", "meta.pt", *found.metadata.lightning["files"]}  # type: ignore[union-attr]
    else:
        assert names == ["a"]
