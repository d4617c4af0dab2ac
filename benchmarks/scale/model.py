"""A model of one sharded save of a large job: what each rank, rank zero, the network and the store do, event by event.

:func:`simulate` plays one save. What is in it:

- every rank plans, rank zero gathers the plans and answers; every rank copies its state to host memory, if its release
  does; every rank uploads one file in parts, and reports it; rank zero gathers the reports, makes the metadata, and
  writes it. A synchronous save holds up training until then; an asynchronous one only for the plan and the copy.
- The ranks of a node share its network interface; a connection has a limit of its own. A request costs the store's
  latency, the first one of a connection twice. A store refuses requests beyond its limit for a prefix, and fails
  some at random; both are sent again, after pauses that grow.
- Some nodes are stragglers, whose network interface is slower.
- Of a large job only so many nodes are played as :data:`PLAYED`, each for several that do the same; the store's limit
  is that part of what it is.

Sizes are in bytes, times in seconds, rates per second.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass

from events import Allowance, Event, Link, Process, Simulation, Slots

MIB = 1 << 20
MOST_PARTS = 9_000
#: The most nodes that are played one by one.
PLAYED = 64


@dataclass(frozen=True)
class Cluster:
    """The machines.

    Attributes:
        nodes: How many.
        ranks: Processes of each, one for each GPU.
        network: Of a node's interface.
        copy: From a GPU to pinned host memory, each GPU for itself; infinite where the state is in host memory.
        pageable_copy: The same to memory that is not pinned.
        straggling: The share of nodes that are stragglers.
        slowness: How many times slower a straggler's interface is.
    """

    nodes: int = 1
    ranks: int = 8
    network: float = math.inf
    copy: float = math.inf
    pageable_copy: float = math.inf
    straggling: float = 0.0
    slowness: float = 1.0

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


@dataclass(frozen=True)
class Store:
    """An object store.

    Attributes:
        latency: From a request's last byte to its answer.
        connection: Of one connection.
        writes: PUT and POST requests that it takes for one prefix; more are answered with 503.
        failing: The share of requests that fail otherwise.
        first_pause: Before a request is sent again.
        longest_pause: What pauses grow to.
        patience: After which a request is not sent again.
    """

    latency: float = 0.0
    connection: float = math.inf
    writes: float = math.inf
    failing: float = 0.0
    first_pause: float = 0.1
    longest_pause: float = 15.0
    patience: float = 180.0


@dataclass(frozen=True)
class Planning:
    """What planning and metadata cost in a job of one size.

    Attributes:
        local: On every rank: to make its plan.
        global_plan: On rank zero: to unpickle all plans, to make the global one, and to pickle the answers.
        commit: On rank zero: to unpickle all reports, and to make the metadata.
        plan: Size of one rank's plan.
        report: Size of one rank's report.
        metadata: Size of the metadata.
    """

    local: float = 0.0
    global_plan: float = 0.0
    commit: float = 0.0
    plan: float = 0.0
    report: float = 0.0
    metadata: float = 0.0


@dataclass(frozen=True)
class Release:
    """How a release of Lightning saves.

    Attributes:
        asynchronous: Whether training goes on once the state has been copied.
        copies: Whether the state is copied as a whole before anything is sent.
        pinned: Whether it is copied into memory that is pinned.
        fixed: What a save takes beside all that follows, on each rank.
        background: What of that comes after the copy.
        prepare: Processor time for each byte that a rank sends, one byte after the other.
        overlaps: Whether bytes are prepared while others are being sent.
        part: The smallest part of an upload.
        in_flight: How many parts are sent at a time.
        opening: Requests of a rank, one after the other, before its upload.
        closing: Requests of rank zero after its upload, before it gathers the reports.
        committing: Requests of rank zero, one after the other, beside the one that carries the metadata.
    """

    asynchronous: bool = False
    copies: bool = False
    pinned: bool = False
    fixed: float = 0.0
    background: float = 0.0
    prepare: float = 0.0
    overlaps: bool = True
    part: int = 16 * MIB
    in_flight: int = 8
    opening: int = 0
    closing: int = 0
    committing: int = 0


@dataclass
class Outcome:
    """What one save took.

    Attributes:
        stall: How long training stood still.
        durable: From the start until the checkpoint was complete.
        planned: When every rank had its plan.
        uploaded: When the last rank had uploaded.
        requests: All, those that were refused or failed included.
        writes: Those that are billed as writes.
        retries: Requests that were sent again.
        bytes: What went over the interfaces of all nodes.
        busiest: The most writes that were asked for within one second.
    """

    stall: float = 0.0
    durable: float = 0.0
    planned: float = 0.0
    uploaded: float = 0.0
    requests: int = 0
    writes: int = 0
    retries: int = 0
    bytes: float = 0.0
    busiest: int = 0


class SaveFailed(Exception):
    """A request was sent again for so long that the client gave up."""


def part_size(size: float, smallest: int) -> float:
    """The size of an upload's parts: the smallest, unless there would be too many."""
    return max(float(smallest), math.ceil(size / MOST_PARTS / MIB) * MIB)


