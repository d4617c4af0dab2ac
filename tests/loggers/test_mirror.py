"""Copies of what grows: what goes to the store, and how much of it."""

import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning.fabric.loggers import growing_files
from lightning.fabric.loggers import mirror as module
from lightning.fabric.loggers.logs import LogFiles, has_entries, make_folder, next_version, path_or_url
from lightning.fabric.loggers.mirror import Mirror
from lightning.fabric.storage.paths.location import locate
from tests.servers import Bucket
from tests.storage.places import Memory

EVENTS = "events.out.tfevents.1.host.2.3"


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The name and the size of all that was sent, in order."""
    uploads = []
    real = module.open_writer

    def open_writer(place: Any) -> Any:
        context = real(place)

        class Counting:
            def __enter__(self) -> Any:
                self.sink = context.__enter__()
                return self.sink

            def __exit__(self, *error: Any) -> Any:
                uploads.append((str(place).rpartition("/")[2], self.sink.tell()))
                return context.__exit__(*error)

        return Counting()

    monkeypatch.setattr(module, "open_writer", open_writer)
    return uploads


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still unless it is told."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(growing_files, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def url() -> Iterator[str]:
    MemoryFileSystem.store.clear()
    yield "memory://logs/run"
    MemoryFileSystem.store.clear()


def record(content: bytes) -> bytes:
    """Framed as in a file of events; nobody here reads the checksums."""
    return struct.pack("<QI", len(content), 0) + content + bytes(4)


def a_round(mirror: Mirror) -> None:
    """What the mirror's thread does every half a minute."""
    assert mirror._copies.send_or_log(everything=False)


def append(mirror: Mirror, name: str, content: bytes) -> None:
    with open(mirror.folder / name, "ab") as file:
        file.write(content)


def copies(prefix: str = "logs/run/") -> dict[str, bytes]:
    memory = Memory()
    return {name.removeprefix(prefix): memory.get(name) for name in memory.names() if name.startswith(prefix)}


def test_segments_hold_each_record_once_and_begin_with_the_version(
    url: str, clock: SimpleNamespace, sent: list[tuple[str, int]]
) -> None:
    mirror = Mirror(locate(url))
    head, records = record(b"version"), [record(b"%6d" % number * 2000) for number in range(1000)]
    append(mirror, EVENTS, head)
    for content in records:
        append(mirror, EVENTS, content)
        a_round(mirror)
    mirror.drain()
    segments = [content for _, content in sorted(copies().items())]  # as TensorBoard reads them
    assert len(segments) > 5
    assert all(segment.startswith(head) for segment in segments)
    assert b"".join(segment.removeprefix(head) for segment in segments) == b"".join(records)
    size = sum(map(len, records))
    assert sum(size for _, size in sent) < 9 * size  # uploaded whole at each of these rounds: 500 times
    assert len({name for name, _ in sent}) == len(segments)


def test_a_record_that_is_being_written_is_not_sent_yet(url: str) -> None:
    mirror = Mirror(locate(url))
    whole, torn = record(b"version"), record(b"later")
    append(mirror, EVENTS, whole + torn[:20])
    mirror.drain()
    assert copies() == {EVENTS: whole}
    append(mirror, EVENTS, torn[20:])
    mirror.drain()
    assert copies() == {EVENTS: whole + torn}


def test_a_burst_of_events_goes_in_segments_of_bounded_size_each_once(url: str, sent: list[tuple[str, int]]) -> None:
    mirror = Mirror(locate(url))
    records = [record(bytes(2**20)) for _ in range(20)]
    append(mirror, EVENTS, b"".join(records))
    mirror.drain()
    assert [size for _, size in sent] == [8 * len(records[0]), 9 * len(records[0]), 5 * len(records[0])]


def test_a_whole_file_is_sent_a_bounded_number_of_times(
    url: str, clock: SimpleNamespace, sent: list[tuple[str, int]]
) -> None:
    mirror = Mirror(locate(url))
    for _ in range(1000):
        append(mirror, "metrics.csv", bytes(5000))
        a_round(mirror)
    assert 20 < len(sent) < 100
    assert sum(size for _, size in sent) < 9 * 5_000_000
    assert sent[-1][1] > 5_000_000 * 6 / 7 - 5000  # what lags behind is an eighth


