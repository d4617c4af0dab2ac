"""Measures what only a GPU shows of saves in the background.

``python benchmarks/gpu/run.py [RESULTS]`` prints a table and writes the same figures as JSON, and fails where there is
no CUDA device. With ``--quick`` it does the same in a moment on the CPU: that says whether it works, and nothing else.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import machine
from memory import Watcher
from saves import saves
from staging import Sizes, measure

QUICK = Sizes(
    large=(8, 4), small_count=8, small_kib=512, layers=2, width=128, batch=2, interval=2, runs=2, copies=2, steps=4,
    saves=2,
)  # fmt: skip


def table(figures: dict[str, Any]) -> str:
    """Markdown, with a row for each figure, and those of several values in one row."""
    lines = ["| | median or value | 99th percentile | longest | of |", "|---|---|---|---|---|"]
    kinds = ("_99th_percentile", "_longest", "_count")
    for name, value in figures.items():
        if not name.endswith(kinds):
            cells = [value, *(figures.get(name + kind, "") for kind in kinds)]
            lines.append(f"| {name.replace('_', ' ')} | {' | '.join(map(shown, cells))} |")
    return "\n".join(lines)


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="?", help="the JSON file to write")
    parser.add_argument("--quick", action="store_true", help="small sizes, on the CPU")
    arguments = parser.parse_args()
    watcher = Watcher()  # which forks this process, before CUDA has threads in it
    if not arguments.quick:
        machine.require_device()
    device, sizes = ("cpu", QUICK) if arguments.quick else ("cuda", Sizes())
    results = {"machine": machine.describe(), "sizes": vars(sizes)}
    results["figures"] = {**measure(device, sizes), **saves(device, sizes, watcher)}
    print(" · ".join(f"{name} {value}" for name, value in results["machine"].items()), end="\n\n")
    print(table(results["figures"]))
    if arguments.results:
        arguments.results.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
