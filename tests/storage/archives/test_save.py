import errno
import gc
import io
import os
import pickle
import stat
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning.fabric.storage.archives.load import archive, load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import StorePlace
from lightning.fabric.storage.transport import open as transport
from lightning.fabric.storage.transport.backends import fsspec as fsspec_transport
from lightning.fabric.storage.transport.multipart import Parts
from lightning.fabric.storage.transport.sink import Sink, uploading
from tests.servers import Bucket
from tests.storage.tree import TreeFileSystem
from tests.storage.uploads import To


@pytest.fixture(params=["local", "memory", "s3", "s3 without obstore", "tree", "generic", "ftp"])
def url(
    request: pytest.FixtureRequest, bucket: Bucket, ftp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A place for a checkpoint, in a folder that is not there yet."""
    MemoryFileSystem.store.clear()
    if request.param.endswith("without obstore"):
        monkeypatch.setitem(sys.modules, "obstore", None)
    roots = {"local": str(tmp_path), "memory": "memory://", "ftp": ftp}
    roots |= {"s3": bucket.url, "s3 without obstore": bucket.url}
    roots |= {protocol: f"{protocol}://{tmp_path}" for protocol in ("tree", "generic")}
    return f"{roots[request.param]}/new/folder/epoch=1 [best].ckpt"


def names_beside(url: str) -> list[str]:
    fs, path = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    folder = path.rpartition("/")[0]
    return sorted(name.rpartition("/")[2] for name in fs.find(folder))


PARTS = Parts.of(MemoryFileSystem(), lean=False, files=1)
STATE = {"w": torch.arange(100_000, dtype=torch.float32), "step": torch.tensor(3), "text": "x", "empty": torch.empty(0)}


def same(left: Any, right: Any) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(v, right[k]) if isinstance(v, torch.Tensor) else v == right[k] for k, v in left.items()
    )


def test_what_is_saved_is_loaded_and_overwritten(url: str) -> None:
    save_file({"w": torch.zeros(7)}, url)
    save_file(STATE, url)
    assert same(load_file(url), STATE)
    assert names_beside(url) == ["epoch=1 [best].ckpt"]


def test_records_can_be_read_one_by_one(url: str) -> None:
    save_file(STATE, url)
    reader = torch.PyTorchFileReader(archive(url))
    assert len(reader.get_record("data/0")) == 400_000


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_a_write_that_stops_in_the_middle_leaves_the_old_file(url: str, error: BaseException, lean: bool) -> None:
    save_file(STATE, url)

    def interrupted() -> None:
        with transport.open_writer(locate(fsspec_or_path(url)), lean=lean) as file:
            file.write(b"x" * (60 * 2**20 if lean else 1000))
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert same(load_file(url), STATE)
    assert names_beside(url) == ["epoch=1 [best].ckpt"]


def fsspec_or_path(url: str) -> Any:
    return url if "://" in url else Path(url)


def test_an_object_that_cannot_be_pickled_raises_its_own_error(url: str) -> None:
    save_file(STATE, url)
    with pytest.raises((AttributeError, pickle.PicklingError, TypeError), match=r"lambda|pickle"):
        save_file({"f": lambda: 0}, url)
    assert same(load_file(url), STATE)
    assert names_beside(url) == ["epoch=1 [best].ckpt"]


class Probe:
    """Tells whether Python may look for garbage while this is pickled."""

    seen: list[bool]

    def __init__(self) -> None:
        self.seen = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.seen.append(gc.isenabled())
        return Probe, ()


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_looked_for_while_a_state_is_pickled_beside_training(tmp_path: Path, fails: bool) -> None:
    assert gc.isenabled()
    probe = Probe()
    state = [probe, lambda: 0] if fails else [probe]
    with pytest.raises((AttributeError, pickle.PicklingError)) if fails else nullcontext():
        save_file(state, tmp_path / "x.ckpt")
    assert probe.seen == [False]
    assert gc.isenabled()


def test_a_protocol_that_nobody_knows_is_named_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"nope://bucket/x\.ckpt: fsspec knows no protocol 'nope': use"):
        save_file(STATE, "nope://bucket/x.ckpt")


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("protocol", ["s3", "tree"])
def test_a_save_is_not_part_of_a_transaction_that_someone_else_has_open(
    protocol: str, lean: bool, bucket: Bucket, tmp_path: Path
) -> None:
    url = f"{bucket.url}/x.ckpt" if protocol == "s3" else f"tree://{tmp_path}/x.ckpt"
    fs = fsspec.url_to_fs(url)[0]

    def fail_after_a_save() -> None:
        with fs.transaction:
            with transport.open_writer(locate(url), lean=lean) as file:
                torch.save(STATE, file)
            raise RuntimeError("what else was to be in the transaction")

    with pytest.raises(RuntimeError):
        fail_after_a_save()
    assert same(load_file(url), STATE)


def test_many_threads_save_at_once(url: str) -> None:
    if url.startswith("ftp"):
        pytest.skip("fsspec's FTP client has one control connection, which threads cannot share")
    urls = [url.replace("epoch=1", f"epoch={i}") for i in range(8)]
    threads = [threading.Thread(target=save_file, args=({"i": torch.tensor(i)}, u)) for i, u in enumerate(urls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [load_file(u)["i"].item() for u in urls] == list(range(8))


@pytest.mark.parametrize("refuses", ["silently", "with an error"])
def test_a_file_system_that_does_not_rename_over_files_is_served(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TreeFileSystem, "refuses_overwriting", refuses)
    save_file({"w": torch.zeros(3)}, f"tree://{tmp_path}/x.ckpt")
    save_file(STATE, f"tree://{tmp_path}/x.ckpt")
    assert same(load_file(f"tree://{tmp_path}/x.ckpt"), STATE)
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_rename_that_fails_for_another_reason_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dropped(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("connection dropped")

    save_file({"w": torch.zeros(3)}, f"tree://{tmp_path}/x.ckpt")
    monkeypatch.setattr(TreeFileSystem, "mv", dropped)
    with pytest.raises(ConnectionError, match=r"x\.ckpt: connection dropped"):
        save_file(STATE, f"tree://{tmp_path}/x.ckpt")
    assert load_file(f"tree://{tmp_path}/x.ckpt")["w"].tolist() == [0, 0, 0]
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_bucket_is_no_place_for_a_file(bucket: Bucket) -> None:
    with pytest.raises(ValueError, match="is a bucket, and not a place in one"):
        save_file(STATE, bucket.url)
    with pytest.raises(IsADirectoryError, match=f"such as {bucket.url}/model.ckpt"):
        save_file(STATE, f"{bucket.url}/")


def test_a_slash_at_the_end_is_no_name_for_a_file(url: str) -> None:
    folder = f"{url.rpartition('/')[0]}/run/"
    with pytest.raises(IsADirectoryError, match=r"/run/ ends with a slash.* such as .*/run/model\.ckpt"):
        save_file({}, folder)
    assert not fsspec.url_to_fs(url)[0].exists(folder.rstrip("/"))


def test_a_client_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client(TreeFileSystem):
        __module__ = "s3fs.core"

    monkeypatch.setattr(StorePlace, "resolve", lambda place: (Client(), "bucket/x"))
    with pytest.raises(ImportError, match="This release of s3fs is too old"):
        save_file(STATE, "s3://bucket/x.ckpt")


def test_azure_gets_more_than_its_clients_blocks_can_hold_as_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class File(io.BytesIO):
        def close(self) -> None:
            if not self.closed:
                committed.append((self.blocksize, self.getvalue()))
            super().close()

    class Client(MemoryFileSystem):
        __module__ = "adlfs.spec"

        def split_path(self, path: str) -> tuple[str, str, None]:
            return "container", path.lstrip("/"), None

        def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
            piped.append(value)

        def open(self, path: str, mode: str, block_size: int, autocommit: bool) -> File:  # type: ignore[override]
            file = File()
            file.blocksize = block_size
            return file

    piped: list[bytes] = []
    committed: list[Any] = []
    monkeypatch.setattr(fsspec_transport, "_AZURE_PIPE_LIMIT", 10)
    with uploading(fsspec_transport.PipeUpload(Client(), "/x", PARTS)) as file:
        file.write(b"0123456789")
    assert (piped, committed) == ([b"0123456789"], [])
    with uploading(fsspec_transport.PipeUpload(Client(), "/x", PARTS)) as file:
        file.write(b"0123456789a")
    assert committed == [(32 * 2**20, b"0123456789a")]


def test_a_local_name_may_be_as_long_as_a_name_can_be(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / ("x" * 255))
    assert same(load_file(tmp_path / ("x" * 255)), STATE)


def test_a_link_to_a_local_file_goes_on_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x.ckpt").symlink_to(tmp_path / "elsewhere" / "y.ckpt")
    save_file(STATE, tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").is_symlink()
    assert same(load_file(tmp_path / "elsewhere" / "y.ckpt"), STATE)


def test_a_local_file_system_that_cannot_rename_is_served_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "replace", refuse)
    save_file(STATE, tmp_path / "x.ckpt")
    assert same(load_file(tmp_path / "x.ckpt"), STATE)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert "cannot rename files" in caplog.text


def test_a_local_failure_keeps_its_error_number(tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        save_file(STATE, tmp_path / "x.ckpt")
    assert raised.value.errno == errno.EISDIR
    assert os.listdir(tmp_path) == ["x.ckpt"]


def test_a_local_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        save_file(STATE, tmp_path / "x.ckpt")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "x.ckpt").stat().st_mode) == 0o640


def test_a_full_disk_is_reported_as_such(tmp_path: Path) -> None:
    class Full(io.RawIOBase):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    sink = Sink(To(Full()))
    with pytest.raises((OSError, RuntimeError)):
        torch.save(STATE, sink)
    assert isinstance(sink.error, OSError)
    assert sink.error.errno == 28


def test_a_short_write_is_continued() -> None:
    class Short(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:1000])

    short, whole = Short(), io.BytesIO()
    torch.save(STATE, Sink(To(short)))
    torch.save(STATE, whole)
    assert short.getvalue() == whole.getvalue()


def test_a_missing_file_is_named(url: str) -> None:
    for read in (load_file, archive):
        with pytest.raises(FileNotFoundError, match="best"):
            read(url)


def test_the_store_is_asked_for_nothing_that_a_write_does_not_need(bucket: Bucket) -> None:
    save_file(STATE, f"{bucket.url}/run/x.ckpt")
    assert [method for method, _ in bucket.requests] == ["PUT"]
