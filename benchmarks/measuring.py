"""What every measurement does: it says when it is prepared, waits for the start, and takes the time."""

import json
import os
import resource
import time
from typing import Any

MIB = 1 << 20
ANSWERS = os.dup(1)


def answer(what: Any) -> None:
    """Tells whoever has started this process; a line that says ``"ready"`` or what was measured."""
    os.write(ANSWERS, json.dumps(what).encode() + b"\n")


def ready() -> None:
    """Waits for the start."""
    answer("ready")
    os.read(0, 1)


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
