"""Uploads to S3 in parts, by obstore and by s3fs."""

import gc
import io
import logging
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs
import torch
from botocore.exceptions import ClientError
from fsspec.implementations.memory import MemoryFileSystem

from lightning.fabric.storage.archives import tensor_bytes
from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.collectives.rank_group import RankGroup
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import StorePlace
from lightning.fabric.storage.save_report import SaveReport, reporting
from lightning.fabric.storage.sharded.save_planner import PlanCache, Shard
from lightning.fabric.storage.sharded.writer import ShardWriter
from lightning.fabric.storage.transport import multipart, retry
from lightning.fabric.storage.transport import open as transport
from lightning.fabric.storage.transport.sink import Sink
from tests.servers import SECRET, Bucket, Fault, demand_equal_parts
from tests.storage.uploads import InWholeParts, Kept, To

_MIB = 2**20
STATE = {"w": torch.arange(100_000, dtype=torch.float32), "step": torch.tensor(3)}
LARGE = {"w": torch.randn(4 * _MIB)}


@pytest.fixture(autouse=True, params=["obstore", "s3fs"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What uploads; with parts of the smallest size that S3 allows."""
    if request.param == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(multipart, "SMALLEST_PART", 5 * _MIB)
    return str(request.param)


@pytest.fixture
def one_try_of_the_client(impatient: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """s3fs and botocore each have retries of their own, below ours."""
    monkeypatch.setattr(retry, "DEADLINE_S", 2)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    (tmp_path / "config").write_text("[default]\nmax_attempts = 1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def part_of(path: str) -> str:
    return path.partition("partNumber=")[2].partition("&")[0]


def test_a_large_file_goes_up_in_parts(bucket: Bucket) -> None:
    save_file(LARGE, f"{bucket.url}/x")
    assert {part_of(path) for method, path in bucket.requests if method == "PUT"} == {"1", "2", "3", "4"}
    assert torch.equal(load_file(f"{bucket.url}/x")["w"], LARGE["w"])


def test_a_small_file_goes_up_with_one_request(bucket: Bucket) -> None:
    save_file(STATE, f"{bucket.url}/run/x.ckpt")
    assert [method for method, _ in bucket.requests] == ["PUT"]


def test_an_empty_file_is_an_object_too(bucket: Bucket) -> None:
    with transport.open_writer(locate(f"{bucket.url}/x")):
        pass
    assert bucket.get("x") == b""


@pytest.mark.parametrize("refused", ["uploads", "partNumber=2", "uploadId"])
def test_a_request_that_is_refused_aborts_the_upload_and_leaves_the_old_file(bucket: Bucket, refused: str) -> None:
    bucket.put("x", b"the old one")

    def refuse(method: str, path: str) -> int | None:
        last = method == "POST" and "uploadId" in path
        return 403 if method != "DELETE" and (last if refused == "uploadId" else refused in path) else None

    with bucket.refusing(refuse), pytest.raises(PermissionError, match=f"Could not write {bucket.url}/x") as raised:
        save_file(LARGE, f"{bucket.url}/x")
    assert "What was there before, if anything, is unchanged" in str(raised.value)
    assert "refused" in str(raised.value)  # the store's own word
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("Traceback") == 1
    assert SECRET not in shown
    assert bucket.get("x") == b"the old one"
    assert bucket.unfinished_uploads() == []


def test_a_fault_in_a_client_is_shown_with_its_own_traceback(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: Any) -> Any:
        raise TypeError("such as an argument too many")

    monkeypatch.setattr(transport, "_backend", faulty)
    with pytest.raises(OSError, match="TypeError: such as an argument") as raised:
        save_file(STATE, f"{bucket.url}/x")
    assert "in faulty\n" in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("refused", ["", "uploads", "partNumber=2", "uploadId"])
def test_what_fails_for_a_moment_is_tried_again(bucket: Bucket, refused: str) -> None:
    failures = 0

    def fail_twice(method: str, path: str) -> int | None:
        nonlocal failures
        hit = method in ("PUT", "POST") and (refused in path if refused != "uploadId" else method == "POST")
        failures += hit
        return 503 if hit and failures <= 2 else None

    state = LARGE if refused else STATE
    with bucket.refusing(fail_twice):
        save_file(state, f"{bucket.url}/x")
    assert failures > 2
    assert torch.equal(load_file(f"{bucket.url}/x")["w"], state["w"])
    assert bucket.unfinished_uploads() == []


def test_a_save_counts_what_was_tried_again_where_the_client_tells(bucket: Bucket, engine: str) -> None:
    answers = [503, 503]
    report = SaveReport(locate(f"{bucket.url}/x"))
    rule = bucket.refusing(lambda _, path: answers.pop() if "partNumber=2" in path and answers else None)
    with rule, reporting(report):
        save_file(LARGE, f"{bucket.url}/x")
    assert answers == []
    assert report.line().endswith({"s3fs": ", at least 2 retries", "obstore": " MiB/s"}[engine])


def test_a_store_that_stays_out_of_order_is_an_error_that_tells_how_often_it_was_asked(
    bucket: Bucket, one_try_of_the_client: None
) -> None:
    bucket.put("x", b"the old one")
    with (
        bucket.refusing(lambda method, path: 503 if method == "PUT" else None),
        pytest.raises(OSError, match=rf"{bucket.url}/x: .*(tried|retries)") as raised,
    ):
        save_file(STATE, f"{bucket.url}/x")
    assert "PUT" in str(raised.value) or "PutObject" in str(raised.value)
    assert "refused" in str(raised.value)  # the store's own word
    assert bucket.get("x") == b"the old one"


def test_a_commit_whose_answer_is_lost_is_a_success(bucket: Bucket) -> None:
    bucket.put("x", b"the old one")
    commits = 0

    def lose_the_first(method: str, path: str) -> Fault | int | None:
        nonlocal commits
        if method != "POST" or "uploadId" not in path:
            return None
        commits += 1
        return Fault.LOST if commits == 1 else 404  # as S3 answers; moto would commit again

    with bucket.refusing(lose_the_first):
        save_file(LARGE, f"{bucket.url}/x")
    assert commits > 1
    assert torch.equal(load_file(f"{bucket.url}/x")["w"], LARGE["w"])


def test_an_upload_that_is_gone_when_it_is_to_be_committed_is_an_error(
    bucket: Bucket, one_try_of_the_client: None
) -> None:
    save_file({"w": -LARGE["w"]}, f"{bucket.url}/x")  # of the same size, and in as many parts

    def remove_upload(method: str, path: str) -> None:
        if method == "POST" and "uploadId" in path:
            upload = path.partition("uploadId=")[2].partition("&")[0]
            with suppress(ClientError):  # it may be tried again
                bucket.server.client.abort_multipart_upload(Bucket=bucket.name, Key="x", UploadId=upload)

    with bucket.refusing(remove_upload), pytest.raises(OSError, match="It may have been written all the same"):
        save_file(LARGE, f"{bucket.url}/x")
    assert torch.equal(load_file(f"{bucket.url}/x")["w"], -LARGE["w"])


def test_a_save_waits_for_an_interrupted_one_that_could_still_replace_it(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    if engine == "s3fs":
        pytest.skip("its requests can be cancelled")
    monkeypatch.setattr("lightning.fabric.storage.transport.backends.obstore._PATIENCE_S", 0.1)
    monkeypatch.setattr("lightning.fabric.storage.transport.backends.obstore._LONGEST_WAIT_S", 0.1)
    committing, goes_on = threading.Event(), threading.Event()

    def hold_commit(method: str, path: str) -> None:
        if method == "POST" and "uploadId" in path and not committing.is_set():
            committing.set()
            goes_on.wait(30)

    def interrupt_and_go_on() -> None:
        committing.wait(30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(1)
        goes_on.set()

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt_and_go_on)
    thread.start()
    try:
        with bucket.refusing(hold_commit):
            with pytest.raises(KeyboardInterrupt):
                save_file({"w": -LARGE["w"]}, f"{bucket.url}/x")
            save_file(LARGE, f"{bucket.url}/x")
    finally:
        signal.signal(signal.SIGINT, previous)
        thread.join()
    assert torch.equal(load_file(f"{bucket.url}/x")["w"], LARGE["w"])


@pytest.mark.parametrize("has_started", [True, False])
def test_ctrl_c_while_an_upload_is_being_started_takes_it_back(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, engine: str, has_started: bool
) -> None:
    if engine == "s3fs":
        pytest.skip("has no thread for each upload")
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        is_upload = thread.name == "checkpoint-upload"
        if has_started or not is_upload:
            start(thread)
        if is_upload:
            raise KeyboardInterrupt

    def save() -> None:
        with transport.open_writer(locate(f"{bucket.url}/x")):
            pass  # the upload of an empty file starts at its end

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            save()
    assert bucket.names() == []
    save()  # does not wait for the other


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as a DTensor is."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        wrapper: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Wrapper, (self.inner,)


def test_tensors_of_every_kind_can_be_saved(bucket: Bucket) -> None:
    state = {
        "uninitialized": torch.nn.LazyLinear(3).state_dict(),
        "wrapper": Wrapper(LARGE["w"]),
        "sparse": torch.eye(600).to_sparse(),
        "meta": torch.empty(2**40, device="meta"),
        "views": list(LARGE["w"].split(1000)),
    }
    save_file(state, f"{bucket.url}/x")
    loaded = load_file(f"{bucket.url}/x", weights_only=False)
    assert torch.equal(loaded["wrapper"].inner, LARGE["w"])
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(600))
    assert torch.equal(torch.cat(loaded["views"]), LARGE["w"])


def test_the_default_device_of_the_caller_makes_no_difference(bucket: Bucket) -> None:
    with torch.device("meta"):
        save_file(LARGE, f"{bucket.url}/x")
    assert torch.equal(load_file(f"{bucket.url}/x")["w"], LARGE["w"])


def test_memory_that_tensors_share_is_announced_once() -> None:
    for sink in (Sink(To(io.BytesIO())), Sink(Kept())):
        whole = torch.zeros(10 * _MIB)
        for view in whole.split(1000):
            sink.announce(view.untyped_storage())
        assert sink.announced == whole.nbytes


def test_a_bucket_that_is_missing_leaves_no_doubt(bucket: Bucket) -> None:
    for state in (STATE, LARGE):
        with pytest.raises(FileNotFoundError, match="There is no bucket") as raised:
            save_file(state, f"{bucket.url}-missing/x")
        assert "may have been written" not in str(raised.value)
        assert "What was there before" not in str(raised.value)  # there was nothing


def test_an_interrupted_upload_is_taken_back_and_does_not_go_on_behind_the_callers_back(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart.Parts, "in_flight", lambda *_: 1)
    bucket.put("x", b"the old one")

    def slow(method: str, path: str) -> None:
        if part_of(path) == "2":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.5)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a Trainer of another test may have set one
    try:
        with bucket.refusing(slow), pytest.raises(KeyboardInterrupt):
            save_file(LARGE, f"{bucket.url}/x")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert bucket.unfinished_uploads() == []
    time.sleep(1)  # an upload that goes on would be complete by now
    assert bucket.get("x") == b"the old one"
    assert bucket.unfinished_uploads() == []


def test_a_file_that_was_given_up_is_not_completed_by_the_garbage_collector(bucket: Bucket) -> None:
    def give_up() -> None:
        with transport.open_writer(locate(f"{bucket.url}/x")) as file:
            file.write(b"x" * 20 * _MIB)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        give_up()
    gc.collect()
    assert bucket.names() == []
    assert bucket.unfinished_uploads() == []


def test_an_upload_that_cannot_be_taken_back_is_told_of(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    with (
        bucket.refusing(lambda method, path: 403 if part_of(path) == "2" or method == "DELETE" else None),
        pytest.raises(PermissionError),
        caplog.at_level(logging.WARNING),
    ):
        save_file(LARGE, f"{bucket.url}/x")
    assert "Could not abort the unfinished upload" in caplog.text
    assert bucket.unfinished_uploads() == ["x"]


def test_what_no_object_can_hold_is_refused_before_anything_is_sent(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(multipart.LARGEST_OBJECT, "S3", 10 * _MIB)
    with pytest.raises(OSError, match=r"more than the 10485760 that an object of S3 can have"):
        save_file(LARGE, f"{bucket.url}/x")
    assert bucket.requests == []


def test_a_file_whose_size_was_not_told_has_a_limit_as_well(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setattr(multipart, "MOST_PARTS", 2)
    monkeypatch.setitem(multipart.LARGEST_OBJECT, "S3", 10 * _MIB)
    with pytest.raises(OSError, match=r"Could not write .*(too large|more than the)"):
        save_file({"text": b"x" * 16 * _MIB}, f"{bucket.url}/x")
    assert bucket.names() == []
    assert bucket.unfinished_uploads() == []


@pytest.mark.parametrize("size", [0, 1, 32 * _MIB, 450 * 2**30, 5 * 2**40, multipart.LARGEST_OBJECT["S3"] * 9 // 10])
def test_parts_fit_the_limits_of_the_stores_at_any_size(size: int) -> None:
    part = multipart.part_size(size, multipart.SMALLEST_PART)
    assert part * 10_000 >= size
    assert 5 * _MIB <= part <= 5 * 2**30
    assert part % 2**18 == 0


@pytest.mark.parametrize("lean", [False, True])
def test_the_parts_of_many_files_are_larger_and_no_more_memory_is_on_its_way(lean: bool) -> None:
    few, many = (multipart.Parts.of(MemoryFileSystem(), lean, files) for files in (64, 1024))
    assert many.smallest == 3 * few.smallest
    in_flight = [one.in_flight(one.smallest) for one in (few, many)]
    assert in_flight == [8, 2]
    assert many.memory == few.memory >= in_flight[1] * many.smallest


def test_a_shard_of_a_large_job_goes_up_in_larger_parts_of_which_two_are_on_their_way(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "SMALLEST_LEAN_PART", 2 * _MIB)
    monkeypatch.setattr(tensor_bytes, "_PIECE", _MIB)
    place = locate(f"{bucket.url}/x.ckpt")
    report, lock, third = SaveReport(place), threading.Lock(), threading.Event()
    written: list[int] = []
    on_their_way = highest = 0

    def hold(method: str, path: str) -> None:
        nonlocal on_their_way, highest
        if not part_of(path):
            return
        with lock:
            on_their_way += 1
            highest = max(highest, on_their_way)
            if highest > 2:
                third.set()
        if len(written) < 2:
            third.wait(0.5)  # for nothing
            written.append(report.progress()[0])
        with lock:
            on_their_way -= 1

    group = RankGroup()
    group.world_size = 256  # of which the others have nothing to say
    with bucket.refusing(hold), reporting(report):
        shard = Shard.of({"w": torch.ones(12 * _MIB)}, None, group)
        ShardWriter(place, group).save(lambda: shard, PlanCache())
    parts = {part_of(path) for method, path in bucket.requests if method == "PUT"} - {""}
    assert len(parts) == 9  # of 6 MiB, and what is no tensor
    assert highest == 2
    assert written[0] < 20 * _MIB  # two parts, one that is being filled, and two pieces


class Extended(s3fs.S3FileSystem):
    """A class of somebody else's, which is given streams."""

    protocol = "extended"


@pytest.fixture
def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few MiB need larger parts than the smallest."""
    monkeypatch.setattr(multipart, "_PLANNED_PARTS", 4)
    monkeypatch.setattr(multipart, "SMALLEST_LEAN_PART", 5 * _MIB)


def write_piecemeal(url: Any, told: int, size: int = 16 * _MIB) -> None:
    with transport.open_writer(locate(url), lean=True) as file:
        file.expect(told)
        file.write(b"0123")
        for _ in range(size // _MIB):
            file.write(bytes(_MIB))


@pytest.mark.usefixtures("few_parts")
@pytest.mark.parametrize(("told", "parts"), [(28 * _MIB, 3), (0, 4)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (s3fs.S3FileSystem, {}),
        (s3fs.S3FileSystem, {"fixed_upload_size": True}),
        (Extended, {"fixed_upload_size": True}),
    ],
)
def test_all_parts_but_the_last_are_of_one_size(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, kind: type, told: int, parts: int, options: dict[str, Any]
) -> None:
    demand_equal_parts(monkeypatch)
    monkeypatch.setattr(StorePlace, "resolve", lambda place: (kind(**options), place.raw.removeprefix("s3://")))
    write_piecemeal(f"{bucket.url}/x", told)
    assert len(bucket.get("x")) == 16 * _MIB + 4
    assert {part_of(path) for _, path in bucket.requests} - {""} == {str(part + 1) for part in range(parts)}


@pytest.mark.parametrize("kind", [s3fs.S3FileSystem, Extended])
def test_more_parts_than_a_store_takes_are_an_error_before_they_are_sent(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    monkeypatch.setattr(multipart, "MOST_PARTS", 2)
    monkeypatch.setattr(multipart, "SMALLEST_LEAN_PART", 5 * _MIB)
    monkeypatch.setattr(StorePlace, "resolve", lambda place: (kind(), place.raw.removeprefix("s3://")))
    with pytest.raises(OSError, match=r"More than 2 parts of 5242880 bytes are needed.*Keep such data in tensors"):
        write_piecemeal(f"{bucket.url}/x", told=0, size=11 * _MIB)
    assert bucket.names() == []
    assert bucket.unfinished_uploads() == []
    assert not any(part_of(path) == "3" for _, path in bucket.requests)


@pytest.mark.parametrize("kind", [s3fs.S3FileSystem, Extended])
def test_parts_have_the_size_that_an_option_of_the_client_says(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    fs = kind(default_block_size=6 * _MIB)
    monkeypatch.setattr(StorePlace, "resolve", lambda place: (fs, place.raw.removeprefix("s3://")))
    for lean in (True, False):
        with transport.open_writer(locate(f"{bucket.url}/{lean}"), lean=lean) as file:
            file.write(bytes(13 * _MIB))
        sent = [part_of(path) for _, path in bucket.requests if path.startswith(f"/{bucket.name}/{lean}")]
        assert set(sent) - {""} == {"1", "2", "3"}


def test_no_more_requests_for_a_file_are_on_their_way_than_an_option_of_the_client_says(bucket: Bucket) -> None:
    lock, on_their_way, highest = threading.Lock(), 0, 0

    def hold(method: str, path: str) -> None:
        nonlocal on_their_way, highest
        with lock:
            on_their_way += 1
            highest = max(highest, on_their_way)
        time.sleep(0.1)
        with lock:
            on_their_way -= 1

    place = locate(f"{bucket.url}/x", {"max_concurrency": 2})
    bucket.server.client.put_object(Bucket=bucket.name, Key="y", Body=bytes(32 * _MIB))
    with bucket.refusing(hold):
        save_file({"w": torch.zeros(6 * _MIB)}, place, place.options)
        assert highest == 2
        highest = 0
        with transport.open_reader(locate(f"{bucket.url}/y", place.options)) as file:
            assert len(file.read(32 * _MIB)) == 32 * _MIB
        assert highest == 2


def test_pieces_stay_what_they_were_when_torch_uses_its_buffers_again() -> None:
    kept = Kept()
    sink = Sink(kept)
    state = {str(i): torch.full((2**i,), i, dtype=torch.int64) for i in range(18)}
    for tensor in state.values():
        sink.announce(tensor.untyped_storage())
    torch.save(state, sink)
    sink.commit()
    del state
    gc.collect()
    (np.zeros(50 * _MIB, np.uint8) + 1).sum()  # takes memory that has been given back
    loaded = torch.load(io.BytesIO(kept.content))
    assert all(torch.equal(loaded[str(i)], torch.full((2**i,), i, dtype=torch.int64)) for i in range(18))


def test_the_memory_of_a_large_tensor_is_sent_as_it_is_and_not_copied() -> None:
    kept = Kept()
    sink = Sink(kept)
    tensor = torch.zeros(_MIB)
    sink.announce(tensor.untyped_storage())
    sink.write(memoryview(tensor.numpy()))
    assert np.frombuffer(kept.pieces[0], np.uint8).ctypes.data == tensor.data_ptr()
    sink.write(memoryview(tensor.clone().numpy()))  # nobody has announced this one
    assert np.frombuffer(kept.pieces[1], np.uint8).ctypes.data != tensor.data_ptr()


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (PermissionError("denied"), False),
        (ValueError(), False),
    ],
)
def test_what_passes_is_told_from_what_stays(error: Exception, transient: bool) -> None:
    assert retry.is_transient(error) is transient


@pytest.mark.parametrize(("status", "transient"), [(408, True), (429, True), (503, True), (403, False), (501, False)])
def test_a_status_counts_however_a_client_carries_it(status: int, transient: bool) -> None:
    class ClientError(Exception):
        def __init__(self, **attributes: Any) -> None:
            self.__dict__.update(attributes)

    for attributes in (
        {"response": {"ResponseMetadata": {"HTTPStatusCode": status}}},
        {"status_code": status},
        {"status": status},
        {"code": str(status)},
    ):
        wrapped = OSError("the store is busy")
        wrapped.__cause__ = ClientError(**attributes)
        assert retry.is_transient(wrapped) is transient


def test_the_collector_sends_nothing_of_a_file_that_was_given_up() -> None:
    for backend in (Kept(), InWholeParts()):
        sink = Sink(backend)
        sink.write(b"the beginning")
        del sink
        gc.collect()
        assert backend.pieces == []
