"""Saves and removals in the background: their order, what is told of them, and how long is waited for them."""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning.fabric.storage.background.pending import drain, news, settle, settle_up_to, will_exist
from lightning.fabric.storage.background.queue import Queue, busy
from lightning.fabric.storage.background.submissions import Save, unconditionally, watching
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

#: Longer than anything here takes.
LONG_S = 20


class Gate:
    """Work that goes on when it is let."""

    def __init__(self, name: str, log: list[str], error: BaseException | None = None) -> None:
        self.began, self._may_end = threading.Event(), threading.Event()
        self._name, self._log, self._error = name, log, error

    def __call__(self) -> None:
        self.began.set()
        assert self._may_end.wait(LONG_S)
        if self._error is not None:
            raise self._error
        self._log.append(self._name)

    def open(self) -> "Gate":
        self._may_end.set()
        return self


@pytest.fixture
def queue() -> Iterator[Queue]:
    queue = Queue(1, "raise")
    yield queue
    queue.give_up()


def submitted(queue: Queue, path: str, work: Gate) -> Save:
    save = Save(locate(path))
    queue.submit(save, work)
    return save


def test_saves_and_removals_are_done_one_after_the_other_in_their_order(queue: Queue) -> None:
    done: list[str] = []
    first, second = Gate("first", done), Gate("second", done).open()
    submitted(queue, "a", first)
    queue.submit_removal(locate("old"), Gate("removal", done).open())
    submitted(queue, "b", second)
    assert first.began.wait(LONG_S)
    assert not second.began.is_set()
    first.open()
    drain()
    assert done == ["first", "removal", "second"]


def test_what_a_failed_save_was_to_replace_is_kept(queue: Queue) -> None:
    done: list[str] = []
    failing = submitted(queue, "a", Gate("save", done, OSError("the disk is full")).open())
    queue.submit_removal(locate("old"), Gate("removal", done).open())
    with pytest.raises(OSError, match="the disk is full"):
        drain()
    assert (failing.succeeded, done) == (False, [])
    submitted(queue, "b", Gate("save", done).open())
    queue.submit_removal(locate("old"), Gate("removal", done).open())
    drain()
    assert done == ["save", "removal"]


def test_what_a_skipped_save_was_to_replace_is_kept(queue: Queue) -> None:
    done: list[str] = []
    gate = Gate("save", done)
    submitted(queue, "a", gate)
    assert not queue.has_room
    skipped = Save(locate("b"))
    queue.skip(skipped)
    queue.submit_removal(locate("a"), Gate("removal", done).open())
    gate.open()
    drain()
    assert done == ["save"]
    assert (skipped.done, skipped.succeeded) == (True, False)


