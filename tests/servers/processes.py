"""Servers that are programs."""

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_STARTED_WITHIN_S = 60


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on."""
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in bound]


@contextmanager
def running(
    command: list[str], folder: Path, is_ready: Callable[[], object], environment: dict[str, str] | None = None
) -> Iterator[None]:
    """Runs a server in ``folder`` until the context ends.

    Args:
        command: The program and its arguments.
        folder: Its working folder; its output goes to a file there.
        is_ready: Called until it no longer raises.
        environment: What it has beside the variables of this process.

    Raises:
        RuntimeError: The server ended, or was not ready in time. The message holds the end of its output.
    """
    output = folder / "output.txt"
    with open(output, "wb") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        deadline = time.monotonic() + _STARTED_WITHIN_S
        while True:
            try:
                is_ready()
                break
            except Exception as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    told = output.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{command[0]} is not ready ({error}). It said: {told}") from error
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.wait()
