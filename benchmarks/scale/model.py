"""A model of one sharded save of a large job: what each rank, rank zero, the network and the store do, event by event.

:func:`simulate` plays one save. What is in it:

- every rank plans, rank zero gathers the plans and answers; every rank copies its state to host memory, if its release
  does; every rank uploads one file in parts, and reports it; rank zero gathers the reports, makes the metadata, and
  writes it. A synchronous save holds up training until then; an asynchronous one only for the plan and the copy.
- The ranks of a node share its network interface; a connection has a limit of its own. A request costs the store's
  latency, the first one of a connection twice. A store refuses requests beyond its limit for a prefix, which are sent
  again, after pauses that grow.
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
    """The machines."""

    nodes: int = 1
    ranks: int = 8  #: processes of each node, one for each GPU
    network: float = math.inf  #: of a node's interface
    copy: float = math.inf  #: from a GPU to pinned host memory, each for itself; infinite if the state is there
    pageable_copy: float = math.inf  #: the same to memory that is not pinned
    straggling: float = 0.0  #: the share of nodes that are stragglers
    slowness: float = 1.0  #: how many times slower a straggler's interface is

    @property
    def world(self) -> int:
        return self.nodes * self.ranks


@dataclass(frozen=True)
class Store:
    """An object store."""

    latency: float = 0.0  #: from a request's last byte to its answer
    connection: float = math.inf  #: of one connection
    writes: float = math.inf  #: PUT and POST requests that it takes for one prefix; more are answered with 503
    first_pause: float = 0.1  #: before a request is sent again
    longest_pause: float = 15.0  #: what pauses grow to
    patience: float = 180.0  #: after which a request is not sent again


@dataclass(frozen=True)
class Planning:
    """What planning and metadata cost in a job of one size."""

    local: float = 0.0  #: on every rank: to make its plan
    global_plan: float = 0.0  #: on rank zero: to unpickle all plans, make the global one, and pickle the answers
    commit: float = 0.0  #: on rank zero: to unpickle all reports, and to make the metadata
    plan: float = 0.0  #: size of one rank's plan
    report: float = 0.0  #: size of one rank's report
    metadata: float = 0.0  #: size of the metadata


@dataclass(frozen=True)
class Release:
    """How a release of Lightning saves."""

    asynchronous: bool = False  #: whether training goes on once the state has been copied
    copies: bool = False  #: whether the state is copied as a whole before anything is sent
    pinned: bool = False  #: whether it is copied into memory that is pinned
    fixed: float = 0.0  #: what a save takes beside all that follows, on each rank
    background: float = 0.0  #: what of that comes after the copy
    prepare: float = 0.0  #: processor time for each byte that a rank sends, one byte after the other
    overlaps: bool = True  #: whether bytes are prepared while others are being sent
    part: int = 16 * MIB  #: the smallest part of an upload
    in_flight: int = 8  #: how many parts are sent at a time
    opening: int = 0  #: requests of a rank, one after the other, before its upload
    closing: int = 0  #: requests of rank zero after its upload, before it gathers the reports
    committing: int = 0  #: requests of rank zero, one after the other, beside the one that carries the metadata


@dataclass
class Outcome:
    """What one save took."""

    stall: float = 0.0  #: how long training stood still
    durable: float = 0.0  #: from the start until the checkpoint was complete
    writes: int = 0  #: requests that are billed as writes
    retries: int = 0  #: requests that were refused and sent again
    bytes: float = 0.0  #: what went over the interfaces of all nodes
    busiest: int = 0  #: the most writes that were asked for within one second


class SaveFailed(Exception):
    """A request was sent again for so long that the client gave up."""


class _Save:
    def __init__(
        self, size: float, cluster: Cluster, store: Store, release: Release, planning: Planning, seed: int
    ) -> None:
        self.outcome = Outcome()
        self._seconds: Counter[int] = Counter()
        self._simulation = simulation = Simulation()
        self._cluster, self._store, self._release, self._planning = cluster, store, release, planning
        self._share = size / cluster.world
        self._random = random.Random(seed)
        nodes = min(cluster.nodes, PLAYED)
        self._each = cluster.nodes / nodes
        self._allowance = Allowance(simulation, store.writes / self._each)
        slow = set(self._random.sample(range(nodes), math.ceil(cluster.straggling * nodes)))
        rates = [cluster.network / (cluster.slowness if node in slow else 1) for node in range(nodes)]
        self._links = [Link(simulation, rate, min(store.connection, cluster.network)) for rate in rates]
        # ranks talk to each other beside what they send to the store: a gather is limited by what rank zero receives
        self._fabric = Link(simulation, cluster.network)

    def run(self) -> Outcome:
        self._simulation.start(self._whole())
        self._simulation.run()
        outcome, each = self.outcome, self._each
        outcome.writes, outcome.retries = round(outcome.writes * each), round(outcome.retries * each)
        outcome.bytes = each * sum(link.bytes for link in self._links)
        outcome.busiest = round(each * max(self._seconds.values()))
        return outcome

    def _whole(self) -> Process:
        simulation, release, planning, cluster = self._simulation, self._release, self._planning, self._cluster
        others = cluster.world - 1
        yield release.fixed - release.background + planning.local
        if release.copies:
            yield self._share / (cluster.copy if release.pinned else cluster.pageable_copy)
        if release.asynchronous:
            self.outcome.stall = simulation.now
        yield release.background
        if others:
            yield self._fabric.send(others * planning.plan)
            yield planning.global_plan
            yield self._fabric.send(others * planning.plan)
        yield from [simulation.start(self._upload(rank)) for rank in range(len(self._links) * cluster.ranks)]
        if others:
            yield self._fabric.send(others * planning.report)
        yield planning.commit
        yield from self._file(self._links[0], planning.metadata, prepare=0)
        yield from self._round_trips(self._links[0], release.committing)
        self.outcome.durable = simulation.now
        if not release.asynchronous:
            self.outcome.stall = simulation.now

    def _upload(self, rank: int) -> Process:
        release, link = self._release, self._links[rank // self._cluster.ranks]
        yield from self._round_trips(link, release.opening)
        yield from self._file(link, self._share, release.prepare)
        if rank == 0:
            yield from self._round_trips(link, release.closing)

    def _file(self, link: Link, whole: float, prepare: float) -> Process:
        simulation, release = self._simulation, self._release
        part = max(float(release.part), math.ceil(whole / MOST_PARTS / MIB) * MIB)
        parts = max(1, math.ceil(whole / part))
        if parts > 1:
            yield from self._request(link, 0)
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
            yield from self._request(link, 0)

    def _send_part(self, link: Link, size: float, is_new: bool, slots: Slots) -> Process:
        yield from self._request(link, size, is_new)
        slots.give_back()

    def _round_trips(self, link: Link, number: int) -> Process:
        for _ in range(number):
            yield from self._request(link, 0)

    def _request(self, link: Link, size: float, is_new: bool = False) -> Process:
        """A request of one connection, which may be new, until it has succeeded."""
        simulation, store = self._simulation, self._store
        started, pause = simulation.now, store.first_pause
        if is_new:
            yield store.latency
        while True:
            self._seconds[int(simulation.now)] += 1
            if self._allowance.take():  # else it is refused before the store has seen the body
                yield link.send(size)
                self.outcome.writes += 1
                yield store.latency
                return
            if simulation.now - started > store.patience:
                raise SaveFailed(f"the store has refused a request for more than {store.patience:.0f} s")
            self.outcome.retries += 1
            yield store.latency + pause
            pause = min(store.longest_pause, self._random.uniform(store.first_pause, 2 * pause))


def simulate(
    size: float, cluster: Cluster, store: Store, release: Release, planning: Planning | None = None, seed: int = 0
) -> Outcome:
    """Plays one save of a state, which the ranks share evenly.

    Args:
        size: Bytes of the whole state.
        cluster: The machines.
        store: The object store.
        release: The way to save.
        planning: Costs of planning; none if not given.
        seed: Seed of what is random: stragglers, pauses.

    Raises:
        SaveFailed: The store refused a request for too long.
    """
    return _Save(size, cluster, store, release, planning or Planning(), seed).run()
