"""What holds for the stores of every kind; S3's stand for all."""

import gc
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import obstore
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from lightning_utilities.core.imports import RequirementCache

from lightning.fabric.storage.transport import retry
from lightning.fabric.storage.transport.backends import obstore_config
from lightning.fabric.storage.transport.backends.obstore_config import common, native_store
from tests.storage.transport.obstore_config.recorder import Recorder

KEYS = {"key": "AKIAOPTION", "secret": "correct-horse-battery-staple"}
Told = Callable[[], list[str]]


def file_system(url: str, **options: Any) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(endpoint_url=url, skip_instance_cache=True, **{**KEYS, **options})


def store_of(fs: s3fs.S3FileSystem, bucket: str = "bucket", reading: bool = False) -> Any:
    native = native_store(fs, f"{bucket}/x", reading)
    assert native is not None
    return native[0]


def test_a_store_is_kept_for_each_file_system_bucket_and_use(records: Recorder) -> None:
    fs = file_system(records.url)
    different = [store_of(fs), store_of(fs, "other"), store_of(fs, reading=True), store_of(file_system(records.url))]
    assert len({id(store) for store in different}) == 4
    assert store_of(fs) is different[0]


def test_file_systems_with_equal_options_and_other_environments_are_told_apart(
    records: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = []
    for name in ("AKIAFIRST", "AKIASECOND"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", name)
        found.append(file_system(records.url, key=None, secret=None))
        obstore.put(store_of(found[-1]), "x", b"1")
    assert found[0] == found[1]
    assert [request.signer.split()[0] for request in records.requests] == ["AKIAFIRST", "AKIASECOND"]


def test_a_file_system_that_is_gone_leaves_no_store(records: Recorder) -> None:
    fs = file_system(records.url)
    store_of(fs)
    place = id(fs)
    assert place in obstore_config._stores
    del fs
    gc.collect()
    assert place not in obstore_config._stores


def test_a_file_system_that_connects_again_gets_a_new_store(records: Recorder) -> None:
    fs = file_system(records.url)
    before = store_of(fs)
    fs.key = "AKIANEW"
    fs.connect(refresh=True)
    assert store_of(fs) is not before
    obstore.put(store_of(fs), "x", b"1")
    assert records.requests[0].signer == "AKIANEW in us-east-1"


def test_a_request_is_repeated_after_a_transient_failure(records: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "DEADLINE_S", 10)
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    failures = iter([503, 500, 429])
    records.rule = lambda request: (status, {}) if (status := next(failures, None)) else None
    obstore.put(store_of(file_system(records.url)), "x", b"1")
    assert len(records.requests) == 4
    assert records.objects == {"bucket/x": b"1"}


def test_no_attempt_starts_after_the_deadline(records: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "DEADLINE_S", 0.3)
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 0.01)
    records.rule = lambda request: (503, {})
    store = store_of(file_system(records.url))
    started = time.monotonic()
    with pytest.raises(obstore.exceptions.GenericError, match="503"):
        obstore.put(store, "x", b"1")
    assert 0.2 < time.monotonic() - started < 3
    assert len(records.requests) > 15  # obstore's own limit of attempts is ten


@contextmanager
def silent_server() -> Iterator[tuple[str, list[socket.socket]]]:
    """Takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken: list[socket.socket] = []

        def serve() -> None:
            with suppress(OSError):  # which ends it
                while True:
                    taken.append(listener.accept()[0])

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
        for connection in taken:
            connection.close()
        listener.shutdown(socket.SHUT_RDWR)


def in_thread(ask: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    """Starts a request that no signal could end, were it to wait forever, and gives what becomes of it."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            ask()
        except obstore.exceptions.GenericError as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failures


@pytest.mark.parametrize("reading", [True, False])
def test_a_server_that_never_answers_is_noticed(monkeypatch: pytest.MonkeyPatch, reading: bool) -> None:
    monkeypatch.setattr(common, "READ_TIMEOUT_S", 0.2 if reading else 0.01)
    monkeypatch.setattr(common, "UPLOAD_TIMEOUT_S", 60 if reading else 0.2)
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.1)
    with silent_server() as (url, _):
        store = store_of(file_system(url), reading=reading)
        ask = (
            (lambda: obstore.get_range(store, "x", start=0, end=1))
            if reading
            else lambda: obstore.put(store, "x", b"1")
        )
        started = time.monotonic()
        thread, failures = in_thread(ask)
        thread.join(10)
        assert 0.2 <= time.monotonic() - started < 10
        assert len(failures) == 1


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_the_system_gives_up_on_a_connection_that_is_stuck() -> None:
    with silent_server() as (url, taken):
        store = store_of(file_system(url))
        thread, failures = in_thread(lambda: obstore.put(store, "x", b"1"))
        while not taken:
            time.sleep(0.01)
        (connection,) = sockets_to(taken[0].getsockname())
        assert 0 < connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        connection.close()
    thread.join(10)
    assert len(failures) == 1


