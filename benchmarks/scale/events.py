"""A small simulation of discrete events: a clock, processes that wait, and what they share.

A process is a generator: it yields seconds to sleep for, or an :class:`Event` to wait for. All that happens at the same
time happens in the order in which it was asked for, so that the same input gives the same outcome.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

Process = Generator["float | Event", None, None]
#: Bytes of a transfer that do not count: what rounding may leave of it.
_REST = 1.0


class Event:
    """Something that happens once, and that processes wait for."""

    def __init__(self, simulation: "Simulation", has_happened: bool = False) -> None:
        self._simulation = simulation
        self.waiting: list[Process] = []
        self.has_happened = has_happened

    def happen(self) -> None:
        self.has_happened = True
        for process in self.waiting:
            self._simulation.resume(process)


class Simulation:
    """The clock, in seconds, and what is going to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = itertools.count()
        self._processes: dict[Process, None] = {}

    def at(self, when: float, call: Callable[[Any], None], argument: Any) -> None:
        heapq.heappush(self._agenda, (when, next(self._numbers), call, argument))

    def start(self, process: Process) -> Event:
        """Begins a process now; the event tells of its end."""
        ended = Event(self)

        def whole() -> Process:
            yield from process
            ended.happen()
            del self._processes[started]

        started = whole()
        self._processes[started] = None
        self.resume(started)
        return ended

    def resume(self, process: Process) -> None:
        self.at(self.now, self._step, process)

    def run(self) -> None:
        """Lets all happen, until a process fails, and ends those that still wait then."""
        try:
            while self._agenda:
                self.now, _, call, argument = heapq.heappop(self._agenda)
                call(argument)
        finally:
            for process in self._processes:
                process.close()

    def _step(self, process: Process) -> None:
        for wanted in process:
            if not isinstance(wanted, Event):
                self.at(self.now + wanted, self._step, process)
            elif not wanted.has_happened:
                wanted.waiting.append(process)
            else:
                continue
            return


class Slots:
    """A number of places, of which a process takes one and gives it back."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation, self._free = simulation, number
        self._wanted: deque[Event] = deque()

    def take(self) -> Event:
        event = Event(self._simulation, has_happened=self._free > 0)
        if event.has_happened:
            self._free -= 1
        else:
            self._wanted.append(event)
        return event

    def give_back(self) -> None:
        if self._wanted:
            self._wanted.popleft().happen()
        else:
            self._free += 1


class Link:
    """A network interface, whose rate its transfers share evenly.

    Args:
        simulation: The clock.
        rate: Bytes a second of all transfers together.
        most: Bytes a second of one transfer.
    """

    def __init__(self, simulation: Simulation, rate: float = math.inf, most: float = math.inf) -> None:
        self._simulation, self._rate, self._most = simulation, rate, most
        #: Bytes that a transfer would have got since the start; each ends when this reaches its own number.
        self._level = self._since = self._speed = 0.0
        self._plan = 0
        self._ends: list[tuple[float, int, Event]] = []
        self._numbers = itertools.count()
        self.bytes = 0.0

    def send(self, size: float) -> Event:
        """Begins a transfer; the event tells of its end."""
        self.bytes += size
        event = Event(self._simulation, has_happened=self._rate == self._most == math.inf)
        if not event.has_happened:
            self._catch_up()
            heapq.heappush(self._ends, (self._level + size, next(self._numbers), event))
            self._look_ahead()
        return event

    def _catch_up(self) -> None:
        self._level += (self._simulation.now - self._since) * self._speed
        self._since = self._simulation.now

    def _look_ahead(self) -> None:
        self._plan += 1
        if self._ends:
            self._speed = min(self._most, self._rate / len(self._ends))
            left = max(0.0, self._ends[0][0] - self._level)
            self._simulation.at(self._simulation.now + left / self._speed, self._end, self._plan)

    def _end(self, plan: int) -> None:
        if plan != self._plan:  # others came or went meanwhile
            return
        self._catch_up()
        while self._ends and self._ends[0][0] <= self._level + _REST:
            heapq.heappop(self._ends)[2].happen()
        self._look_ahead()


class Allowance:
    """Requests that a store takes in a second, saved up for one second at most; others are refused."""

    def __init__(self, simulation: Simulation, rate: float) -> None:
        self._simulation, self._rate = simulation, rate
        self._left, self._since = rate, 0.0

    def take(self) -> bool:
        """Whether one more request is allowed now."""
        if self._rate == math.inf:
            return True
        now = self._simulation.now
        self._left = min(self._rate, self._left + (now - self._since) * self._rate)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True
