"""Takes the time and the memory of what a client does, in one process or in several ranks."""

import ctypes
import json
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from memory import Watcher

MIB = 1 << 20
_ANSWERS = os.dup(1)


def answer(what: Any) -> None:
    """Tells whoever has started this process; a line that says ``"ready"`` or what was measured."""
    os.write(_ANSWERS, json.dumps(what).encode() + b"\n")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def of_ranks(own: Any) -> list[Any]:
    """Returns what each rank has; a collective call."""
    if not dist.is_initialized():
        return [own]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks


class Clock:
    """Wall time and processor time of a body: of all threads, and of processes that it started and waited for."""

    def __enter__(self) -> "Clock":
        self._start = time.perf_counter(), _processor_seconds()
        return self

    def __exit__(self, *error: object) -> None:
        self.wall = time.perf_counter() - self._start[0]
        self.cpu = _processor_seconds() - self._start[1]


def _processor_seconds() -> float:
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + of_children.ru_utime + of_children.ru_stime


class Meter:
    """Measures calls once all is prepared. Made while the process is still small, which its watcher is forked from."""

    def __init__(self) -> None:
        self.watcher = Watcher()

    def ready(self) -> None:
        """Says that all is prepared, and waits for the start; a collective call."""
        barrier()
        if rank() == 0:
            answer("ready")
            os.read(0, 1)
        barrier()

    def measure(self, call: Callable[[], Any]) -> dict[str, float]:
        """Returns the time of the slowest rank, the processor time of all, and the most and the least memory of one."""
        if dist.is_initialized():
            trim()
        self.ready()
        with self.watcher.watching() as peak, Clock() as clock:
            call()
        wall, cpu, memory = zip(*of_ranks((clock.wall, clock.cpu, peak.extra)), strict=True)
        most, least = max(memory) / MIB, min(memory) / MIB
        return {"wall_s": max(wall), "cpu_s": sum(cpu), "memory_mib": most, "least_memory_mib": least}


def trim() -> None:
    """Gives freed memory back to the system: else it could be used again, and would not count as extra."""
    ctypes.CDLL(None).malloc_trim(0)
