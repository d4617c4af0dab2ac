"""Compares the model of saves with saves on this machine, by two ranks to a server whose latency and rate are set.

Run it with ``.venv/bin/python benchmarks/scale/validate.py RESULTS [--beside PYTHON]``; the second is the interpreter
of an environment with stock Lightning. Two sizes with nothing in the way give the constants of a release: what a save
takes whatever its size, and for each byte. The other cases are predicted from these, and from what is known of the
link. The exit code is 1 if a prediction is wrong by more than 25 % of what was measured.
"""

import argparse
import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import run
from figures import RANKS, Figure
from model import MIB, Cluster, Outcome, Release, Store, simulate
from releases import ASYNCHRONOUS, OURS, STOCK, STOCK_NAME, with_constants
from tables import error, of_validation

TOLERANCE = 0.25
#: What saves took, run by run: ``durable_s`` until all was durable, ``stall_s`` while the ranks stood still.
Runs = list[dict[str, float]]


class Case(NamedTuple):
    """A save: MiB of a rank, milliseconds of a request, 10^6 bytes a second of a connection or 0 for no limit."""

    mib: int
    latency_ms: int = 0
    megabytes_per_s: int = 0

    def __str__(self) -> str:
        rate = f"{self.megabytes_per_s} MB/s a connection" if self.megabytes_per_s else "no limit"
        return f"{self.mib} MiB a rank, {self.latency_ms} ms, {rate}"


SMALL, LARGE = Case(32), Case(512)
CASES = (Case(256, 60), Case(256, 20, 25), Case(512, 20, 100), Case(64, 100, 10))


class Way(NamedTuple):
    """A way to save: the column of its client, the measurement, the strategy, and the release without constants."""

    column: str
    measurement: str
    strategy: str
    release: Release


WAYS = {
    STOCK_NAME: Way(STOCK_NAME, "save_shards", "fsdp2", STOCK),
    "ours": Way(run.OURS, "save_shards", "fsdp2", OURS),
    "ours, asynchronous": Way(run.OURS, "save_in_background", "fsdp2", ASYNCHRONOUS),
    "ours, asynchronous, FSDP1": Way(run.OURS, "save_in_background", "fsdp1", ASYNCHRONOUS),
}


def measure(case: Case, clients: dict[str, run.Client], runs: int) -> dict[str, Runs]:
    """What each way took whose client is there; in turn."""
    link = {"latency_ms": case.latency_ms, "megabytes_per_s": case.megabytes_per_s}
    found: dict[str, Runs] = {name: [] for name, way in WAYS.items() if way.column in clients}
    for turn in range(runs):
        for way in found:
            column, name, strategy, _ = WAYS[way]
            place = f"s3://sink/{{release}}-{turn}-{name}-{strategy}.ckpt"
            figure = Figure(name, place, {"strategy": strategy, "mib": case.mib}, 1, link=link, ranks=RANKS)
            (one,) = run.measure(figure, {column: clients[column]})[column]
            found[way].append({"durable_s": one["wall_s"], "stall_s": one.get("stall_s", one["wall_s"])})
    run.say(f"{case}: {found}")
    return found


def line(small: Runs, large: Runs, key: str) -> tuple[float, float]:
    """Seconds whatever the size, and seconds for each byte, of the two saves with nothing in the way."""
    low, high = (statistics.median(one[key] for one in runs) for runs in (small, large))
    slope = (high - low) / ((LARGE.mib - SMALL.mib) * MIB)
    return max(0.0, low - SMALL.mib * MIB * slope), slope


def calibrate(small: dict[str, Runs], large: dict[str, Runs]) -> dict[str, dict[str, float]]:
    """The constants of each way on this machine."""
    constants = {}
    for way in small:
        fixed, slope = line(small[way], large[way], "durable_s")
        constants[way] = {"fixed_s": fixed, "prepare_s_per_gib": slope * 2**30}
        if WAYS[way].release.asynchronous:
            stall, copy = line(small[way], large[way], "stall_s")
            constants[way] |= {
                "background_s": max(0.0, fixed - stall),
                "prepare_s_per_gib": (slope - copy) * 2**30,
                "copy_gb_per_s": 1e-9 / copy,
            }
    return constants


def predict(case: Case, release: Release, constants: dict[str, float]) -> Outcome:
    """A save of state in host memory. What planning takes on this machine is in the constants."""
    part = release.part
    if not release.overlaps:  # a part is at least a tensor, and the largest has 3/8 of what a rank has
        part = max(part, case.mib * MIB * 3 // 8)
    # stock's copy is among what it takes for each byte
    one = replace(with_constants(release, constants), part=part, copies=release.asynchronous)
    cluster = Cluster(ranks=RANKS, copy=constants.get("copy_gb_per_s", math.inf) * 1e9)
    store = Store(latency=case.latency_ms / 1e3, connection=case.megabytes_per_s * 1e6 or math.inf)
    return simulate(RANKS * case.mib * MIB, cluster, store, one)


def compare(clients: dict[str, run.Client], runs: int) -> dict[str, Any]:
    """All constants, and the cases with what was predicted and measured."""
    constants, rows = calibrate(measure(SMALL, clients, runs), measure(LARGE, clients, runs)), []
    for case in CASES:
        for way, measured in measure(case, clients, runs).items():
            release = WAYS[way].release
            outcome = predict(case, release, constants[way])
            for key in ("durable", "stall") if release.asynchronous else ("durable",):
                row = {"way": f"{way}, {key}", "case": str(case), "predicted_s": getattr(outcome, key)}
                rows.append({**row, "measured_s": [one[f"{key}_s"] for one in measured]})
    return {"machine": run.describe_machine(), "constants": constants, "cases": rows}


def main() -> None:
    """Measures, compares, and fails if the model is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="where to write them, as JSON")
    parser.add_argument("--beside", type=Path, metavar="PYTHON", help="an environment with stock Lightning")
    parser.add_argument("--runs", type=int, default=3, help="of each case (default: %(default)s)")
    options = parser.parse_args()
    with run.clients_of([options.beside] if options.beside else [], options.results) as clients:
        results = compare(clients, options.runs)
    options.results.write_text(json.dumps(results, indent=1) + "\n")
    print(of_validation(results))
    wrong = [row for row in results["cases"] if abs(error(row)) > TOLERANCE]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(results['cases'])} predictions are off by more than {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
