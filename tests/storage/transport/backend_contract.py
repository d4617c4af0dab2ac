"""What every backend of uploads promises to the sink that drives it, as one class of tests.

A backend joins by a subclass with a fixture ``target`` and a method ``reaching``, see
:mod:`tests.storage.transport.test_backends`.
"""

import gc
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from lightning.fabric.storage.transport import multipart
from lightning.fabric.storage.transport.sink import GivenUp, Sink, uploading
from lightning.fabric.storage.transport.upload import Handover, UploadBackend
from tests.storage.places import NAME, Outside

MIB = 2**20
#: Of pieces that do not fill a part, and fit into none a whole number of times.
PIECE = 3 * MIB
OLD = b"the old one"
#: Returns whether the request is to be refused, if it returns.
Act = Callable[[], bool]


def refuse() -> bool:
    return True


def interrupt() -> bool:
    """As Ctrl-C does while the store is at work."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    time.sleep(0.3)
    return False


def acting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Act) -> AbstractContextManager[None]:
    """Lets ``act`` decide over each call of a function, for stores in which nothing else can be stopped."""
    owner = importlib.import_module(owner) if isinstance(owner, str) else owner
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if act():
            raise PermissionError("refused")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return nullcontext()


@dataclass
class Target:
    """Where the uploads of a test go."""

    #: Makes one of a file called ``NAME``.
    new: Callable[[], UploadBackend]
    outside: Outside

    def assert_is(self, *contents: bytes) -> None:
        """There is the file with one of these contents, and nothing else."""
        assert self.outside.names() == [NAME]
        assert self.outside.get(NAME) in contents
        assert self.outside.unfinished_uploads() == []


class Driver:
    """Drives one upload by hand, in memory that goes bad as soon as the backend may no longer look at it."""

    def __init__(self, backend: UploadBackend, size: int) -> None:
        self.backend = backend
        self.part_size = backend.begin(size, lambda: None)
        self.content = b""

    def write(self, content: bytes) -> None:
        for piece in self._pieces(content):
            owned = bytearray(piece)
            self.backend.write_part(owned if self.backend.handover is Handover.WHOLE_PARTS else memoryview(owned))
            if self.backend.handover is Handover.BORROWED:
                owned[:] = bytes(len(owned))
            self.content += piece

    def _pieces(self, content: bytes) -> Iterator[bytes]:
        at = 0
        while at < len(content):
            room = self.part_size - (len(self.content) + at) % self.part_size
            size = room if self.backend.handover is Handover.WHOLE_PARTS else min(room, PIECE)
            yield content[at : at + size]
            at += size


class BackendContract:
    """The tests."""

    #: The calls during which the store is asked for something, and can refuse it.
    steps: ClassVar[tuple[str, ...]] = ("begin", "write", "commit", "abort")
    #: Those of them that can be interrupted without a trace.
    interruptible: ClassVar[tuple[str, ...]] = ("begin", "write", "commit")
    #: Whether long waits are spent in ``idle``.
    has_idle_waits: ClassVar[bool] = False
    #: Bytes of an upload of several parts.
    large: ClassVar[int] = 17 * MIB + 777

    @pytest.fixture
    def target(self) -> Target:
        raise NotImplementedError("a backend provides it")

    def reaching(self, step: str, act: Act, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[None]:
        """Lets ``act`` decide over the requests of a step while the context lasts."""
        raise NotImplementedError("a backend provides it")

    @pytest.fixture(autouse=True)
    def _small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(multipart, "SMALLEST_PART", 5 * MIB)

    @pytest.fixture(scope="class")
    @classmethod
    def content(cls) -> bytes:
        return os.urandom(cls.large)

    @contextmanager
    def at(self, step: str, act: Act, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        if step not in self.steps:
            pytest.skip(f"nothing is asked for in {step}")
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a Trainer may have set one
        try:
            with monkeypatch.context() as patched, self.reaching(step, act, patched):
                yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @pytest.mark.parametrize("size", [0, 1, 5 * MIB, 10 * MIB, None])
    def test_a_file_of_any_size_is_there_after_the_commit_and_not_before(
        self, target: Target, content: bytes, size: int | None
    ) -> None:
        target.outside.put(NAME, OLD)
        for new in (content[:size], content[: size and size // 2]):  # the second one over the first
            before = target.outside.get(NAME)
            driver = Driver(target.new(), len(new))
            driver.write(new)
            assert target.outside.get(NAME) == before
            driver.backend.commit()
            target.assert_is(new)

    def test_nothing_has_the_name_before_the_first_commit(self, target: Target, content: bytes) -> None:
        driver = Driver(target.new(), len(content))
        driver.write(content)
        assert NAME not in target.outside.names()
        driver.backend.commit()
        target.assert_is(content)

    def test_a_size_that_was_not_known_makes_no_difference(self, target: Target, content: bytes) -> None:
        driver = Driver(target.new(), 0)
        driver.write(content)
        driver.backend.commit()
        target.assert_is(content)

    @pytest.mark.parametrize("size", [None, 0, 1, 12 * MIB])
    def test_an_upload_that_is_aborted_leaves_the_old_file_and_nothing_else(
        self, target: Target, content: bytes, size: int | None
    ) -> None:
        target.outside.put(NAME, OLD)
        backend = target.new()
        if size is not None:
            Driver(backend, len(content)).write(content[:size])
        backend.abort()
        target.assert_is(OLD)

    @pytest.mark.parametrize("step", ["begin", "write", "commit"])
    def test_an_error_leaves_the_old_file_and_nothing_else(
        self, target: Target, content: bytes, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target.outside.put(NAME, OLD)
        with self.at(step, refuse, monkeypatch), pytest.raises(Exception, match="refused"):
            self._upload(target, content)
        target.assert_is(OLD)

    def test_an_abort_that_fails_is_logged_and_hides_no_error(
        self, target: Target, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        target.outside.put(NAME, OLD)
        with self.at("abort", refuse, monkeypatch), pytest.raises(KeyError, match="the reason"):
            self._upload(target, content, KeyError("the reason"))
        assert "refused" in caplog.text
        assert target.outside.get(NAME) == OLD

    @pytest.mark.parametrize("step", ["begin", "write", "commit"])
    def test_an_interruption_leaves_the_old_file_or_the_new_one_and_nothing_else(
        self, target: Target, content: bytes, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if step not in self.interruptible:
            pytest.skip(f"{step} cannot be interrupted without a trace")
        target.outside.put(NAME, OLD)
        gc.collect()  # a finalizer would swallow the interruption
        with self.at(step, self._once(interrupt), monkeypatch), pytest.raises(KeyboardInterrupt):
            self._upload(target, content)
        time.sleep(0.5)  # what goes on behind the caller's back would be complete by now
        # a server that has all of a request answers it to nobody
        target.assert_is(OLD, *([content] if step == "commit" else []))

    def test_a_long_wait_can_be_ended(self, target: Target, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        if not self.has_idle_waits:
            pytest.skip("does not wait in a way that can be ended")
        ended = threading.Event()

        def give_up() -> None:
            ended.set()
            raise GivenUp("enough")

        def hold() -> bool:
            ended.wait(20)
            return False

        target.outside.put(NAME, OLD)
        with self.at("write", hold, monkeypatch), pytest.raises(GivenUp, match="enough"):
            self._upload(target, content, idle=give_up)
        assert ended.is_set()
        target.assert_is(OLD, content)  # obstore may have all of it by then

    @staticmethod
    def _once(act: Act) -> Act:
        calls: list[None] = []

        def once() -> bool:
            calls.append(None)
            return len(calls) == 1 and act()

        return once

    @staticmethod
    def _upload(
        target: Target, content: bytes, error: Exception | None = None, idle: Callable[[], None] = lambda: None
    ) -> None:
        with uploading(target.new(), idle) as sink:
            assert isinstance(sink, Sink)
            sink.expect(len(content))
            sink.write(content)
            if error is not None:
                raise error
