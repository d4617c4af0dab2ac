"""How long `import lightning` takes, beside stock Lightning of the same release in the same environment.

Run it with ``.venv/bin/python benchmarks/import_time.py [--runs N]`` after ``make setup``.
"""

import argparse
import io
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_backend.distribution import LIGHTNING, PYTORCH_LIGHTNING
from build_backend.upstream import read_pin, read_pristine_wheel

STOCK_VERSION = read_pin(LIGHTNING).version


def cpu_seconds(module: str, folder: Path) -> float:
    """CPU time of a fresh interpreter that imports ``module`` from ``folder``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=environment, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def lay_out(folder: Path) -> dict[str, Path]:
    """Puts the packages of both into folders of the same kind."""
    folders = {"stock": folder / "stock", "ours": folder / "ours"}
    for distribution in (LIGHTNING, PYTORCH_LIGHTNING):
        with zipfile.ZipFile(io.BytesIO(read_pristine_wheel(distribution))) as archive:
            archive.extractall(folders["stock"])
        for package in distribution.packages:
            installed = Path(sysconfig.get_path("purelib")) / package
            shutil.copytree(installed, folders["ours"] / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folders


def measure(module: str, runs: int) -> dict[str, list[float]]:
    """CPU seconds of each run of both, in turn, so that what else the machine does meets both alike."""
    with tempfile.TemporaryDirectory() as temporary:
        folders = lay_out(Path(temporary))
        times: dict[str, list[float]] = {name: [] for name in folders}
        for run in range(runs + 1):
            for name, folder in folders.items():
                seconds = cpu_seconds(module, folder)
                times[name] += [seconds] if run else []  # the first writes the bytecode
    return times


def main() -> None:
    """Prints what both take."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="measured runs of each (default: 15)")
    runs = parser.parse_args().runs
    print(f"CPU seconds of an import, median and minimum of {runs} runs each, in turn, after one unmeasured run")
    for module in ("lightning", "pytorch_lightning"):
        times = measure(module, runs)
        middle = {name: statistics.median(values) for name, values in times.items()}
        for name, values in times.items():
            print(f"{module:18} {name:6} median {middle[name]:.3f}  minimum {min(values):.3f}")
        print(f"{module:18} ours/stock {middle['ours'] / middle['stock']:.3f} (stock {STOCK_VERSION})")


if __name__ == "__main__":
    main()
