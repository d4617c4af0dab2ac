"""The demo as a user runs it: it succeeds, and leaves nothing behind, however it ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "demo" / "run.py"


class Demo:
    """A run of the demo in a temporary folder; its processes are known by a variable in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = f"DEMO_TEST={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        self.process = subprocess.Popen(
            [sys.executable, DEMO],
            cwd=folder,
            env={**os.environ, name: value, "TMPDIR": str(folder), "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def running(self) -> list[str]:
        """The demo's processes that still run."""
        if not Path("/proc/self/environ").exists():
            listing = subprocess.run(["ps", "axeww"], capture_output=True, text=True, check=True).stdout
            return [line for line in listing.splitlines() if self._mark in line]
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes():
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:  # it has just ended, or is someone else's
                continue
        return found

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line:
                return
        pytest.fail(f"the demo ended before it printed {text!r}: {self.process.communicate()[1]}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.communicate(timeout=30)


@pytest.fixture
def demo() -> Iterator[Demo]:
    with tempfile.TemporaryDirectory(prefix="io-", dir="/tmp") as folder:  # a Unix socket's path must be short
        demo = Demo(Path(folder))
        yield demo
        demo.end()


@pytest.mark.slow
def test_succeeds_and_leaves_nothing(demo: Demo) -> None:
    output, errors = demo.process.communicate(timeout=280)
    assert demo.process.returncode == 0, output + errors
    assert "VERDICT: IDENTICAL" in output
    for row in ("setup_train_dataloader", "reset_train_dataloader", "setup_val_dataloader", "create_train_dataloader"):
        assert row in output
    assert "MB/s" in output
    assert errors == ""
    assert max(map(len, output.splitlines())) <= 120
    assert demo.running() == []
    assert list(demo.folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "moment"), [(signal.SIGINT, "[3/5]"), (signal.SIGTERM, "[2/5]")])
def test_a_signal_ends_everything_at_once(demo: Demo, number: signal.Signals, moment: str) -> None:
    demo.wait_for(moment)
    if number == signal.SIGINT:
        demo.wait_for("epoch 0")
        assert len(demo.running()) >= 4  # the demo, the server and two ranks
    demo.process.send_signal(number)
    started = time.monotonic()
    errors = demo.process.communicate(timeout=30)[1]
    assert time.monotonic() - started < 10
    assert demo.process.returncode == 128 + number
    assert errors.strip() == f"Stopped by {number.name}: all that the demo had started is gone."
    assert demo.running() == []
    assert list(demo.folder.iterdir()) == []


def test_help_and_wrong_flags_start_nothing(tmp_path: Path) -> None:
    for flag, status, text in (("--help", 0, "resumes"), ("--fulll-report", 2, "unrecognized arguments")):
        command = [sys.executable, str(DEMO), flag]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
        assert result.returncode == status
        assert text in result.stdout + result.stderr
        assert list(tmp_path.iterdir()) == []
