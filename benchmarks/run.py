"""Measures checkpoints of this Lightning beside those of other releases, on one machine and in turn.

Run it with ``make bench``, or ``.venv/bin/python benchmarks/run.py --results FILE``, which measures what is installed
in ``.venv`` alone. Every figure goes through Lightning's public interface (see ``client.py``), to a server that is no
bottleneck (see ``object_server.py``). The results are raw numbers of every run, for ``report.py`` and ``plot.py``.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import import_time
from figures import QUICK, Figure, Sizes, all_figures
from object_server import RunningServer, serving
from report import OURS

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
#: Has s3fs send bodies as they are: without TLS it would sign them (SHA-256), and compute another checksum (CRC).
UNSIGNED = {
    "s3": {"payload_signing_enabled": False},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


class Client:
    """A running ``client.py`` in the environment of a release, which knows of no store but the one it is told of."""

    def __init__(self, python: Path, folder: Path, stack: ExitStack) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FSSPEC_"))}
        environment |= dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), "does-not-exist")
        environment["NO_PROXY"] = "127.0.0.1"
        folder.mkdir()
        self._errors = folder / "errors.txt"
        self._process = stack.enter_context(
            subprocess.Popen(
                [python.absolute(), HERE / "client.py"], cwd=folder, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stack.enter_context(self._errors.open("w")),
            )
        )  # fmt: skip
        self.versions: dict[str, str] = self._answer()

    def ask(self, server: RunningServer, figure: Figure, measure: str, url: str) -> dict[str, Any]:
        """Asks for a measurement, and adds what the server saw of it."""
        s3: dict[str, Any] = {"endpoint_url": f"http://127.0.0.1:{server.port}", "key": "key", "secret": "secret"}
        s3["client_kwargs"] = {"region_name": "us-east-1"}
        s3["config_kwargs"] = {} if figure.is_signed else UNSIGNED
        request = {"measure": measure, "arguments": {"url": url, **figure.arguments}, "s3": s3, "ranks": figure.ranks}
        self._say(json.dumps(request))
        while (answer := self._answer()) == "ready":
            server.ask("POST", "reset")
            self._say("")
        return {**answer, **traffic(server.ask("GET", "log"))}

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a client failed:\n{self._errors.read_text()[-5000:]}")
        return json.loads(line)


@contextmanager
def clients_of(others: list[Path], beside: Path) -> Iterator[dict[str, Client]]:
    """Starts a client for each of other interpreters, and one for this; their disk is the one of a file ``beside``."""
    with tempfile.TemporaryDirectory(dir=beside.parent) as folder, ExitStack() as stack:
        started = {}
        for number, python in enumerate([*others, Path(sys.executable)]):
            one = Client(python, Path(folder, str(number)), stack)
            started[f"stock {one.versions['lightning']}" if number < len(others) else OURS] = one
        yield started


def measure(figure: Figure, clients: dict[str, Client]) -> dict[str, list[dict[str, Any]]]:
    """Measures a figure with every client in turn, so that what else the machine does meets all alike."""
    columns = {name: (one, figure) for name, one in clients.items() if name == OURS or not figure.is_ours_alone}
    for name, arguments in figure.others.items():
        columns[name] = clients[OURS], replace(figure, arguments=figure.arguments | arguments)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in columns}
    prepared = set()
    with serving(**figure.link) as server:
        for run in range(figure.runs):
            for name, (one, asked) in columns.items():
                place = figure.place.format(release=re.sub(r"\W+", "-", name), run=run)
                if figure.prepare and place not in prepared:
                    one.ask(server, asked, figure.prepare, place)
                    prepared.add(place)
                result = one.ask(server, asked, figure.measure, place)
                if place.startswith("s3://sink/") and result["bytes"] < expected_bytes(figure):
                    raise RuntimeError(f"{name} sent less than it saved: {result}")
                results[name].append(result)
    return results


def expected_bytes(figure: Figure) -> int:
    """What a save of all ranks sends at least, or all saves after the first of a measurement that has several."""
    size: int = figure.arguments["mib"] * MIB * figure.ranks
    return size * int(figure.arguments.get("saves", 1))


def traffic(log: dict[str, Any]) -> dict[str, Any]:
    """What the server saw of a measurement."""
    requests = log["requests"]
    sent = [request for request in requests if request["method"] == "PUT"]
    return {
        "server_cpu_s": log["cpu_s"],
        "link_s": log["link_s"],
        "requests": len(requests),
        "methods": dict(Counter(request["method"] for request in requests)),
        "connections": len({request["connection"] for request in requests}),
        "bytes": sum(request["bytes"] for request in sent),
        "clients": sorted({request["client"].split(" ")[0] for request in requests}),
        "payloads": sorted({request["payload"] for request in sent}),
    }


def available_mib() -> int:
    """Memory that can be used without swapping."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) // 1024


def with_room(large: Figure, clients: dict[str, Client]) -> dict[str, Client]:
    """Those whose large save fits into memory, judged by what a small one takes."""
    mib = large.arguments["mib"]
    small = mib // 16
    arguments = {"mib": small, "tensor_mib": min(large.arguments["tensor_mib"], small)}
    fitting = {}
    for name, one in clients.items():
        taken = measure(replace(large, arguments=arguments, runs=1), {name: one})[name][0]["memory_mib"]
        needed, available = int(mib * (1.1 + taken / small)), available_mib()
        if needed < available:
            fitting[name] = one
        else:
            say(f"  {name} is left out: it would need about {needed} MiB of memory, and {available} are available")
    return fitting


def describe_machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} on {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parts = {part: list(figures) for part, figures in all_figures(QUICK).items()}
    names = [name for part in parts.values() for name in part]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--results", type=Path, required=True, metavar="FILE", help="where to write them, as JSON")
    other = "the interpreter of an environment with another release; can be given more than once"
    add("--beside", type=Path, action="append", default=[], metavar="PYTHON", help=other)
    add("--runs", type=int, default=Sizes.most_runs, help="measure no figure more often (default: %(default)s)")
    add("--quick", action="store_true", help="one run with small sizes, to see whether all works")
    only = f"these figures (default: all): {', '.join(names)}; {' or '.join(parts)} for all of a kind"
    add("--only", nargs="+", choices=[*parts, *names], default=[*parts], metavar="FIGURE", help=only)
    options = parser.parse_args()
    options.only = [name for one in options.only for name in parts.get(one, [one])]
    return options


def measure_all(sizes: Sizes, names: list[str], clients: dict[str, Client]) -> dict[str, Any]:
    """The figures of those names."""
    measured: dict[str, Any] = {}
    for name, figure in (item for figures in all_figures(sizes).values() for item in figures.items()):
        if name not in names:
            continue
        started = time.monotonic()
        if name == "import":
            measured[name] = import_time.measure(figure.runs)
        else:
            measured[name] = measure(figure, with_room(figure, clients) if name == "large" else clients)
        say(f"{name}: {figure.runs} runs of each in {time.monotonic() - started:.0f} s")
    return measured


def main() -> None:
    """Measures, and writes the results as JSON."""
    options = parse_arguments()
    if sys.platform != "linux":
        sys.exit("The benchmarks read /proc: run them on Linux.")
    sizes = QUICK if options.quick else Sizes(most_runs=options.runs)
    started = time.monotonic()
    with clients_of(options.beside, options.results) as clients:
        results = {
            "sizes": vars(sizes),
            "machine": describe_machine(),
            "versions": {name: one.versions for name, one in clients.items()},
            "figures": measure_all(sizes, options.only, clients),
        }
    options.results.write_text(json.dumps(results, indent=1))
    say(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
