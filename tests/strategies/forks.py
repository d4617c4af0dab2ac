"""Runs the ranks of small jobs in processes that are forked from one that has imported everything.

``python -m tests.strategies.forks SOCKET`` takes a job a connection: a line of JSON, see :mod:`tests.strategies.ranks`.
The answer is a line with the ranks' process ids; after any line from the client they start, and a second line tells
what became of each. The server itself starts no thread and opens no store, for neither survives a fork.
"""

import gc
import json
import mmap
import os
import select
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

#: How long the other ranks may go on after one was killed, and how long a job may take at all.
GRACE_S = 1.5
LONGEST_S = 60.0

Job = dict[str, Any]
#: What a rank has told at its end, and the signal that ended it, if any.
Outcome = dict[str, Any]


class Forks:
    """A running server."""

    def __init__(self, address: Path) -> None:
        self.address = address

    def run(self, job: Job, before: Callable[[list[int]], None] = lambda pids: None) -> list[Outcome]:
        """What became of each rank of ``job``. ``before`` is called with their ids when they have not begun yet."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.address))
            with connection.makefile("rw") as lines:
                lines.write(json.dumps(job) + "\n")
                lines.flush()
                before(json.loads(lines.readline()))
                lines.write("\n")
                lines.flush()
                outcomes: list[Outcome] = json.loads(lines.readline())
                return outcomes


def numbered(path: str, value: float) -> str:
    """Where a value is saved in a job that saves many: beside ``path``."""
    return path.replace("last.ckpt", f"{value:.0f}.ckpt")


@contextmanager
def fork_server(folder: Path) -> Iterator[Forks]:
    """Starts a server, whose socket and output are in ``folder``, and ends it with all that it has forked."""
    address = folder / "socket"
    command = [sys.executable, "-m", __name__, str(address)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "output.txt", "wb") as output:
        process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            while not address.exists():
                assert process.poll() is None, (folder / "output.txt").read_text()
                time.sleep(0.05)
            yield Forks(address)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Sends a process a signal; returns after its death if it is SIGKILL."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(handle, number)
            if number == signal.SIGKILL:
                select.select([handle], [], [], LONGEST_S)
        finally:
            os.close(handle)


class _Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 16


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        job = json.loads(self.rfile.readline())
        world = len(job["environments"])
        # no port is free for sure but the one that is taken
        listener = socket.create_server(("127.0.0.1", 0))
        shared = mmap.mmap(-1, mmap.PAGESIZE)  # the process ids, for the ranks themselves
        gate_out, gate_in = os.pipe()
        told, ids = [], []
        for rank in range(world):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                _be_rank(job, rank, listener, shared, (gate_out, gate_in), writing)
            os.close(writing)
            told.append(reading)
            ids.append(pid)
        listener.close()
        shared[: 4 * world] = struct.pack(f"{world}i", *ids)
        self._say(ids)
        self.rfile.readline()
        os.close(gate_in)
        statuses = _wait(ids, job.get("grace_s", GRACE_S), job.get("longest_s", LONGEST_S))
        self._say([_outcome(status, reading) for status, reading in zip(statuses, told, strict=True)])

    def _say(self, value: Any) -> None:
        self.wfile.write(json.dumps(value).encode() + b"\n")


def _wait(ids: list[int], grace_s: float, longest_s: float) -> list[int]:
    """The exit statuses; when a rank was killed, the others are too, but not at once."""
    handles = {os.pidfd_open(pid): pid for pid in ids}
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + longest_s
    while handles:
        ready, _, _ = select.select(list(handles), [], [], max(0.0, deadline - time.monotonic()))
        for handle in ready or list(handles):
            pid = handles.pop(handle)
            if not ready:
                os.kill(pid, signal.SIGKILL)
            _, statuses[pid] = os.waitpid(pid, 0)
            os.close(handle)
            if os.WIFSIGNALED(statuses[pid]):
                deadline = min(deadline, time.monotonic() + grace_s)
    return [statuses[pid] for pid in ids]


def _outcome(status: int, reading: int) -> Outcome:
    with open(reading, "rb") as file:
        said = file.read()
    ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    told = json.loads(said) if said else {"error": f"no word, and signal {ended}", "seconds": LONGEST_S}
    return {**told, "signal": ended}


def _be_rank(
    job: Job, rank: int, listener: socket.socket, shared: mmap.mmap, gate: tuple[int, int], writing: int
) -> None:
    from tests.strategies import ranks

    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(gate[1])
        os.read(gate[0], 1)
        os.environ.update(job["environments"][rank])
        ids = struct.unpack_from(f"{len(job['environments'])}i", shared)
        told = ranks.run(job, rank, listener, ids)
        with open(writing, "w") as file:
            json.dump(told, file)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    from tests.strategies import ranks  # noqa: F401  # with all that ranks need

    assert "obstore" not in sys.modules
    gc.disable()  # in the ranks too, where it would copy all the memory that they share
    with _Server(sys.argv[1], _Handler) as server:
        server.serve_forever(poll_interval=0.5)
