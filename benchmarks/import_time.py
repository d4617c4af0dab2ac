"""Measures how long `import lightning` takes, beside stock Lightning of the same release in the same environment."""

import importlib.util
import io
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_backend.distribution import LIGHTNING, PYTORCH_LIGHTNING
from build_backend.upstream import read_pin, read_pristine_wheel

STOCK = f"stock {read_pin(LIGHTNING).version}"


def cpu_seconds(folder: Path) -> float:
    """CPU time of a fresh interpreter that imports Lightning from ``folder``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, "-c", "import lightning"], check=True, env=environment, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def lay_out(stock: Path, ours: Path) -> None:
    """Puts the packages of both into folders of the same kind."""
    for distribution in (LIGHTNING, PYTORCH_LIGHTNING):
        with zipfile.ZipFile(io.BytesIO(read_pristine_wheel(distribution))) as archive:
            archive.extractall(stock)
        for package in distribution.packages:
            found = importlib.util.find_spec(package)
            assert found is not None
            assert found.origin is not None
            shutil.copytree(Path(found.origin).parent, ours / package, ignore=shutil.ignore_patterns("__pycache__"))


def measure(runs: int) -> dict[str, list[dict[str, float]]]:
    """CPU seconds of each run of both, in turn, so that what else the machine does meets both alike."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = {STOCK: Path(temporary, "stock"), "ours": Path(temporary, "ours")}
        lay_out(*folders.values())
        times: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
        for run in range(runs + 1):
            for name, folder in folders.items():
                seconds = cpu_seconds(folder)
                times[name] += [{"cpu_s": seconds}] if run else []  # the first writes the bytecode
    return times
