"""Asks the model what saves of large jobs take, with stock Lightning and with this one, and what they cost in a month.

Run it with ``.venv/bin/python benchmarks/scale/scenarios.py RESULTS [--page PAGE]``. What was measured
it reads from the files that ``planning.py`` and ``validate.py`` write; what was published are the options' defaults.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model import Cluster, Outcome, Planning, Release, SaveFailed, Store, simulate
from releases import ASYNCHRONOUS, OURS, STOCK, STOCK_NAME, in_parts_for, with_constants
from tables import GB, of_answers, of_planning, of_validation, put

MEASURED = Path(__file__).with_name("measured")
#: Nodes, and bytes of the state.
JOBS = ((128, 500 * GB), (256, 1000 * GB), (512, 2500 * GB), (1024, 5000 * GB), (2048, 10_000 * GB))
RANKS = 8
MONTH_S = 30 * 24 * 3600
SEED = 20


@dataclass(frozen=True)
class Prices:
    """What a store asks for, in dollars.

    Attributes:
        writes: A thousand PUT, POST or LIST requests.
        storage: 10^9 bytes for a month.
        interval: Seconds of training between two saves.
        kept: How many checkpoints are there at a time.
    """

    writes: float
    storage: float
    interval: float
    kept: int

    def month(self, size: float, outcome: Outcome) -> tuple[float, float]:
        """Dollars for requests, and for storage, of a month of training. A save begins when the last has ended."""
        saves = MONTH_S / max(self.interval + outcome.stall, outcome.durable)
        return saves * outcome.writes / 1000 * self.writes, self.kept * size / GB * self.storage


def between(table: list[tuple[float, float]], ranks: float) -> float:
    """A value for a number of ranks, on a line through the two measured ones next to it, in logarithms."""
    if len(table) == 1:
        return table[0][1]
    last = next((i for i in range(1, len(table) - 1) if table[i][0] >= ranks), len(table) - 1)
    (x0, y0), (x1, y1) = table[last - 1], table[last]
    if min(y0, y1) <= 0:
        return y1
    return y0 * (ranks / x0) ** (math.log(y1 / y0) / math.log(x1 / x0))


class Measured:
    """What planning costs, by the number of ranks; beyond what was measured, the last two lead on.

    Args:
        planning: From ``planning.py``.
    """

    def __init__(self, planning: list[dict[str, Any]]) -> None:
        self._planning = planning

    def of(self, ranks: int, joins: str) -> Planning:
        """What a save costs whose plans are joined by ``"torch"`` or ``"ours"``, or are known (``"nobody"``)."""
        if joins == "torch":
            return Planning(
                local=self._seconds(["every rank: plan"], ranks),
                global_plan=self._seconds(
                    [f"torch: {step}" for step in ("unpickle the plans", "join", "pickle the answers")], ranks
                ),
                commit=self._seconds(["torch: unpickle the reports", "torch: commit"], ranks),
                plan=self._bytes("torch: plan", ranks),
                report=self._bytes("torch: report", ranks),
                metadata=self._bytes("torch: metadata", ranks),
            )
        group, said = ("again: compare", "compare") if joins == "nobody" else ("join", "join")
        return Planning(
            local=self._seconds(["every rank: plan", "every rank: digest"], ranks),
            global_plan=self._seconds(
                [f"{group}{part}" for part in (": unpickle what is said", "", ": pickle the answers")], ranks
            ),
            commit=self._seconds(["collect: unpickle what is said", "collect", "commit"], ranks),
            plan=self._bytes(f"{said}: said", ranks),
            report=self._bytes("collect: said", ranks),
            metadata=self._bytes("metadata", ranks),
        )

    def _seconds(self, names: list[str], ranks: int) -> float:
        found = [(one["ranks"], sum(one["steps"][name]["cpu_s"] for name in names)) for one in self._planning]
        return between(found, ranks)

    def _bytes(self, name: str, ranks: int) -> float:
        return between([(one["ranks"], one["bytes"][name]) for one in self._planning], ranks)


def ways(constants: dict[str, dict[str, float]]) -> dict[str, tuple[Release, str]]:
    """Each way to save by name: the release with this machine's constants, and who joins the plans of the ranks."""
    background = with_constants(ASYNCHRONOUS, constants["ours, asynchronous"])
    return {
        STOCK_NAME: (with_constants(STOCK, constants[STOCK_NAME]), "torch"),
        "ours": (with_constants(OURS, constants["ours"]), "nobody"),
        "ours, asynchronous, the first save": (background, "ours"),
        "ours, asynchronous": (background, "nobody"),
    }


def play(size: float, cluster: Cluster, store: Store, release: Release, planning: Planning) -> dict[str, Any]:
    """One save; without an outcome if the store refuses requests for so long that the save fails."""
    try:
        outcome = simulate(size, cluster, store, release, planning, SEED)
    except SaveFailed as failure:
        return {"failure": str(failure)}
    return {**asdict(outcome), "outcome": outcome}


def all_jobs(
    options: argparse.Namespace, planning: list[dict[str, Any]], constants: dict[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """Every way to save, for every job."""
    measured = Measured(planning)
    store = Store(options.latency_ms / 1e3, options.connection * 1e6, options.writes_per_s * options.prefixes)
    prices = Prices(options.write_price, options.storage_price, options.steps * options.step_s, options.kept)
    pageable = constants["ours, asynchronous"]["copy_gb_per_s"]  # one thread copies it, as it does here
    machine = Cluster(
        1, RANKS, options.network * GB / 8, options.copy * GB, pageable * GB, options.straggling, options.slowness
    )
    rows = []
    for nodes, size in JOBS:
        cluster = replace(machine, nodes=nodes)
        for name, (release, joins) in ways(constants).items():
            at_scale = release if joins == "torch" else in_parts_for(release, cluster.world)
            row = play(size, cluster, store, at_scale, measured.of(cluster.world, joins))
            if outcome := row.pop("outcome", None):
                row["requests_usd"], row["storage_usd"] = prices.month(size, outcome)
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
    print(of_answers(rows))
    if options.page:
        tables = {"answers": of_answers(rows), "planning": of_planning(planning["planning"])}
        put(options.page, {**tables, "validation": of_validation(validation)})


if __name__ == "__main__":
    main()
