"""What the benchmarks count as memory that a process takes."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE = 50
PROGRAM = """
import mmap, os, sys, time
sys.path.insert(0, {folder!r})
from memory import Watcher
MIB = 1 << 20
chunk = b"x" * MIB
watcher = Watcher()
before = watcher.level()
with watcher.watching() as peak:
    {body}
print((peak.bytes - before) / MIB)
"""
FILE = f"file = os.memfd_create('x'); [os.write(file, chunk) for _ in range({SIZE})]"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param("pass", 0, id="nothing"),
        pytest.param(f"kept = chunk * {SIZE}", SIZE, id="kept"),
        pytest.param(f"kept = chunk * {SIZE}; time.sleep(0.2); del kept", SIZE, id="freed before the end"),
        pytest.param(f"m = mmap.mmap(-1, {SIZE} * MIB); [m.write(chunk) for _ in range({SIZE})]", SIZE, id="shared"),
        pytest.param(FILE, SIZE, id="a file in memory that is not mapped"),
        pytest.param(
            f"{FILE}; m = mmap.mmap(file, 0, mmap.MAP_PRIVATE); [m.write(chunk) for _ in range({SIZE})]",
            2 * SIZE,
            id="a file in memory and what was written to a private mapping of it",
        ),
    ],
)
def test_counts_the_most_that_was_in_use(body: str, expected: int) -> None:
    program = PROGRAM.format(folder=str(BENCHMARKS), body=body)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert float(result.stdout) == pytest.approx(expected, abs=5)