class _Save:
    def __init__(
        self, size: float, cluster: Cluster, store: Store, release: Release, planning: Planning, seed: int
    ) -> None:
        self.outcome = Outcome()
        self._seconds: Counter[int] = Counter()
        self._failure = ""
        self._simulation = Simulation()
        self._cluster, self._store, self._release, self._planning = cluster, store, release, planning
        self._share = size / cluster.world
        self._random = random.Random(seed)
        nodes = min(cluster.nodes, PLAYED)
        self._each = cluster.nodes / nodes
        self._played = nodes * cluster.ranks
        self._allowance = Allowance(self._simulation, store.writes / self._each)
        slow = set(self._random.sample(range(nodes), math.ceil(cluster.straggling * nodes)))
        self._links = [
            Link(
                self._simulation,
                cluster.network / (cluster.slowness if node in slow else 1),
                min(store.connection, cluster.network),
            )
            for node in range(nodes)
        ]
        # ranks talk to each other beside what they send to the store: a gather is limited by what rank zero receives
        self._fabric = Link(self._simulation, cluster.network)

    def run(self) -> Outcome:
        self._simulation.start(self._whole())
        self._simulation.run()
        if self._failure:
            raise SaveFailed(self._failure)
        outcome, each = self.outcome, self._each
        for name in ("requests", "writes", "retries"):
            setattr(outcome, name, round(getattr(outcome, name) * each))
        outcome.bytes = each * sum(link.bytes for link in self._links)
        outcome.busiest = round(each * max(self._seconds.values()))
        return outcome

    def _whole(self) -> Process:
        simulation, release, planning, world = self._simulation, self._release, self._planning, self._cluster.world
        yield release.fixed - release.background + planning.local
        if release.copies:
            yield self._share / (self._cluster.copy if release.pinned else self._cluster.pageable_copy)
        if release.asynchronous:
            self.outcome.stall = simulation.now
        yield release.background
        if world > 1:
            yield self._fabric.send((world - 1) * planning.plan)
            yield planning.global_plan
            yield self._fabric.send((world - 1) * planning.plan)
        self.outcome.planned = simulation.now
        yield from [simulation.start(self._upload(rank)) for rank in range(self._played)]
        self.outcome.uploaded = simulation.now
        if world > 1:
            yield self._fabric.send((world - 1) * planning.report)
        yield planning.commit
        yield from self._file(self._links[0], planning.metadata, prepare=0)
        yield from self._round_trips(0, release.committing)
        self.outcome.durable = simulation.now
        if not release.asynchronous:
            self.outcome.stall = simulation.now

    def _upload(self, rank: int) -> Process:
        release, link = self._release, self._links[rank // self._cluster.ranks]
        yield from self._round_trips(rank, release.opening)
        yield from self._file(link, self._share, release.prepare)
        if rank == 0:
            yield from self._round_trips(rank, release.closing)

    def _file(self, link: Link, whole: float, prepare: float) -> Process:
        simulation, release = self._simulation, self._release
        part = part_size(whole, release.part)
        parts = max(1, math.ceil(whole / part))
        if parts > 1:
            yield from self._request(link, 0, is_new=False)
        slots = Slots(simulation, release.in_flight)
        sent: list[Event] = []
        for number in range(parts):
            size = min(part, whole - number * part)
            yield size * prepare
            yield slots.take()
            sent.append(simulation.start(self._send_part(link, size, 0 < number < release.in_flight, slots)))
            if not release.overlaps:
                yield sent[-1]
        yield from sent
        if parts > 1:
            yield from self._request(link, 0, is_new=False)

    def _send_part(self, link: Link, size: float, is_new: bool, slots: Slots) -> Process:
        yield from self._request(link, size, is_new)
        slots.give_back()

    def _round_trips(self, rank: int, number: int) -> Process:
        for _ in range(number):
            yield from self._request(self._links[rank // self._cluster.ranks], 0, is_new=False)

    def _request(self, link: Link, size: float, is_new: bool) -> Process:
        """A request of one connection, until it has succeeded."""
        simulation, store = self._simulation, self._store
        started, pause = simulation.now, store.first_pause
        if is_new:
            yield store.latency
        while True:
            self.outcome.requests += 1
            self._seconds[int(simulation.now)] += 1
            if self._allowance.take():  # else it is refused before the store has seen the body
                yield link.send(size)
                self.outcome.writes += 1
                if not store.failing or self._random.random() >= store.failing:
                    yield store.latency
                    return
            if simulation.now - started > store.patience:
                self._failure = f"the store has refused a request for more than {store.patience:.0f} s"
                simulation.stop()
                yield Event(simulation)
            self.outcome.retries += 1
            yield store.latency + pause
            pause = min(store.longest_pause, self._random.uniform(store.first_pause, 2 * pause))


def simulate(
    size: float,
    cluster: Cluster,
    store: Store,
    release: Release,
    planning: Planning | None = None,
    seed: int = 0,
) -> Outcome:
    """Plays one save.

    Args:
        size: Bytes of the whole state, which the ranks share evenly.
        cluster: The machines.
        store: The object store.
        release: Who saves.
        planning: What planning costs; nothing if not given.
        seed: Of what is random: stragglers, failures, pauses.

    Raises:
        SaveFailed: The store refused a request for too long.
    """
    return _Save(size, cluster, store, release, planning or Planning(), seed).run()
