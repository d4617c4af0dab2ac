"""Asks the model what saves of large jobs take, with stock Lightning and with this one, and what they cost in a month.

Run it with ``.venv/bin/python benchmarks/scale/scenarios.py RESULTS [--page PAGE]``. What was measured
it reads from the files that ``planning.py`` and ``validate.py`` write; what was published are the options' defaults.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import Cluster, Planning, Release, SaveFailed, Store, simulate
from releases import ASYNCHRONOUS, OURS, STOCK, STOCK_NAME, in_parts_for, with_constants
from report import put
from tables import GB, of_answers, of_planning, of_validation

MEASURED = Path(__file__).with_name("measured")
#: Nodes, and bytes of the state.
JOBS = ((128, 500 * GB), (256, 1000 * GB), (512, 2500 * GB), (1024, 5000 * GB), (2048, 10_000 * GB))
RANKS = 8
MONTH_S = 30 * 24 * 3600
SEED = 20
#: The steps and sizes of ``planning.py`` that each of what :class:`Planning` has is the sum of: for plans that torch
#: joins, that we join, and that are known.
TORCH = {
    "local": ["every rank: plan"],
    "global_plan": ["torch: unpickle the plans", "torch: join", "torch: pickle the answers"],
    "commit": ["torch: unpickle the reports", "torch: commit"],
    "plan": ["torch: plan"],
    "report": ["torch: report"],
    "metadata": ["torch: metadata"],
}
JOINED = {
    "local": ["every rank: plan", "every rank: digest"],
    "global_plan": ["join: unpickle what is said", "join", "join: pickle the answers"],
    "commit": ["collect: unpickle what is said", "collect", "commit"],
    "plan": ["join: said"],
    "report": ["collect: said"],
    "metadata": ["metadata"],
}
COMPARED = ["again: compare: unpickle what is said", "again: compare", "again: compare: pickle the answers"]
KNOWN = {**JOINED, "global_plan": COMPARED, "plan": ["compare: said"]}
Names = dict[str, list[str]]
#: What ``planning.py`` has measured of each strategy, for every number of ranks.
Measured = dict[str, list[dict[str, Any]]]


def between(table: list[tuple[float, float]], ranks: float) -> float:
    """A value for a number of ranks, on a line through the two measured ones next to it, in logarithms."""
    if len(table) == 1:
        return table[0][1]
    last = next((i for i in range(1, len(table) - 1) if table[i][0] >= ranks), len(table) - 1)
    (x0, y0), (x1, y1) = table[last - 1], table[last]
    if min(y0, y1) <= 0:
        return y1
    return y0 * (ranks / x0) ** (math.log(y1 / y0) / math.log(x1 / x0))


def planning_of(measured: list[dict[str, Any]], ranks: int, names: Names) -> Planning:
    """What planning costs so many ranks; beyond what was measured, the last two measurements lead on."""

    def value(one: dict[str, Any], name: str) -> float:
        return float(one["steps"][name]["cpu_s"] if name in one["steps"] else one["bytes"][name])

    def sums(parts: list[str]) -> list[tuple[float, float]]:
        return [(one["ranks"], sum(value(one, name) for name in parts)) for one in measured]

    return Planning(**{key: between(sums(parts), ranks) for key, parts in names.items()})


def ways(
    constants: dict[str, dict[str, float]], measured: Measured, world: int
) -> Iterator[tuple[str, Release, Planning]]:
    """Each way to save: its name, the release with this machine's constants, and what its planning costs."""

    def planning(strategy: str, names: Names) -> Planning:
        return planning_of(measured[strategy], world, names)

    yield STOCK_NAME, with_constants(STOCK, constants[STOCK_NAME]), planning("fsdp2", TORCH)
    yield "ours", in_parts_for(with_constants(OURS, constants["ours"]), world), planning("fsdp2", KNOWN)
    for strategy, name in (("fsdp2", "ours, asynchronous"), ("fsdp1", "ours, asynchronous, FSDP1")):
        background = in_parts_for(with_constants(ASYNCHRONOUS, constants[name]), world)
        yield f"{name}, the first save", background, planning(strategy, JOINED)
        yield name, background, planning(strategy, KNOWN)