def test_an_error_is_raised_once_and_by_the_thread_that_settles(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    submitted(queue, "a", Gate("", [], PermissionError("no access to a")).open())
    submitted(queue, "b", Gate("", [], OSError("b is gone")).open())
    queue.wait()
    with pytest.raises(PermissionError, match="no access to a"):
        settle()
    assert "b is gone" in caplog.text  # which is not lost either
    settle()
    assert not busy


def test_training_goes_on_after_an_error_if_it_was_told_to(caplog: pytest.LogCaptureFixture) -> None:
    queue = Queue(1, "warn")
    submitted(queue, "s3://me:secret@bucket/a", Gate("", [], OSError("no access for me:secret@bucket")).open())
    drain()
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "bucket/a was not saved (OSError: no access" in record.getMessage()
    assert "secret" not in caplog.text


def test_a_removal_that_is_for_no_save_is_done_all_the_same(queue: Queue) -> None:
    done: list[str] = []
    submitted(queue, "a", Gate("save", done, OSError("no luck")).open())
    with unconditionally():
        queue.submit_removal(locate("temporary"), Gate("temporary", done).open())
    queue.submit_removal(locate("old"), Gate("old", done).open())
    with pytest.raises(OSError, match="no luck"):
        drain()
    queue.submit_removal(locate("later"), Gate("later", done).open())
    drain()
    assert done == ["temporary", "later"]


def test_an_error_is_raised_though_nobody_has_the_engine_any_more() -> None:
    queue = Queue(1, "raise")
    submitted(queue, "a", Gate("", [], OSError("no luck")).open())
    queue.wait()
    del queue
    gc.collect()
    with pytest.raises(OSError, match="no luck"):
        settle()


def test_an_error_is_raised_also_if_one_who_waits_for_a_later_save_fails(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    submitted(queue, "a", Gate("", [], OSError("no luck")).open())
    later = submitted(queue, "b", Gate("", []).open())

    def fails(_: Save) -> None:
        raise ValueError("the logger has lost its server")

    later.when_settled(fails)
    with pytest.raises(OSError, match="no luck"):
        drain()
    assert "the logger has lost its server" in caplog.text
    assert not busy


def test_what_no_thread_can_be_had_for_is_an_error_at_once(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    released: list[Save] = []
    save = Save(locate("a"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot_start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            queue.submit(save, Gate("", []).open(), lambda: released.append(save))
    assert released == [save]
    done: list[str] = []
    submitted(queue, "b", Gate("save", done).open())
    drain()
    assert done == ["save"]


def test_of_the_saves_by_all_ranks_those_are_told_that_rank_zero_has_told_of() -> None:
    queue = Queue(3, "raise")
    gates = [Gate("", [], OSError(f"no luck with {number}")) for number in (1, 2)]
    for number, gate in enumerate(gates, 1):
        queue.submit(Save(locate("x"), number), gate)
    timer = threading.Timer(0.2, gates[0].open)
    timer.start()
    with pytest.raises(OSError, match="no luck with 1"):
        settle_up_to(1)
    timer.join()
    gates[1].open()
    queue.wait()
    settle_up_to(1)
    assert news() == 2
    with pytest.raises(OSError, match="no luck with 2"):
        settle_up_to(2)
    assert news() is None
    assert not busy


def test_callbacks_are_called_when_the_training_thread_settles_and_not_before(queue: Queue) -> None:
    called: list[tuple[Save, threading.Thread]] = []
    with watching() as saves:
        save = submitted(queue, "a", Gate("", []).open())
    assert saves == [save]
    save.when_settled(lambda of: called.append((of, threading.current_thread())))
    queue.wait()
    assert (save.succeeded, called) == (True, [])
    settle()
    settle()
    assert called == [(save, threading.current_thread())]


def test_a_save_waits_for_room_and_for_one_to_the_same_place() -> None:
    queue = Queue(2, "raise")
    gate = Gate("", [])
    first = submitted(queue, "a", gate)
    queue.wait_for_room(locate("b"))
    timer = threading.Timer(0.2, gate.open)
    timer.start()
    queue.wait_for_room(locate("a"))
    assert first.done
    timer.join()
    drain()


def test_what_will_be_at_a_path_is_known_beforehand(queue: Queue) -> None:
    gate = Gate("", [])
    submitted(queue, "a", gate)
    queue.submit_removal(locate("old"), lambda: None)
    assert [will_exist(name) for name in ("a", "old", "other")] == [True, False, None]
    gate.open()
    drain()
    assert will_exist("a") is None


def test_ctrl_c_gives_up_at_once_and_tells_what_was_not_saved(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("", [])
    submitted(queue, "never-saved", gate)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the Trainer does when it is interrupted
    try:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            drain()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert "never-saved was not saved" in caplog.text
    assert not queue.has_room  # its copy of the state is still in use
    gate.open()
    queue.wait_for_room(locate("next"))
    drain()


def test_the_launcher_does_not_kill_the_first_process_while_it_saves(queue: Queue) -> None:
    def running(command: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([sys.executable, "-S", "-c", f"import sys, time; {command}"])

    gate = Gate("", [])
    submitted(queue, "a", gate)
    failed, first = running("sys.exit(1)"), running("time.sleep(60)")
    failed.wait()
    observer = threading.Thread(target=_ChildProcessObserver(first.pid, [failed])._run, daemon=True)
    observer.start()
    observer.join(0.2)
    assert first.poll() is None
    gate.open()
    assert first.wait(LONG_S) == -signal.SIGKILL
    drain()


def test_the_interpreter_waits_at_its_end_and_says_what_failed(tmp_path: Path) -> None:
    script = f"""
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lightning.fabric.storage.background import pending
from lightning.fabric.storage.background.queue import Queue
from lightning.fabric.storage.background.submissions import Save
from lightning.fabric.storage.paths.location import locate
def submit(name, error):
    def save():
        time.sleep(0.5)
        assert ThreadPoolExecutor(1).submit(str, 1).result() == "1"  # as clients of stores do
        Path({str(tmp_path)!r}, name).touch()
        if error:
            raise error
    Queue(1, "raise").submit(Save(locate(name)), save)
submit("well.ckpt", None)
submit("badly.ckpt", OSError("no luck"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert sorted(os.listdir(tmp_path)) == ["badly.ckpt", "well.ckpt"]
    assert "no luck" in done.stderr
    assert "well.ckpt" not in done.stderr
