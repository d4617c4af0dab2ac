import gzip
import io
import os
import pickle
import random
import re
import sys
import threading
import time
import traceback
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning.fabric.storage.archives import checkpoint_file
from lightning.fabric.storage.archives import load as load_module
from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.strategies import full_state
from lightning.fabric.storage.transport import ranged_file
from lightning.fabric.storage.transport.backends import obstore_reader
from lightning.fabric.storage.transport.open import open_reader
from lightning.fabric.storage.transport.ranged_file import RangedFile
from lightning.fabric.utilities.cloud_io import _load
from lightning.fabric.utilities.load import _lazy_load
from tests.servers import Bucket

#: More tensors than ten, so that the order of their numbers is not that of their names.
STATE = {f"w{i}": torch.randn(50_000 if i % 3 else 3) for i in range(25)}


def serialized(state: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


class Bytes:
    """A source that knows what was read."""

    def __init__(self, data: bytes, parallel: bool = True) -> None:
        self.data = data
        self.size = len(data)
        self.parallel = parallel
        self.ranges: list[tuple[int, int]] = []

    def read_into(self, start: int, view: memoryview) -> None:
        time.sleep(random.uniform(0, 0.002))
        self.ranges.append((start, start + len(view)))
        view[:] = self.data[start : start + len(view)]

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file of some megabytes is a large one."""
    monkeypatch.setattr(ranged_file, "REQUEST", 2**17)
    monkeypatch.setattr(ranged_file, "_SMALLEST_READ", 2**12)
    monkeypatch.setattr(load_module, "TAIL", 2**14)
    monkeypatch.setattr(load_module, "SMALL_FILE", 2**17)


@pytest.fixture(params=["obstore", "s3fs"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)
    return str(request.param)


@pytest.mark.parametrize("parallel", [True, False])
def test_any_sequence_of_reads_gives_the_bytes_of_the_file(small_blocks: None, parallel: bool) -> None:
    data = random.Random(0).randbytes(3_000_000)
    ours, plain = RangedFile(Bytes(data, parallel)), io.BytesIO(data)
    ours.expect([(1000, 900_000), (900_000, 900_010), (2_000_000, 2_900_000)])
    dice = random.Random(1)
    for _ in range(300):
        if dice.random() < 0.6:
            arguments = dice.choice(
                [(dice.randrange(3_100_000),), (dice.randrange(2000), 1), (-dice.randrange(3000), 2)]
            )
            assert ours.seek(*arguments) == plain.seek(*arguments)
        count = dice.choice([0, 1, 30, 5000, 300_000])
        assert ours.read(count) == plain.read(count)
        assert ours.tell() == plain.tell()


def test_what_is_expected_is_read_once_and_many_ranges_at_a_time(small_blocks: None) -> None:
    at_a_time = highest = 0
    lock = threading.Lock()

    class Slow(Bytes):
        def read_into(self, start: int, view: memoryview) -> None:
            nonlocal at_a_time, highest
            with lock:
                at_a_time += 1
                highest = max(highest, at_a_time)
            time.sleep(0.01)
            super().read_into(start, view)
            with lock:
                at_a_time -= 1

    source = Slow(serialized(STATE))
    with RangedFile(source) as file:
        load_module._expect_records(file)
        file.seek(0)
        assert same(torch.load(file), STATE)
    assert 8 <= highest <= ranged_file.REQUESTS_IN_FLIGHT + 1  # one may be read at once
    assert source.count < source.size + 3 * load_module.TAIL
    assert len(source.ranges) < 40  # and not one for each of the records


def test_no_more_is_held_than_the_blocks_ahead(small_blocks: None) -> None:
    source = Bytes(bytes(10_000_000))
    file = RangedFile(source)
    file.expect([(0, source.size)])
    time.sleep(0.3)
    assert source.count == ranged_file.REQUESTS_IN_FLIGHT * ranged_file.REQUEST


def test_records_in_the_order_of_older_releases_are_found(small_blocks: None) -> None:
    old = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(serialized(STATE))) as archive, zipfile.ZipFile(old, "w") as rewritten:
        for name in sorted(archive.namelist()):  # data/1, data/10, data/11, ..., data/2
            rewritten.writestr(name, archive.read(name))
    with RangedFile(Bytes(old.getvalue())) as file:
        load_module._expect_records(file)
        file.seek(0)
        assert same(torch.load(file), STATE)


def test_the_legacy_format_loads(bucket: Bucket, engine: str, small_blocks: None) -> None:
    bucket.put("old.ckpt", serialized(STATE, _use_new_zipfile_serialization=False))
    assert same(load_file(f"{bucket.url}/old.ckpt"), STATE)


def test_tensors_own_their_memory_and_ties_stay(bucket: Bucket, engine: str) -> None:
    tied = torch.randn(1000)
    save_file({"a": tied, "b": tied, "c": torch.randn(10)}, f"{bucket.url}/x.ckpt")
    loaded = load_file(f"{bucket.url}/x.ckpt")
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert loaded["a"].untyped_storage().nbytes() == 4000
    loaded["c"].add_(1)  # no mapping that must not be written to


@pytest.mark.parametrize("size", [0, 10, 5000, 1_900_000])
def test_a_truncated_file_is_an_error_that_names_it(bucket: Bucket, engine: str, size: int, small_blocks: None) -> None:
    bucket.put("x.ckpt", serialized(STATE)[:size])
    with pytest.raises(
        RuntimeError, match=r"x\.ckpt is truncated" if size else r"x\.ckpt is no checkpoint: it is empty"
    ):
        load_file(f"{bucket.url}/x.ckpt")


def test_a_pickle_that_cannot_be_loaded_is_an_error_with_a_reason_that_says_something(bucket: Bucket) -> None:
    content = serialized({"name": "value"})
    bucket.put("x.ckpt", content.replace(b"X\5\0\0\0value", bytes(10)))
    with pytest.raises(RuntimeError, match=r"x\.ckpt is truncated, or .*: its data\.pkl cannot be loaded: KeyError: 0"):
        load_file(f"{bucket.url}/x.ckpt")


#: Files that are given for a checkpoint, and what is said of them.
KINDS = {
    "text": (b"epoch,loss\n1,2.5\n", "it begins with b'epoch,loss"),
    "page": (b"<!DOCTYPE html>\n<html>", "it looks like an HTML page. Download the file itself"),
    "gzip": (gzip.compress(serialized({})), "it looks like a file that is compressed with gzip. Unpack it"),
    "json": (b'{"a": 1}', "it looks like JSON"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Fetch the file with `git lfs pull`"),
    "safetensors": (bytes([2, *bytes(7)]) + b"{}", "it looks like safetensors"),
    "pickle": (pickle.dumps({"a": 1}), "it looks like a pickle that is not torch.save's"),
    "zeros": (bytes(2000), "it looks like nothing but zeros"),
    "nothing": (b"", "it is empty"),
}


@pytest.mark.parametrize(
    ("load", "options"),
    [(_load, {}), (_load, {"weights_only": False}), (_lazy_load, {}), (full_state.load_whole, {})],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_kind_is_said_to_be_none_in_one_error(
    kind: str, load: Any, options: dict[str, Any], bucket: Bucket, tmp_path: Path
) -> None:
    content, says = KINDS[kind]
    (tmp_path / "x.ckpt").write_bytes(content)
    bucket.put("x.ckpt", content)
    for path in (f"{tmp_path}/x.ckpt", f"{bucket.url}/x.ckpt"):
        with pytest.raises(RuntimeError, match=re.escape(f"{path} is no checkpoint: ")) as raised:
            load(path, **options)
        assert says in str(raised.value)
        assert "weights_only" not in "".join(traceback.format_exception(raised.value)).partition("RuntimeError: ")[2]


@pytest.mark.parametrize(
    ("kind", "load"),
    [
        *(("another archive", load) for load in (_load, _lazy_load, full_state.load_whole)),
        *(("truncated legacy", load) for load in (_load, _lazy_load)),
    ],
)
def test_what_could_be_torchs_and_cannot_be_loaded_is_named(
    kind: str, load: Any, bucket: Bucket, tmp_path: Path
) -> None:
    archive = io.BytesIO()
    np.savez(archive, w=np.ones(3))
    content = archive.getvalue()
    if kind == "truncated legacy":
        content = serialized(STATE, _use_new_zipfile_serialization=False)[:200]
    (tmp_path / "x.ckpt").write_bytes(content)
    bucket.put("x.ckpt", content)
    for path in (f"{tmp_path}/x.ckpt", f"{bucket.url}/x.ckpt"):
        with pytest.raises(RuntimeError, match=re.escape(f"{path} is truncated, or is no checkpoint: ")):
            load(path)


@pytest.mark.parametrize("name", ["missing.ckpt", "folder", "sharded"])
def test_what_is_no_file_is_one_error_without_those_of_clients(name: str, bucket: Bucket, engine: str) -> None:
    bucket.put("folder/x", b"")
    bucket.put("sharded/meta.pt", b"")
    with pytest.raises(OSError, match=f"{bucket.url}/{name}") as raised:
        load_file(f"{bucket.url}/{name}")
    assert "".join(traceback.format_exception(raised.value)).count("Traceback") == 1


def test_advice_about_what_a_checkpoint_must_not_contain_is_given_once(tmp_path: Path) -> None:
    torch.save({"path": tmp_path}, tmp_path / "x.ckpt")
    with pytest.raises(pickle.UnpicklingError, match=r"Could not load .*x\.ckpt: Weights only load failed") as raised:
        _load(tmp_path / "x.ckpt", weights_only=True)
    assert "".join(traceback.format_exception(raised.value)).count("Weights only load failed") == 1


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(bucket: Bucket, engine: str, small_blocks: None) -> None:
    bucket.put("x.ckpt", serialized(STATE))
    gets = 0

    def replace(method: str, path: str) -> None:
        nonlocal gets
        gets += method == "GET"
        if gets == 5:
            bucket.put("x.ckpt", serialized({name: -tensor for name, tensor in STATE.items()}))

    with bucket.refusing(replace), pytest.raises(OSError, match=r"x\.ckpt: it was replaced while it was read"):
        load_file(f"{bucket.url}/x.ckpt")


def test_a_replaced_object_is_noticed_where_the_store_has_no_strong_etags(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    ask = obstore_reader.ObstoreSource._ask

    def weakly(source: obstore_reader.ObstoreSource) -> Any:
        size, etag, modified = ask(source)
        return size, f"W/{etag}", modified

    monkeypatch.setattr(obstore_reader.ObstoreSource, "_ask", weakly)
    bucket.put("x.ckpt", serialized(STATE))
    assert same(load_file(f"{bucket.url}/x.ckpt"), STATE)

    def replace(method: str, path: str) -> None:
        if len(bucket.requests) > 8:
            bucket.put("x.ckpt", serialized({name: -tensor for name, tensor in STATE.items()}))

    with bucket.refusing(replace), pytest.raises(OSError, match=r"x\.ckpt: it was replaced while it was read"):
        load_file(f"{bucket.url}/x.ckpt")


@pytest.mark.usefixtures("impatient", "small_blocks")
def test_a_file_that_becomes_shorter_while_it_is_read_is_said_to_be_replaced_at_once(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests cannot ask for a version, what is missing at the end looks like a connection that broke."""
    ask = obstore_reader.ObstoreSource._ask
    monkeypatch.setattr(obstore_reader.ObstoreSource, "_ask", lambda source: (*ask(source)[:1], None, *ask(source)[2:]))
    bucket.put("x.ckpt", serialized(STATE))
    shorter = serialized(STATE)[:-100]

    def replace(method: str, path: str) -> None:
        if len(bucket.requests) == 2:
            bucket.put("x.ckpt", shorter)

    with bucket.refusing(replace), pytest.raises(OSError, match=r"x\.ckpt: it was replaced while it was read"):
        load_file(f"{bucket.url}/x.ckpt")


def test_a_large_pickle_is_read_in_parallel_as_well(small_blocks: None) -> None:
    source = Bytes(serialized({**STATE, "text": random.Random(0).randbytes(2_000_000)}))
    with RangedFile(source) as file:
        load_module._expect_records(file)
        file.seek(0)
        assert len(torch.load(file, weights_only=False)["text"]) == 2_000_000
    assert max(stop - start for start, stop in source.ranges) <= ranged_file.REQUEST
    assert source.count < source.size + 3 * load_module.TAIL


def test_a_read_that_fails_for_a_moment_is_tried_again(bucket: Bucket, engine: str, small_blocks: None) -> None:
    bucket.put("x.ckpt", serialized(STATE))
    gets = 0

    def fail(method: str, path: str) -> int | None:
        nonlocal gets
        gets += method == "GET"
        return 503 if method == "GET" and gets % 4 == 1 else None

    with bucket.refusing(fail):
        assert same(load_file(f"{bucket.url}/x.ckpt"), STATE)
    assert gets > 4


def test_a_read_that_is_refused_is_an_error_that_names_the_file(bucket: Bucket, engine: str) -> None:
    bucket.put("x.ckpt", serialized(STATE))
    with (
        bucket.refusing(lambda method, path: 403 if method == "GET" else None),
        pytest.raises(PermissionError, match=f"Could not read {bucket.url}/x.ckpt: "),
    ):
        load_file(f"{bucket.url}/x.ckpt")


def test_the_store_is_asked_for_nothing_that_a_read_does_not_need(bucket: Bucket) -> None:
    save_file({"w": torch.randn(100)}, f"{bucket.url}/x.ckpt")
    before = len(bucket.requests)
    load_file(f"{bucket.url}/x.ckpt")
    assert [method for method, _ in bucket.requests[before:]] == ["HEAD", "GET"]


def test_lazy_loading_reads_only_what_is_asked_for(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Bytes(serialized(STATE))
    monkeypatch.setattr(checkpoint_file, "open_reader", lambda place: RangedFile(source))
    lazy = _lazy_load("memory://x.ckpt")
    assert source.count < 2**17
    assert torch.equal(lazy["w4"]._load_tensor(), STATE["w4"])
    assert source.count < 2**17 + 2 * 200_000


def test_a_lazily_loaded_file_of_a_store_can_be_read_as_long_as_its_tensors_live(bucket: Bucket, engine: str) -> None:
    save_file(STATE, f"{bucket.url}/x.ckpt")
    lazy = _lazy_load(f"{bucket.url}/x.ckpt")
    assert all(torch.equal(lazy[name]._load_tensor(), tensor) for name, tensor in STATE.items())


def test_map_location_and_weights_only_mean_what_they_do_to_torch(bucket: Bucket) -> None:
    save_file({"w": torch.ones(3), "path": Path("x")}, f"{bucket.url}/x.ckpt")
    assert load_file(f"{bucket.url}/x.ckpt", map_location="meta", weights_only=False)["w"].device.type == "meta"
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load_file(f"{bucket.url}/x.ckpt", weights_only=True)


def test_an_open_file_is_loaded_as_it_is() -> None:
    assert same(_load(io.BytesIO(serialized(STATE))), STATE)


class Website(SimpleHTTPRequestHandler):
    """Serves a folder, and ranges of its files if it is told to."""

    protocol_version = "HTTP/1.1"
    server: Any

    def send_head(self) -> Any:
        path = Path(self.translate_path(self.path))
        self.server.requests.append((self.command, self.headers.get("Range")))
        if self.server.statuses:
            return self.send_error(self.server.statuses.pop())
        if not self.server.ranges or not path.exists():
            return super().send_head()
        data = path.read_bytes()
        span = self.headers.get("Range", f"bytes=0-{len(data) - 1}").removeprefix("bytes=").split("-")
        part = data[int(span[0]) : int(span[1]) + 1]
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {span[0]}-{span[1]}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        return io.BytesIO(part)

    def log_message(self, *arguments: Any) -> None:
        """Requests are kept in a list instead."""


@pytest.fixture
def website(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    """Serves the folder ``tmp_path``."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), partial(Website, directory=os.fspath(tmp_path)))
    server.ranges, server.statuses, server.requests, server.url = (
        False,
        [],
        [],
        f"http://127.0.0.1:{server.server_port}",
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("status", "kind"), [(401, PermissionError), (403, PermissionError), (404, FileNotFoundError), (418, OSError)]
)
def test_a_website_that_refuses_is_not_taken_for_one_that_lacks_the_file(
    website: Any, status: int, kind: type[OSError]
) -> None:
    website.statuses = [status] * 9
    with pytest.raises(kind, match=r"x\.ckpt") as raised:
        _load(f"{website.url}/x.ckpt")
    assert type(raised.value) is kind


def test_a_website_that_is_busy_is_asked_again(website: Any, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x.ckpt")
    website.statuses = [503, 503]
    assert same(_load(f"{website.url}/x.ckpt"), STATE)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_website_is_read_every_time(website: Any, tmp_path: Path, ranges: bool) -> None:
    website.ranges = ranges
    for value in (1, 2):
        torch.save({"w": torch.tensor(value), "path": Path("x")}, tmp_path / "x.ckpt")
        assert (
            _load(f"{website.url}/x.ckpt")["w"] == value
        )  # weights_only is False for websites, unless it is asked for
    with pytest.raises(pickle.UnpicklingError):
        _load(f"{website.url}/x.ckpt", weights_only=True)
    with pytest.raises(FileNotFoundError, match=r"y\.ckpt"):
        _load(f"{website.url}/y.ckpt")


def test_a_website_that_serves_ranges_is_read_in_parallel(website: Any, tmp_path: Path, small_blocks: None) -> None:
    website.ranges = True
    (tmp_path / "x.ckpt").write_bytes(serialized(STATE))
    assert same(_load(f"{website.url}/x.ckpt"), STATE)
    assert len([span for method, span in website.requests if method == "GET" and span]) > 5


def test_a_local_file_whose_name_starts_like_a_url_is_a_local_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(STATE, "http_model.ckpt")
    assert same(_load("http_model.ckpt"), STATE)


def test_a_store_that_is_out_of_reach_is_told_of_before_it_is_given_up(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, impatient: None
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("lightning.fabric.storage.transport.threads._PATIENCE_WITH_STORES_S", 0.2)
    with pytest.raises(ConnectionError, match="Connection refused") as raised:
        load_file(f"{bucket.url}/x.ckpt")
    assert "is the endpoint right?" in caplog.text
    assert "max_retries" not in str(raised.value)


def test_a_closed_file_leaves_no_thread_behind(small_blocks: None) -> None:
    file = RangedFile(Bytes(bytes(1_000_000)))
    file.expect([(0, 1_000_000)])
    file.read(1)
    file.close()
    deadline = time.monotonic() + 5
    while any("checkpoint-read" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any("checkpoint-read" in thread.name for thread in threading.enumerate())


def test_storage_options_reach_the_file_system(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options = {"endpoint_url": bucket.server.endpoint, "key": "other", "secret": "words"}
    plugin = TorchCheckpointIO()
    plugin.save_checkpoint(dict(STATE), f"{bucket.url}/x.ckpt", storage_options=options)
    assert same(plugin.load_checkpoint(f"{bucket.url}/x.ckpt", storage_options=options), STATE)
    plugin.remove_checkpoint(f"{bucket.url}/x.ckpt", storage_options=options)
    assert bucket.names() == []
    with pytest.raises(TypeError, match="Storage options are a dictionary"):
        plugin.save_checkpoint(dict(STATE), f"{bucket.url}/x.ckpt", storage_options="key=secret")


def test_an_open_reader_of_a_folder_says_so(bucket: Bucket, engine: str) -> None:
    bucket.put("folder/x", b"")
    with pytest.raises(IsADirectoryError, match="folder"):
        open_reader(locate(f"{bucket.url}/folder"))