def sockets_to(address: tuple[str, int]) -> list[socket.socket]:
    """This process's own connections to ``address``."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            candidate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or closed by now
            continue
        try:
            connected = candidate.getpeername() == address
        except OSError:
            connected = False
        if connected:
            found.append(candidate)
        else:
            candidate.close()
    return found


def test_only_names_that_obstore_changes_are_refused(records: Recorder) -> None:
    fs, own = file_system(records.url), obstore.store.MemoryStore()
    letters = map(chr, (*range(0x110), 0x2028, 0xFEFF, 0x1F600))
    names = [name for letter in letters for name in (f"{letter}b", f"a{letter}", f"a/{letter}/b")]
    for name in [*names, ".", "..", "a/..", "...", "a/.b", "./b", "a//b"]:
        try:
            obstore.put(own, name, b"1")
            kept = [entry["path"] for entries in obstore.list(own) for entry in entries] == [name]
            obstore.delete(own, name)
        except ValueError:
            kept = False
        assert (native_store(fs, f"bucket/{name}") is not None) is kept, ascii(name)


def test_other_file_systems_are_none_of_its_business(told: Told) -> None:
    assert native_store(MemoryFileSystem(), "/bucket/x") is None
    assert told() == []


def test_without_obstore_the_log_says_what_to_install(
    records: Recorder, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    monkeypatch.setattr(obstore_config, "_OBSTORE", RequirementCache("obstore>=999"))
    fs = file_system(records.url)
    assert native_store(fs, "bucket/x") is None
    assert native_store(fs, "bucket/y") is None
    (line,) = told()
    assert "go through fsspec" in line
    assert "obstore 0.11 or newer" in line
    assert "the extra `s3`" in line


FORKS = """
    import logging, os, sys
    from lightning.fabric.storage.transport.backends.obstore_config import native_store
    assert not {"obstore", "s3fs", "gcsfs", "adlfs", "botocore"} & set(sys.modules)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    import s3fs

    def put(name):
        fs = s3fs.S3FileSystem(endpoint_url=sys.argv[1], key="k", secret="s", skip_instance_cache=True)
        native = native_store(fs, f"bucket/{name}")
        if native is not None:
            import obstore
            obstore.put(*native, b"1")
        return native is not None

    def in_child(name):
        child = os.fork()
        if child == 0:
            os._exit(40 + put(name))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 40

    assert in_child("child before") == 1
    assert put("parent before")
    assert in_child("child after") == 0
    assert put("parent after")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_uses_obstore_only_if_its_parent_did_not(records: Recorder, tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(textwrap.dedent(FORKS))
    done = subprocess.run([sys.executable, script, records.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(records.objects) == {f"bucket/{name}" for name in ("child before", "parent before", "parent after")}
    (line,) = (line for line in done.stderr.splitlines() if "go through fsspec" in line)
    assert "forked" in line