def answer(
    options: argparse.Namespace, size: float, cluster: Cluster, release: Release, planning: Planning
) -> dict[str, Any]:
    """One save, and what a month of them costs; only why, if the store refuses requests until the save fails.

    In such a month a save begins when the last has ended.
    """
    store = Store(options.latency_ms / 1e3, options.connection * 1e6, options.writes_per_s * options.prefixes)
    try:
        outcome = simulate(size, cluster, store, release, planning, SEED)
    except SaveFailed as failure:
        return {"failure": str(failure)}
    saves = MONTH_S / max(options.steps * options.step_s + outcome.stall, outcome.durable)
    requests_usd = saves * outcome.writes / 1000 * options.write_price
    storage_usd = options.kept * size / GB * options.storage_price
    return {**asdict(outcome), "requests_usd": requests_usd, "storage_usd": storage_usd}


def all_jobs(
    options: argparse.Namespace, measured: Measured, constants: dict[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """Every way to save, for every job."""
    pageable = constants["ours, asynchronous"]["copy_gb_per_s"]  # one thread copies it, as it does here
    network, copy = options.network * GB / 8, options.copy * GB
    machine = Cluster(1, RANKS, network, copy, pageable * GB, options.straggling, options.slowness)
    rows = []
    for nodes, size in JOBS:
        cluster = replace(machine, nodes=nodes)
        for name, release, planning in ways(constants, measured, cluster.world):
            row = answer(options, size, cluster, release, planning)
            rows.append({"way": name, "nodes": nodes, "size": size, **row})
            print(f"{nodes} nodes, {name}: {row}", file=sys.stderr, flush=True)
    return rows


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("results", type=Path, help="where to write them, as JSON")
    add("--page", type=Path, help="a page with markers, between which the tables go")
    add("--planning", type=Path, default=MEASURED / "planning.json", help="what planning.py has measured")
    add("--validation", type=Path, default=MEASURED / "validation.json", help="what validate.py has measured")
    add("--network", type=float, default=25, help="a node's interface, 10^9 bits a second")
    add("--copy", type=float, default=25, help="from a GPU to pinned memory, 10^9 bytes a second")
    add("--latency-ms", type=float, default=100, help="of a request to the store")
    add("--connection", type=float, default=90, help="10^6 bytes a second of one connection to the store")
    add("--writes-per-s", type=float, default=3500, help="writes that the store takes for one prefix")
    add("--prefixes", type=int, default=1, help="over how many of the store's prefixes a checkpoint is spread")
    add("--straggling", type=float, default=0.02, help="share of the nodes whose interface is slower")
    add("--slowness", type=float, default=4, help="how many times slower")
    add("--steps", type=int, default=1000, help="of training between two saves")
    add("--step-s", type=float, default=1, help="seconds that one takes")
    add("--kept", type=int, default=2, help="checkpoints that are there at a time")
    add("--write-price", type=float, default=0.005, help="dollars for 1,000 writes")
    add("--storage-price", type=float, default=0.023, help="dollars for 10^9 bytes and a month")
    return parser.parse_args()


def main() -> None:
    """Asks, writes the answers as JSON, and prints a table."""
    options = parse_arguments()
    planning, validation = (json.loads(one.read_text()) for one in (options.planning, options.validation))
    rows = all_jobs(options, planning["planning"], validation["constants"])
    options.results.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    answers = of_answers(rows)
    print(answers)
    if options.page:
        of_strategies = {f"planning-{name}": of_planning(one) for name, one in planning["planning"].items()}
        put(options.page, {"answers": answers, **of_strategies, "validation": of_validation(validation)})


if __name__ == "__main__":
    main()
