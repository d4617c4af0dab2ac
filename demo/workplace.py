"""A temporary folder and the processes that work in it: all of it is gone when the demo ends, however it ends."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

SCRIPTS = Path(__file__).resolve().parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: For one child. Seconds each is normal; a collective call that waits for a dead rank would wait for half an hour.
PATIENCE_S = 150
#: What a user's shell may have set and what would take the demo elsewhere.
_FOREIGN = ("AWS_", "FSSPEC_", "SLURM_", "PL_", "TORCHELASTIC_", "OMPI_", "PMI_")
_FOREIGN_NAMES = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"}


class Failed(Exception):
    """The demo cannot go on, or has found what must not be."""


class Stopped(BaseException):
    """A signal asked the demo to stop. Not an Exception, so that nothing on the way swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Workplace:
    """Use it as a context manager.

    Every child is in a process group of its own, which has two effects: Ctrl-C in a terminal reaches this process
    alone, and the child's own children (a second rank, a data loader's workers) end with it. Should this process be
    killed, the children notice that their standard input has ended (see ``child.py``).

    Attributes:
        folder: The temporary folder.
        environment: The children's environment variables.
    """

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._busy = False
        self._signal: int | None = None

    def __enter__(self) -> "Workplace":
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        with self._uninterrupted():
            self.folder = Path(tempfile.mkdtemp(prefix="io-demo-", dir=_temporary_folder()))
        self.environment = _environment(self.folder)
        try:
            self._raise_if_signalled()
        except Stopped:
            self._clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clean_up()

    def run(self, script: str, *arguments: object) -> None:
        """Runs a script to its end, and ends what it has left running.

        Raises:
            Failed: It ended with an error, which it has printed, or has not ended in time.
        """
        child = self._start(script, *arguments)
        try:
            status = child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"{script} has not ended within {PATIENCE_S} s") from None
        _end(child)
        if status != 0:
            raise Failed(f"{script} ended with exit status {status}")

    def start_server(self, script: str, *arguments: object) -> str:
        """Starts a script that runs until the end, and returns the first line that it prints."""
        server = self._start(script, *arguments, stdout=subprocess.PIPE)
        assert server.stdout is not None
        line = server.stdout.readline().decode().strip()
        if not line:
            raise Failed(f"{script} did not start")
        return line

    def _start(self, script: str, *arguments: object, stdout: int | None = None) -> "subprocess.Popen[bytes]":
        command = [sys.executable, str(SCRIPTS / script), *map(str, arguments)]
        with self._uninterrupted():
            child = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdin=subprocess.PIPE, stdout=stdout,
                start_new_session=True,
            )  # fmt: skip
            self._children.append(child)
        self._raise_if_signalled()
        return child

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Puts a signal off, so that nothing is made without being noted."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if not self._busy:
            raise Stopped(number)

    def _raise_if_signalled(self) -> None:
        if self._signal is not None:
            raise Stopped(self._signal)

    def _clean_up(self) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # it is about to end anyway
        for child in self._children:
            _end(child)
        shutil.rmtree(self.folder, ignore_errors=True)


def _temporary_folder() -> str:
    """The user's, unless a Unix socket in a folder below it, as multiprocessing makes them, got too long a path."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 50 else "/tmp"


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ends a child and its whole process group."""
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses to signal a group of zombies
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    with suppress(ProcessLookupError, PermissionError):
        for _ in range(100):
            os.killpg(child.pid, 0)
            time.sleep(0.01)


def _environment(folder: Path) -> dict[str, str]:
    """This process's environment without what would lead to a real store, a cluster or a GPU."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    nowhere = str(folder / "none")
    return kept | {
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": nowhere,
        "AWS_SHARED_CREDENTIALS_FILE": nowhere,
        "AWS_EC2_METADATA_DISABLED": "true",
        "FSSPEC_CONFIG_DIR": nowhere,
        "CUDA_VISIBLE_DEVICES": "",
        "LIGHTNING_IO_DEMO": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(folder),
    }
