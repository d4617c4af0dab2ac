"""The quick start as a reader follows it: each block is run as it is written, and prints what the page says."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "quick-start.md"
#: The installation is tested in tests/packaging.
FIRST_HEADING = "## Start a store"
PORT = "9000"
NEXT_BLOCK = "--- the next block ---"


def blocks() -> list[tuple[str, str]]:
    """Returns the language and the content of each block of code."""
    page = PAGE.read_text(encoding="utf-8").partition(FIRST_HEADING)[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return re.findall(r"^```(\w+)\n(.*?)^```$", page.replace(PORT, str(port)), re.MULTILINE | re.DOTALL)


def run(script: str, folder: Path) -> str:
    """Returns what a shell script prints, and ends what it has left running."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FSSPEC_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = subprocess.Popen(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env={**kept, "PATH": path, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = shell.communicate(timeout=580)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    assert shell.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(600)  # ten processes import torch, on cores that other tests use as well
def test_each_block_runs_as_written_and_prints_what_the_page_says(tmp_path: Path) -> None:
    commands: list[str] = []
    expected: list[tuple[int, str]] = []
    for language, content in blocks():
        if language == "python":
            (tmp_path / "train.py").write_text(content)
        elif language == "bash":
            commands.append(content)
        else:
            assert language == "text"
            expected += [(len(commands) - 1, line) for line in content.splitlines()]
    assert len(expected) >= 15
    outputs = run(f"\necho {NEXT_BLOCK!r}\n".join(commands), tmp_path).split(NEXT_BLOCK)
    for block, line in expected:
        pattern = ".*".join(map(re.escape, line.split("...")))
        assert re.search(f"^{pattern}$", outputs[block], re.MULTILINE), f"{line!r} is not in: {outputs[block]}"
