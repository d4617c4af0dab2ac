"""Measures what planning a sharded save and its metadata cost, for many simulated ranks in one process.

Run it with ``.venv/bin/python benchmarks/scale/planning.py RESULTS [--ranks N ...]``: the plans are real ones (see
``plans.py``), and our writer does with them what rank zero would do. Each step is measured in processor time of the
thread that does it, so that other work on the machine adds little. 1,024 ranks take ten minutes and 4 GiB of memory.
"""

import argparse
import gc
import hashlib
import io
import json
import multiprocessing
import pickle
import platform
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import plans
import torch
from tables import of_planning
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.planner import WriteItem

from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.sharded import metadata_file
from lightning.fabric.storage.sharded.global_plan import PackedPlan
from lightning.fabric.storage.sharded.save_planner import PlanCache, Shard
from lightning.fabric.storage.sharded.writer import Report, ShardWriter

TICK_S = 0.001
LAYERS = 32


class Steps:
    """What was measured of each step, by name, in processor time of the thread that works."""

    def __init__(self) -> None:
        self.steps: dict[str, dict[str, float]] = {}
        self._collecting = self._began = 0.0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Takes the time of a body, of Python's garbage collections in it, and of the longest hold of the GIL."""
        gc.collect()
        self._collecting = 0.0
        ended, holds = threading.Event(), [0.0]
        clock = time.pthread_getcpuclockid(threading.get_ident())
        ticker = threading.Thread(target=_tick, args=[clock, ended, holds])
        gc.callbacks.append(self._note)
        ticker.start()
        start = time.thread_time()
        yield
        seconds = time.thread_time() - start
        ended.set()
        ticker.join()
        gc.callbacks.remove(self._note)
        self.steps[name] = {"cpu_s": seconds, "hold_s": max(holds), "collecting_s": self._collecting}

    def _note(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._collecting += time.thread_time() - self._began


def _tick(clock: int, ended: threading.Event, holds: list[float]) -> None:
    """Wants to run once a millisecond, and notes for how long the thread of a clock keeps the GIL meanwhile."""
    before = time.clock_gettime(clock)
    while not ended.is_set():
        time.sleep(TICK_S)
        now = time.clock_gettime(clock)
        holds[0] = max(holds[0], now - before)
        before = now


class Crowd:
    """A group of many ranks, of which only rank zero is there: it speaks for the others.

    It takes the place of the group of ranks that a save is given. What every rank says and is answered is pickled and
    unpickled, as it would be, and what rank zero does with it is measured.
    """

    rank, is_coordinator = 0, True

    def __init__(self, world: int, steps: Steps, folder: Path, plan_of: Callable[[int], SavePlan]) -> None:
        self.world_size = world
        self._steps, self._folder = steps, folder
        self._plan_of = plan_of  #: of a rank, before it is joined with others
        self.sizes: dict[str, int] = {}  #: of each step, the largest message of a rank and to a rank; pickled
        self._silent = iter(("assign", "commit"))
        self._written: list[bytes] = []

    def gather_scatter(self, what: str, mine: Callable[[], Any], decide: Callable[[list[Any]], list[Any]]) -> Any:
        own = mine()
        name = next(self._silent) if own is None else {PackedPlan: "join", Report: "collect"}.get(type(own), "compare")
        sent = [pickle.dumps(self._said(own, rank)) for rank in range(self.world_size)]
        self.sizes[f"{name}: said"] = max(map(len, sent))
        with self._steps.step(f"{name}: unpickle what is said"):
            said = [pickle.loads(one) for one in sent]
        del sent
        with self._steps.step(name):
            answers = decide(said)
        with self._steps.step(f"{name}: pickle the answers"):
            back = [pickle.dumps(one) for one in answers]
        self.sizes[f"{name}: answered"] = max(map(len, back))
        if isinstance(own, PackedPlan):
            self._written = answers
        return answers[0]

    def _said(self, own: Any, rank: int) -> Any:
        """What a rank says, given what rank zero does."""
        if rank and isinstance(own, PackedPlan):
            return PackedPlan.of(self._plan_of(rank))
        return self._report(next(iter(own.files)), rank) if rank and isinstance(own, Report) else own

    def _report(self, name: str, rank: int) -> Report:
        """Given what rank zero has called its file. What the rank has written is there, with nothing in it."""
        items = self._plan_of(rank).items
        written = [item for item, is_written in zip(items, self._written[rank], strict=True) if is_written]
        report = plans.report(SavePlan(written), name.replace("_0_", f"_{rank}_", 1))
        for file, described in report.files.items():
            with open(self._folder / file, "wb") as shard:
                shard.truncate(described.size)
        return report


def save_fsdp2(world: int, folder: Path) -> tuple[Steps, dict[str, int]]:
    """Saves with FSDP2, as :func:`save`, and does what torch does for it."""
    steps = Steps()
    with plans.rank_of(world, 0) as mesh:
        shard = plan(plans.state(LAYERS, mesh), steps)
    plans.check(LAYERS, world, shard.plan)
    sizes = save(world, folder, shard, lambda rank: plans.moved(shard.plan, rank), steps)
    return steps, {**sizes, **save_as_torch(world, shard.plan, steps)}


def save_fsdp1(world: int, folder: Path) -> tuple[Steps, dict[str, int]]:
    """Saves with FSDP1, as :func:`save`."""
    steps = Steps()
    shard = plan(plans.flat_state(LAYERS, world, 0), steps)

    def plan_of(rank: int) -> SavePlan:
        return Shard.of(plans.flat_state(LAYERS, world, rank), None, Another).plan

    return steps, save(world, folder, shard, plan_of, steps)


class Another:
    """A group, as far as a plan needs it, to a rank that is not rank zero."""

    is_coordinator = False


def plan(state: dict[str, Any], steps: Steps) -> Shard:
    """Makes the plan of rank zero."""
    with steps.step("every rank: plan"):
        shard = Shard.of(state, {"epoch": 1}, Crowd)
    with steps.step("every rank: digest"):
        hashlib.blake2b(b"".join(PackedPlan.of(shard.plan)))
    return shard


def save(world: int, folder: Path, shard: Shard, plan_of: Callable[[int], SavePlan], first: Steps) -> dict[str, int]:
    """Saves twice; the plans of the second time are those of the first. Only rank zero writes, and small tensors."""
    second = Steps()
    agreed, crowd = PlanCache(), Crowd(world, first, folder / "x.ckpt", plan_of)
    shard = replace(shard, resolve=_small)
    ShardWriter(locate(folder / "x.ckpt"), crowd).save(lambda: shard, agreed)
    sizes = {**crowd.sizes, "metadata": (folder / "x.ckpt" / ".metadata").stat().st_size}
    content = (folder / "x.ckpt" / ".metadata").read_bytes()
    with first.step("every rank that loads: unpickle the metadata"):
        metadata_file.parse_metadata(content, locate(folder))
    agreed.agree(lambda: shard.plan, Crowd(world, second, folder / "x.ckpt", plan_of))
    first.steps |= {f"again: {name}": step for name, step in second.steps.items()}
    return sizes


def _small(item: WriteItem) -> torch.Tensor | io.BytesIO:
    return io.BytesIO(b"x") if item.tensor_data is None else torch.zeros(1)


def save_as_torch(world: int, plan: SavePlan, steps: Steps) -> dict[str, int]:
    """What rank zero does for the same with torch's own planner and writer, as stock Lightning does."""
    sent = [pickle.dumps(plans.moved(plan, rank)) for rank in range(world)]
    sizes = {"torch: plan": max(map(len, sent))}
    with steps.step("torch: unpickle the plans"):
        all_plans = [pickle.loads(one) for one in sent]
    with steps.step("torch: join"):
        joined, metadata = DefaultSavePlanner().create_global_plan(all_plans)
    with steps.step("torch: pickle the answers"):
        sent = [pickle.dumps(one) for one in joined]
    del all_plans
    sent = [pickle.dumps(plans.results(one, rank)) for rank, one in enumerate(joined)]
    del joined
    sizes["torch: report"] = max(map(len, sent))
    with steps.step("torch: unpickle the reports"):
        reports = [pickle.loads(one) for one in sent]
    with steps.step("torch: commit"):
        metadata.storage_data = {result.index: result.storage_data for report in reports for result in report}
        sizes["torch: metadata"] = len(pickle.dumps(metadata))
    return sizes


def measure(world: int, strategy: str) -> dict[str, Any]:
    """What a save of so many ranks costs; takes a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        steps, sizes = STRATEGIES[strategy](world, Path(folder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"ranks": world, "steps": steps.steps, "bytes": {**sizes, "peak memory": peak}}


STRATEGIES = {"fsdp2": save_fsdp2, "fsdp1": save_fsdp1}


def main() -> None:
    """Measures each number of ranks in a process of its own, prints a table, and keeps the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="where to write them, as JSON")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024], help="powers of two, up to 1024")
    options = parser.parse_args()
    measured: dict[str, Any] = {}
    for strategy in STRATEGIES:
        for ranks in options.ranks:
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                measured.setdefault(strategy, []).append(pool.submit(measure, ranks, strategy).result())
        print(of_planning(measured[strategy]))
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    options.results.write_text(json.dumps({"versions": versions, "planning": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
