"""Copies of checkpoints, which `ModelCheckpoint(save_last="link")` makes at URLs."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace, TracebackType

import pytest
import s3fs
import torch

from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.background.pending import drain, will_exist
from lightning.fabric.storage.background.queue import Queue
from lightning.fabric.storage.background.submissions import Save
from lightning.fabric.storage.paths.layout import MARKS
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.remove import remove_names
from lightning.fabric.storage.sharded.metadata_file import read_metadata
from lightning.fabric.storage.tools.copy import duplicate
from lightning.fabric.storage.tools.discover import why_incomplete
from lightning.fabric.storage.transport import server_side_copy
from tests.servers import Bucket
from tests.storage.sharded.test_metadata_file import load, save

STORES = ["s3", "memory", "ftp"]


@pytest.fixture(params=STORES)
def root(request: pytest.FixtureRequest) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("bucket").url)
    if request.param == "ftp":
        return str(request.getfixturevalue("ftp"))
    return f"{request.getfixturevalue('memory')}/place"


def test_a_file_is_copied_over_another_one(root: str) -> None:
    save_file({"epoch": 1}, f"{root}/run/one.ckpt")
    save_file({"epoch": 2}, f"{root}/run/two.ckpt")
    for epoch, name in enumerate(("one", "two"), 1):
        duplicate(f"{root}/run/{name}.ckpt", f"{root}/run/last.ckpt")
        assert load_file(f"{root}/run/last.ckpt") == {"epoch": epoch}
    assert locate(f"{root}/run").list_names() == ["last.ckpt", "one.ckpt", "two.ckpt"]


def test_a_file_and_a_folder_take_each_others_place(root: str) -> None:
    save_file({"epoch": 1}, f"{root}/run/one.ckpt")
    save(f"{root}/run/two.ckpt", 2)
    duplicate(f"{root}/run/one.ckpt", f"{root}/run/last.ckpt")
    duplicate(f"{root}/run/two.ckpt", f"{root}/run/last.ckpt")
    assert load(f"{root}/run/last.ckpt") == 2
    duplicate(f"{root}/run/one.ckpt", f"{root}/run/last.ckpt")
    assert load_file(f"{root}/run/last.ckpt") == {"epoch": 1}
    assert locate(f"{root}/run").list_names() == ["last.ckpt", "one.ckpt", "two.ckpt"]


def test_a_checkpoint_that_lacks_a_shard_does_not_take_the_place_of_a_whole_one(root: str) -> None:
    save(f"{root}/run/one.ckpt", 1)
    save(f"{root}/run/two.ckpt", 2)
    duplicate(f"{root}/run/one.ckpt", f"{root}/run/last.ckpt")
    shards = locate(f"{root}/run/two.ckpt")
    remove_names(shards, [name for name in shards.list_names() if name not in MARKS])
    with pytest.raises(FileNotFoundError, match=r"two\.ckpt is incomplete"):
        duplicate(f"{root}/run/two.ckpt", f"{root}/run/last.ckpt")
    assert load(f"{root}/run/last.ckpt") == 1


def test_s3_copies_what_is_large_in_parts_and_nothing_passes_through_this_machine(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_side_copy, "_S3_PART", 5 * 2**20)
    save_file({"w": torch.arange(3 * 2**20 + 7)}, f"{bucket.url}/run/a b=1.ckpt")
    before = len(bucket.requests)
    duplicate(f"{bucket.url}/run/a b=1.ckpt", f"{bucket.url}/run/last.ckpt")
    assert bucket.get("run/last.ckpt") == bucket.get("run/a b=1.ckpt")
    methods = [method for method, path in bucket.requests[before:] if path.startswith(f"/{bucket.name}/run/last.ckpt?")]
    assert methods.count("PUT") == 5  # of 24 MiB
    read = [path for method, path in bucket.requests[before:] if method == "GET" and f"/{bucket.name}/run/a" in path]
    assert read == []


def test_a_copy_in_parts_that_fails_is_taken_back_and_what_was_there_stays(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_side_copy, "_S3_PART", 5 * 2**20)
    save_file({"w": torch.arange(2 * 2**20)}, f"{bucket.url}/run/x.ckpt")
    save_file({"epoch": 1}, f"{bucket.url}/run/last.ckpt")
    with (
        bucket.refusing(lambda method, path: 403 if method == "PUT" and "partNumber=3" in path else None),
        pytest.raises(PermissionError, match=r"Could not write s3://.*/run/last\.ckpt.*unchanged"),
    ):
        duplicate(f"{bucket.url}/run/x.ckpt", f"{bucket.url}/run/last.ckpt")
    assert bucket.unfinished_uploads() == []
    assert load_file(f"{bucket.url}/run/last.ckpt") == {"epoch": 1}


def test_the_old_shards_count_until_all_are_copied_and_what_was_copied_in_vain_goes(bucket: Bucket) -> None:
    save(f"{bucket.url}/run/one.ckpt", 1)
    save(f"{bucket.url}/run/two.ckpt", 2)
    duplicate(f"{bucket.url}/run/one.ckpt", f"{bucket.url}/run/last.ckpt")
    before = bucket.names()
    with (
        bucket.refusing(lambda method, path: 403 if method == "PUT" and ".metadata" in path else None),
        pytest.raises(PermissionError, match=r"last\.ckpt/\.metadata"),
    ):
        duplicate(f"{bucket.url}/run/two.ckpt", f"{bucket.url}/run/last.ckpt")
    assert bucket.names() == before
    assert load(f"{bucket.url}/run/last.ckpt") == 1


def test_shards_with_the_names_of_the_old_ones_are_never_taken_for_those(bucket: Bucket) -> None:
    """As torch names them: while they are replaced there is no checkpoint, rather than a mix."""
    save(f"{bucket.url}/run/one.ckpt", 1)
    for name in bucket.names():
        bucket.put(name.replace("one", "last"), bucket.get(name))
    with (
        bucket.refusing(lambda method, path: 403 if method == "PUT" and path.endswith(".metadata") else None),
        pytest.raises(PermissionError),
    ):
        duplicate(f"{bucket.url}/run/one.ckpt", f"{bucket.url}/run/last.ckpt")
    assert "incomplete" in str(why_incomplete(f"{bucket.url}/run/last.ckpt"))
    duplicate(f"{bucket.url}/run/one.ckpt", f"{bucket.url}/run/last.ckpt")
    assert read_metadata(locate(f"{bucket.url}/run/last.ckpt"))


@pytest.mark.parametrize("status", [400, 404, 405, 501])
def test_a_server_that_cannot_copy_gets_the_bytes_again(status: int, bucket: Bucket) -> None:
    save_file({"epoch": 1}, f"{bucket.url}/run/x.ckpt")
    copying = iter([status])
    with bucket.refusing(lambda method, path: next(copying, None) if method == "PUT" else None):
        duplicate(f"{bucket.url}/run/x.ckpt", f"{bucket.url}/run/last.ckpt")
    assert load_file(f"{bucket.url}/run/last.ckpt") == {"epoch": 1}


def test_a_server_that_copies_no_parts_gets_the_bytes_again(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side_copy, "_S3_PART", 5 * 2**20)
    save_file({"w": torch.arange(2**20)}, f"{bucket.url}/run/x.ckpt")
    with bucket.refusing(lambda method, path: 501 if "partNumber" in path else None):
        duplicate(f"{bucket.url}/run/x.ckpt", f"{bucket.url}/run/last.ckpt")
    assert bucket.get("run/last.ckpt") == bucket.get("run/x.ckpt")
    assert bucket.unfinished_uploads() == []


@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_never_done_with_a_copy_gets_the_bytes_again(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    (tmp_path / "config").write_text("[default]\nmax_attempts = 1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    save_file({"epoch": 1}, f"{bucket.url}/run/x.ckpt")

    def time_out(method: str, path: str) -> int | None:
        return 503 if "x-amz-copy-source" in bucket.headers[-1] else None

    with bucket.refusing(time_out):
        duplicate(f"{bucket.url}/run/x.ckpt", f"{bucket.url}/run/last.ckpt")
    assert load_file(f"{bucket.url}/run/last.ckpt") == {"epoch": 1}


def test_a_copy_that_is_not_whole_is_made_again_and_is_an_error_if_that_fails_too(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"epoch": 1}, f"{bucket.url}/run/x.ckpt")
    monkeypatch.setattr(server_side_copy, "_let_copy", lambda fs, path, copy, size: "it stands still")
    refusing = bucket.refusing(lambda method, path: 403 if method == "PUT" else None)
    with refusing, pytest.raises(OSError, match=r"last\.ckpt is no whole copy of .*x\.ckpt, .*: it stands still"):
        duplicate(f"{bucket.url}/run/x.ckpt", f"{bucket.url}/run/last.ckpt")
    duplicate(f"{bucket.url}/run/x.ckpt", f"{bucket.url}/run/last.ckpt")
    assert load_file(f"{bucket.url}/run/last.ckpt") == {"epoch": 1}


def test_a_copy_that_is_refused_is_no_reason_to_make_a_bucket(bucket: Bucket) -> None:
    save_file({"epoch": 1}, f"{bucket.url}/run/x.ckpt")
    refusing = bucket.refusing(lambda method, path: 404 if method in ("PUT", "POST") else None)
    with refusing, pytest.raises(FileNotFoundError) as raised:
        duplicate(f"{bucket.url}/run/x.ckpt", f"{bucket.url}/run/last.ckpt")
    assert "There is no bucket" not in str(raised.value)


def test_between_two_stores_and_to_a_local_disk_the_bytes_pass_through(bucket: Bucket, tmp_path: Path) -> None:
    save_file({"epoch": 1}, f"{bucket.url}/run/x.ckpt")
    duplicate(f"{bucket.url}/run/x.ckpt", f"{tmp_path}/run/y.ckpt")
    duplicate(f"{tmp_path}/run/y.ckpt", f"{bucket.url}/run/z.ckpt")
    assert bucket.get("run/z.ckpt") == bucket.get("run/x.ckpt")


def test_what_is_not_there_cannot_be_copied_and_no_bucket_is_blamed(root: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no file .*/none\.ckpt$"):
        duplicate(f"{root}/run/none.ckpt", f"{root}/run/last.ckpt")


def test_a_copy_in_the_background_comes_after_the_save_and_not_at_all_if_that_fails() -> None:
    queue, done = Queue(max_in_flight=2, on_error="warn"), []
    gate = threading.Event()

    def fail() -> None:
        raise OSError("full")

    a, b, last = map(locate, ("a", "b", "last"))
    queue.submit(Save(a), lambda: done.append("save") if gate.wait(60) else None)
    queue.submit_copy(last, lambda: done.append("copy"))
    assert will_exist("last") is True
    gate.set()
    queue.submit(Save(b), fail)
    queue.submit_copy(last, lambda: done.append("copy of nothing"))
    queue.submit_removal(a, lambda: done.append("removal"))
    drain()
    assert done == ["save", "copy"]


def test_a_copy_that_azure_has_begun_and_never_makes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: azurite has made a copy when it answers."""

    class Blob:
        async def __aenter__(self) -> "Blob":
            return self

        async def __aexit__(self, *raised: type | BaseException | TracebackType | None) -> None:
            pass

        async def get_blob_properties(self) -> SimpleNamespace:
            return SimpleNamespace(copy=SimpleNamespace(status="pending", progress="5/10", status_description=None))

    monkeypatch.setattr(server_side_copy, "_POLL_S", 0.01)
    monkeypatch.setattr(server_side_copy, "_STANDSTILL_S", 0.1)
    service = SimpleNamespace(get_blob_client=lambda container, name: Blob())
    client = SimpleNamespace(split_path=lambda path: (*path.split("/"), None), service_client=service)
    told = asyncio.run(asyncio.wait_for(server_side_copy._outcome(client, "container/x.ckpt"), 30))
    assert "nothing has been copied" in told
    assert "5/10" in told
