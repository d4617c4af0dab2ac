import importlib
import io
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning.fabric.storage.archives import node_cache
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.transport import progress
from lightning.fabric.storage.transport.threads import in_thread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared between processes on Linux only")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held


def make_copy(stack: ExitStack, url: str = "s3://bucket/x") -> tuple[Any, Any]:
    copy, offer = node_cache._make_room(locate(url), stack)
    assert copy is not None
    return copy, offer


def test_a_leader_that_is_killed_is_not_waited_for_and_leaves_no_memory(stack: ExitStack) -> None:
    with ExitStack() as passed_on:
        held, offer = make_copy(passed_on)
        leader = subprocess.Popen(["sleep", "60"], pass_fds=[held.fileno()])
        offer = offer._replace(place=f"/proc/{leader.pid}/fd/{held.fileno()}")
    copy = node_cache._open(offer, stack)
    assert copy is not None
    leader.kill()
    assert not node_cache._is_filled(copy, locate("s3://bucket/x"), offer)
    leader.wait()
    assert node_cache._open(offer, stack) is None


@pytest.mark.parametrize("case", ["another file", "no such file", "no such process", "nobody holds it"])
def test_what_is_not_the_leaders_copy_is_not_opened(case: str, stack: ExitStack, tmp_path: Path) -> None:
    with ExitStack() as leaders:
        copy, offer = make_copy(leaders)
        if case == "another file":
            other = leaders.enter_context(open(tmp_path / "other", "w+"))
            offer = offer._replace(place=f"/proc/self/fd/{other.fileno()}")
        elif case == "no such file":
            leaders.close()
        elif case == "no such process":
            offer = offer._replace(place=f"/proc/{2**22 + 1}/fd/3")
        else:
            node_cache.fcntl.flock(copy, node_cache.fcntl.LOCK_UN)
        assert node_cache._open(offer, stack) is None


def test_what_only_the_process_itself_can_see_is_not_shared(stack: ExitStack, tmp_path: Path) -> None:
    assert node_cache._make_room(locate("memory://run/x.ckpt"), stack) == (None, None)
    assert node_cache._make_room(locate(tmp_path / "x.ckpt"), stack) == (None, None)


@pytest.mark.parametrize("missing", ["memfd_create", "MFD_ALLOW_SEALING"])
def test_a_python_without_shared_memory_does_without(
    missing: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, missing)
    assert node_cache._make_room(locate("s3://bucket/x"), stack) == (None, None)


@pytest.mark.parametrize("case", ["no memory", "an empty file"])
def test_each_rank_loads_for_itself_if_there_can_be_no_copy(case: str, stack: ExitStack) -> None:
    url = "memory://node.ckpt"
    fsspec.filesystem("memory").pipe_file("node.ckpt", b"" if case == "an empty file" else bytes(2**20))
    copy, offer = make_copy(stack)
    other = node_cache._open(offer, stack)
    assert other is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if case == "no memory":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, hard))
        assert not node_cache._fill(copy, locate(url), offer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not node_cache._is_filled(other, locate(url), offer)


def test_a_file_that_ends_early_is_an_error() -> None:
    with pytest.raises(OSError, match="it ended after 2 of 3 bytes"):
        node_cache._read_into(io.BytesIO(b"ab"), memoryview(bytearray(3)))


@pytest.mark.parametrize(
    ("fabric", "pytorch"), [("lightning.fabric", "lightning.pytorch"), ("lightning_fabric", "pytorch_lightning")]
)
def test_the_methods_that_are_known_to_read_on_every_rank_are_lightnings(fabric: str, pytorch: str) -> None:
    """Under both import names; a method that has been renamed would switch the sharing off without a sign."""
    known = importlib.import_module(f"{fabric}.storage.archives.node_cache")._PLAIN_LOADS
    owners = [
        importlib.import_module(f"{fabric}.plugins").TorchCheckpointIO,
        importlib.import_module(f"{fabric}.strategies").DDPStrategy,
        importlib.import_module(f"{pytorch}.plugins.io").AsyncCheckpointIO,
        importlib.import_module(f"{pytorch}.plugins.io.wrapper")._WrappingCheckpointIO,
        importlib.import_module(f"{pytorch}.strategies").DDPStrategy,
    ]
    assert {f"{owner.load_checkpoint.__module__}.{owner.load_checkpoint.__qualname__}" for owner in owners} == known


def test_to_wait_for_the_rank_that_downloads_is_progress(stack: ExitStack) -> None:
    held, offer = make_copy(stack)
    copy = node_cache._open(offer, stack)
    assert copy is not None
    before = progress.count()
    filled = in_thread("waits", node_cache._is_filled, copy, locate("s3://bucket/x"), offer)
    end = time.monotonic() + 20
    while progress.count() < before + 2 and time.monotonic() < end:
        time.sleep(0.05)
    node_cache.fcntl.flock(held, node_cache.fcntl.LOCK_UN)
    assert not filled.result(20)  # for there is nothing in it
    assert progress.count() >= before + 2
