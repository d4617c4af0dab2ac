"""How long `import lightning` takes, beside stock Lightning of the same release in the same environment.

Run it with ``.venv/bin/python benchmarks/import_time.py [--runs N]`` after ``make setup``.
"""

import argparse
import io
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from build_backend.distribution import LIGHTNING, PYTORCH_LIGHTNING
from build_backend.upstream import read_pin, read_pristine_wheel


def cpu_seconds(module: str, path: str, folder: str) -> float:
    """CPU time of a fresh interpreter that imports ``module``, with ``path`` before the installed packages."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=environment, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measures both in turn, so that what else the machine does meets both alike."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=15, help="measured runs of each (default: 15)")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as stock:
        for distribution in (LIGHTNING, PYTORCH_LIGHTNING):
            with zipfile.ZipFile(io.BytesIO(read_pristine_wheel(distribution))) as archive:
                archive.extractall(stock)
        print(f"CPU seconds of an import, median and minimum of {runs} runs each, in turn, after one unmeasured run")
        for module in ("lightning", "pytorch_lightning"):
            times: dict[str, list[float]] = {"stock": [], "ours": []}
            for run in range(runs + 1):
                for name, path in (("stock", stock), ("ours", "")):
                    seconds = cpu_seconds(module, path, stock if name == "stock" else tempfile.gettempdir())
                    times[name] += [seconds] if run else []  # the first writes the bytecode
            middle = {name: statistics.median(values) for name, values in times.items()}
            for name, values in times.items():
                print(f"{module:18} {name:6} median {middle[name]:.3f}  minimum {min(values):.3f}")
            print(
                f"{module:18} ours/stock {middle['ours'] / middle['stock']:.3f} (stock {read_pin(LIGHTNING).version})"
            )


if __name__ == "__main__":
    main()
