"""Ranks of a job that are threads of this process, and take turns."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from typing_extensions import override

from lightning.fabric.storage.collectives.channel import Channel
from lightning.fabric.storage.collectives.rank_group import RankGroup


class _Job:
    """What the ranks share."""

    def __init__(self, world: int) -> None:
        self.world = world
        #: Held by the rank that runs: the client of some stores cannot be used by several threads.
        self.turn = threading.Lock()
        self.gathered: list[Any] = [None] * world
        self.scattered: list[Any] = []
        self._barrier = threading.Barrier(world, timeout=60)

    def meet(self) -> None:
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()


class _ThreadChannel(Channel):
    def __init__(self, job: _Job, rank: int) -> None:
        super().__init__()
        self._job, self.rank, self.world_size = job, rank, job.world

    @override
    def gather(self, value: Any) -> list[Any]:
        self._job.gathered[self.rank] = value
        self._job.meet()
        return list(self._job.gathered) if self.rank == 0 else []

    @override
    def scatter(self, values: list[Any]) -> Any:
        if self.rank == 0:
            self._job.scattered = values
        self._job.meet()
        return self._job.scattered[self.rank]


def run_ranks(world: int, act: Callable[[RankGroup], Any]) -> list[Any]:
    """Returns what ``act`` returns, or raises, on each rank."""
    job = _Job(world)

    def run(rank: int) -> Any:
        with job.turn:
            try:
                return act(RankGroup(_ThreadChannel(job, rank)))
            except BaseException as error:
                return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(run, range(world)))
