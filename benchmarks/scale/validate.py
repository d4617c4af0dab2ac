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
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import run
from figures import RANKS, Figure
from model import MIB, Cluster, Outcome, Release, Store, simulate
from releases import ASYNCHRONOUS, OURS, STOCK, STOCK_NAME, with_constants
from tables import error, of_validation

TOLERANCE = 0.25


@dataclass(frozen=True)
class Case:
    """A save: MiB of a rank, milliseconds of a request, 10^6 bytes a second of a connection or 0 for no limit."""

    mib: int
    latency_ms: int = 0
    megabytes_per_s: int = 0

    def __str__(self) -> str:
        rate = f"{self.megabytes_per_s} MB/s a connection" if self.megabytes_per_s else "no limit"
        return f"{self.mib} MiB a rank, {self.latency_ms} ms, {rate}"

    @property
    def store(self) -> Store:
        rate = self.megabytes_per_s * 1e6 or float("inf")
        return Store(latency=self.latency_ms / 1e3, connection=rate)


SMALL, LARGE = Case(32), Case(512)
CASES = (Case(256, 60), Case(256, 20, 25), Case(512, 20, 100), Case(64, 100, 10))


@dataclass(frozen=True)
class Way:
    """A way to save.

    Attributes:
        client: What measures it.
        name: Its name there.
        measure: The measurement.
        release: How it saves, without this machine's constants.
    """

    client: run.Client
    name: str
    measure: str
    release: Release


def measure(case: Case, ways: dict[str, Way], runs: int) -> dict[str, list[dict[str, float]]]:
    """What each way took, run by run: seconds until all was durable, and those for which the ranks stood still."""
    link = ("--latency-ms", str(case.latency_ms), "--megabytes-per-s", str(case.megabytes_per_s))
    arguments = {"strategy": "fsdp2", "mib": case.mib}
    found: dict[str, list[dict[str, float]]] = {label: [] for label in ways}
    for turn in range(runs):
        for label, way in ways.items():
            place = f"s3://sink/{{release}}-{turn}-{way.measure}.ckpt"
            figure = Figure(way.measure, place, arguments, 1, link=link, ranks=RANKS)
            (one,) = run.measure(figure, {way.name: way.client})[way.name]
            found[label].append({"durable_s": one["wall_s"], "stall_s": one.get("stall_s", one["wall_s"])})
    run.say(f"{case}: {found}")
    return found


def middle(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(one[key] for one in runs)


def line(small: list[dict[str, float]], large: list[dict[str, float]], key: str) -> tuple[float, float]:
    """Seconds whatever the size, and seconds for each byte, of the two saves with nothing in the way."""
    slope = (middle(large, key) - middle(small, key)) / ((LARGE.mib - SMALL.mib) * MIB)
    return max(0.0, middle(small, key) - SMALL.mib * MIB * slope), slope


def calibrate(ways: dict[str, Way], runs: int) -> dict[str, dict[str, float]]:
    """The constants of each way on this machine."""
    small, large = measure(SMALL, ways, runs), measure(LARGE, ways, runs)
    constants = {}
    for label, way in ways.items():
        fixed, slope = line(small[label], large[label], "durable_s")
        constants[label] = {"fixed_s": fixed, "prepare_s_per_gib": slope * 2**30}
        if way.release.asynchronous:
            stall, copy = line(small[label], large[label], "stall_s")
            constants[label] |= {
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
    one = replace(
        with_constants(release, constants), part=part, copies=release.asynchronous
    )  # stock's copy is among what it takes for each byte
    cluster = Cluster(ranks=RANKS, copy=constants.get("copy_gb_per_s", math.inf) * 1e9)
    return simulate(RANKS * case.mib * MIB, cluster, case.store, one)


def compare(ways: dict[str, Way], runs: int) -> dict[str, Any]:
    """All constants, and the cases with what was predicted and measured."""
    constants, rows = calibrate(ways, runs), []
    for case in CASES:
        measured = measure(case, ways, runs)
        for label, way in ways.items():
            outcome = predict(case, way.release, constants[label])
            for key, value in (("durable_s", outcome.durable), ("stall_s", outcome.stall)):
                if key == "durable_s" or way.release.asynchronous:
                    row = {"way": f"{label}, {key[:-2]}", "case": str(case), "predicted_s": value}
                    rows.append({**row, "measured_s": [one[key] for one in measured[label]]})
    return {"machine": run.describe_machine(), "constants": constants, "cases": rows}


def main() -> None:
    """Measures, compares, and fails if the model is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="where to write them, as JSON")
    parser.add_argument("--beside", type=Path, metavar="PYTHON", help="an environment with stock Lightning")
    parser.add_argument("--runs", type=int, default=3, help="of each case (default: %(default)s)")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.results.parent)))
        ways = {}
        if options.beside:
            other = stack.enter_context(run.client(options.beside.absolute(), folder / "other"))
            ways[STOCK_NAME] = Way(other, STOCK_NAME, "save_shards", STOCK)
        own = stack.enter_context(run.client(Path(sys.executable).absolute(), folder / "own"))
        ways["ours"] = Way(own, run.OURS, "save_shards", OURS)
        ways["ours, asynchronous"] = Way(own, run.OURS, "save_in_background", ASYNCHRONOUS)
        results = compare(ways, options.runs)
    options.results.write_text(json.dumps(results, indent=1) + "\n")
    print(of_validation(results))
    wrong = [row for row in results["cases"] if abs(error(row)) > TOLERANCE]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(results['cases'])} predictions are off by more than {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