def test_a_slow_log_lags_no_more_than_four_minutes_per_mib(
    url: str, clock: SimpleNamespace, sent: list[tuple[str, int]]
) -> None:
    mirror = Mirror(locate(url))
    append(mirror, "metrics.csv", bytes(2**20))
    times = []
    for clock.now in range(0, 30 * 200, 30):
        append(mirror, "metrics.csv", b"1\n")
        before = len(sent)
        a_round(mirror)
        times += [clock.now] * (len(sent) - before)
    steady = times[len(times) // 2 :]
    assert max(after - before for before, after in pairwise(steady)) <= 270


def test_a_file_that_did_not_change_is_not_sent_again(url: str, sent: list[tuple[str, int]]) -> None:
    mirror = Mirror(locate(url))
    append(mirror, "metrics.csv", b"1")
    append(mirror, EVENTS, record(b"version"))
    for _ in range(3):
        mirror.drain()
    assert len(sent) == 2


def test_the_first_failure_is_raised_and_later_ones_are_warnings_until_it_works(
    bucket: Bucket, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = Mirror(locate(f"{bucket.url}/run"))
    append(mirror, "metrics.csv", b"1")
    with bucket.refusing(lambda method, path: 403):
        with pytest.raises(PermissionError, match=r"run/metrics\.csv"):
            mirror.flush()
        mirror.flush()  # goes on in the thread
        assert caplog.messages == []
        mirror.drain()
    # the reason is not given again
    assert caplog.messages == [f"Logs are still not up to date in {bucket.url}/run (PermissionError)"]
    mirror.drain()
    assert bucket.get("run/metrics.csv") == b"1"
    append(mirror, "metrics.csv", b"2")
    with bucket.refusing(lambda method, path: 403):
        mirror.drain()
    assert "metrics.csv" in caplog.messages[-1]  # for it has worked meanwhile


def test_what_cannot_be_copied_at_the_end_stays_in_a_folder_that_is_named(
    bucket: Bucket, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = Mirror(locate(f"{bucket.url}/run"))
    append(mirror, "metrics.csv", b"1")
    mirror.flush()
    append(mirror, "metrics.csv", b"2")
    copied, folder = mirror._copies, mirror.folder
    with bucket.refusing(lambda method, path: 403):
        del mirror
        copied.join()
    assert (folder / "metrics.csv").read_bytes() == b"12"
    assert f"stays in {folder}" in caplog.text


def test_a_mirror_that_is_no_longer_used_copies_the_rest_and_removes_its_folder(url: str) -> None:
    mirror = Mirror(locate(url))
    mirror.flush()
    append(mirror, "metrics.csv", b"12")
    copied, folder = mirror._copies, mirror.folder
    del mirror
    copied.join()
    assert copies() == {"metrics.csv": b"12"}
    assert not folder.exists()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lightning-logs"]


def test_a_mirror_has_no_thread_between_a_drain_and_the_next_flush(url: str) -> None:
    before = threads()
    mirror = Mirror(locate(url))
    for number in range(2):
        append(mirror, "metrics.csv", b"%d" % number)
        mirror.flush()
        (thread,) = set(threads()) - set(before)
        append(mirror, "metrics.csv", b"+")
        mirror.drain()
        thread.join(10)
        assert set(threads()) <= set(before)  # one of an earlier test may have ended meanwhile
    assert copies() == {"metrics.csv": b"0+1+"}
    folder = mirror.folder
    del mirror
    assert not folder.exists()


def test_what_could_not_be_copied_by_a_drain_is_tried_again_by_a_thread(bucket: Bucket, impatient: None) -> None:
    before = threads()
    mirror = Mirror(locate(f"{bucket.url}/run"))
    mirror.drain()
    append(mirror, "metrics.csv", b"1")
    with bucket.refusing(lambda method, path: 403):
        mirror.drain()
    (thread,) = set(threads()) - set(before)
    del mirror
    thread.join(10)
    assert bucket.get("run/metrics.csv") == b"1"


def test_the_end_of_the_interpreter_copies_the_rest(bucket: Bucket) -> None:
    script = f"""
from lightning.fabric.loggers.mirror import Mirror
from lightning.fabric.storage.paths.location import locate
used = []
for last, is_used in [("flush", True), ("drain", True), ("drain", False)]:
    mirror = Mirror(locate(f"{bucket.url}/{{last}}-{{is_used}}"))
    (mirror.folder / "a").write_text("1")
    getattr(mirror, last)()
    (mirror.folder / "a").write_text("12")
    print(mirror.folder)
    if is_used:
        used.append(mirror)
    del mirror
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    for run in ("flush-True", "drain-True", "drain-False"):
        assert bucket.get(f"{run}/a") == b"12"
    folders = done.stdout.split()
    assert len(folders) == 3
    assert not any(Path(folder).exists() for folder in folders)


def test_a_handler_of_a_signal_that_comes_amidst_copying_does_not_wait_for_itself(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(locate(url))
    append(mirror, "a", b"1")
    real, calls = module.open_writer, count()

    def interrupted(place: Any) -> Any:
        if next(calls) == 0:
            mirror.drain()
        return real(place)

    monkeypatch.setattr(module, "open_writer", interrupted)
    mirror.drain()
    assert copies() == {"a": b"1"}
    assert next(calls) == 1


def test_a_pickled_mirror_goes_on_with_the_files_but_not_with_the_events(url: str) -> None:
    mirror = Mirror(locate(url))
    append(mirror, "metrics.csv", b"1")
    append(mirror, EVENTS, record(b"version"))
    other = pickle.loads(pickle.dumps(mirror))
    assert copies() == {"metrics.csv": b"1", EVENTS: record(b"version")}
    append(other, "metrics.csv", b"2")
    other.drain()
    assert copies() == {"metrics.csv": b"12", EVENTS: record(b"version")}


@pytest.mark.parametrize("remote", [False, True])
def test_versions_are_counted_from_what_is_there_now(remote: bool, tmp_path: Path, bucket: Bucket) -> None:
    folder = f"{bucket.url}/logs" if remote else str(tmp_path / "logs")

    def put(name: str) -> None:
        if remote:
            bucket.put(f"logs/{name}", b"1")
        else:
            (tmp_path / "logs" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "logs" / name).write_bytes(b"1")

    assert next_version(folder) == 0
    assert not has_entries(folder)
    put("version_0/metrics.csv")
    assert next_version(folder) == 1
    for name in ("version_9/metrics.csv", "version_10/metrics.csv", "version_x/a", "version_11", "other_12/a"):
        put(name)
    assert next_version(folder) == 11  # version_11 is a file
    assert has_entries(folder)


def test_a_listing_that_is_denied_is_no_first_version(bucket: Bucket) -> None:
    with bucket.refusing(lambda method, path: 403), pytest.raises(PermissionError):
        next_version(f"{bucket.url}/logs")


def test_no_bucket_is_made_for_logs(bucket: Bucket) -> None:
    make_folder(f"s3://missing-{bucket.name}/logs")
    assert f"missing-{bucket.name}" not in [found["Name"] for found in bucket.server.client.list_buckets()["Buckets"]]


def test_only_paths_that_stand_for_urls_become_text(tmp_path: Path) -> None:
    assert path_or_url(tmp_path) is tmp_path
    assert path_or_url("./logs/") == "./logs/"
    assert path_or_url(Path("s3://bucket/logs")) == "s3://bucket/logs"
    assert path_or_url("s3://bucket/logs/") == "s3://bucket/logs/"
    assert path_or_url(f"file://{tmp_path}") == str(tmp_path)


def test_a_file_is_not_copied_while_it_is_being_rewritten(url: str) -> None:
    files = LogFiles(url)
    assert files._mirror is not None
    changing: Any = files._mirror.changing

    def can_be_read() -> bool:
        """By the thread that copies."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: changing.acquire(blocking=False) and changing.release() is None).result()

    with files.open(f"{url}/metrics.csv", "w", newline="") as file:
        file.write("a,b\r\n")
        assert not can_be_read()
    assert can_be_read()
    files.drain()
    assert copies() == {"metrics.csv": b"a,b\r\n"}
