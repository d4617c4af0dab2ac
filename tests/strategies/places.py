"""Places to save to with ranks that :mod:`tests.strategies.forks` forks, and kill points on the way."""

import itertools
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.servers import Bucket, Fault
from tests.servers.proxy import proxy_before
from tests.strategies.forks import Forks, Job, Outcome, kill


@dataclass(frozen=True)
class Point:
    """The victim is killed when the actor does something for the n-th time, before it or (on a store) after it."""

    victim: int
    actor: int
    event: int
    act: str
    after: bool = False

    def __str__(self) -> str:
        when = "after" if self.after else "before"
        return f"rank {self.victim} killed {when} act {self.event} of rank {self.actor} ({self.act})"


class Local:
    """Folders of this machine, each with a checkpoint ``last.ckpt``."""

    def __init__(self, forks: Forks, root: Path) -> None:
        self.forks = forks
        self._root = root
        self._count = itertools.count()

    def keep(self, path: str | None) -> dict[str, bytes]:
        """All files around a checkpoint, for :meth:`new`."""
        if path is None:
            return {}
        folder = Path(path).parent
        return {name: (folder / name).read_bytes() for name in self.names(path) if (folder / name).is_file()}

    def new(self, files: dict[str, bytes]) -> str:
        """The path of a checkpoint in a folder of its own with copies of these files."""
        folder = self._root / f"place-{next(self._count)}"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return str(folder / "last.ckpt")

    def names(self, path: str) -> list[str]:
        folder = Path(path).parent
        return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))

    def run(self, job: Job, world: int) -> list[Outcome]:
        return self.forks.run({**job, "environments": [{}] * world})

    def acts(self, job: Job, world: int = 2) -> tuple[list[Outcome], list[list[str]]]:
        """Runs a job, and returns what each rank has done there, too."""
        outcomes = self.run(job, world)
        return outcomes, [outcome["acts"] for outcome in outcomes]

    def kill(self, job: Job, point: Point) -> list[Outcome]:
        where = {"victims": [point.victim], "signal": signal.SIGKILL, "actor": point.actor, "event": point.event}
        return self.run({**job, "stop": where}, 2)

    def load(self, job: Job, event: int, meanwhile: Job) -> Outcome:
        """Loads with one rank; before an act of it two others do the job ``meanwhile``."""
        meanwhile = {**meanwhile, "environments": [{}, {}]}
        job = {**job, "event": event, "meanwhile": meanwhile, "server": str(self.forks.address)}
        return self.run(job, 1)[0]

    def points(self, victim: int, acts: list[list[str]]) -> list[Point]:
        return [
            Point(victim, actor, number, act) for actor, done in enumerate(acts) for number, act in enumerate(done, 1)
        ]


class S3(Local):
    """Prefixes of a bucket. Each rank has an endpoint of its own, where its requests are counted."""

    def __init__(self, forks: Forks, bucket: Bucket) -> None:
        self.forks = forks
        self._bucket = bucket
        self._server = bucket.server.proxy.target
        self._count = itertools.count()

    def keep(self, path: str | None) -> dict[str, bytes]:
        return {name: self._bucket.get(f"{self._prefix(path)}{name}") for name in self.names(path)} if path else {}

    def new(self, files: dict[str, bytes]) -> str:
        prefix = f"place-{next(self._count)}/"
        for name, content in files.items():
            self._bucket.put(prefix + name, content)
        return f"{self._bucket.url}/{prefix}last.ckpt"

    def names(self, path: str) -> list[str]:
        return [name.removeprefix(self._prefix(path)) for name in self._bucket.names(self._prefix(path))]

    def _prefix(self, path: str) -> str:
        return path.removeprefix(f"{self._bucket.url}/").removesuffix("last.ckpt")

    def run(self, job: Job, world: int) -> list[Outcome]:
        return self._run(job, [self._server] * world, lambda ids: None)

    def _run(self, job: Job, servers: list[Any], before: Callable[[list[int]], None]) -> list[Outcome]:
        environments = [
            {**self._bucket.server.environment, "AWS_ENDPOINT_URL": f"http://{host}:{port}"} for host, port in servers
        ]
        return self.forks.run({"part_size": 2**16, **job, "environments": environments}, before)

    def acts(self, job: Job, world: int = 2) -> tuple[list[Outcome], list[list[str]]]:
        requests: list[list[str]] = [[] for _ in range(world)]

        def follow(actor: int, method: str, path: str) -> None:
            requests[actor].append(f"{method} {path.partition('last.ckpt')[2]}")

        return self.run_followed(job, follow, world=world), requests

    def kill(self, job: Job, point: Point) -> list[Outcome]:
        numbers = itertools.count(1)  # next() is atomic
        ids: list[int] = []

        def follow(actor: int, method: str, path: str) -> Fault | None:
            if actor == point.actor and next(numbers) == point.event:
                kill(ids[point.victim])
                return None if point.after else Fault.RESET
            return None

        return self.run_followed(job, follow, ids.extend)

    def load(self, job: Job, event: int, meanwhile: Job) -> Outcome:
        numbers = itertools.count(1)

        def follow(actor: int, method: str, path: str) -> None:
            if next(numbers) == event:
                assert [outcome["error"] for outcome in self.run(meanwhile, 2)] == [None, None]

        return self.run_followed(job, follow, world=1)[0]

    def run_followed(
        self,
        job: Job,
        follow: Callable[[int, str, str], Fault | int | None],
        before: Callable[[list[int]], None] = lambda ids: None,
        world: int = 2,
    ) -> list[Outcome]:
        """As :meth:`run`, where ``follow`` says of a rank's request, its method and path, what becomes of it."""
        with ExitStack() as stack:
            proxies = [stack.enter_context(proxy_before(self._server)) for _ in range(world)]
            for actor, proxy in enumerate(proxies):
                proxy.rule = partial(follow, actor)
            return self._run(job, [("127.0.0.1", proxy.server_port) for proxy in proxies], before)

    def points(self, victim: int, acts: list[list[str]]) -> list[Point]:
        both = ((point, after) for point in super().points(victim, acts) for after in (False, True))
        # another rank than the victim goes on with its request in any case
        return [Point(victim, p.actor, p.event, p.act, after) for p, after in both if p.actor == victim or after]


def without_draws(name: str) -> str:
    """A name, or what has been done to it, as it is in every save."""
    return re.sub("[0-9a-f]{12,}", "DRAWN", name)
