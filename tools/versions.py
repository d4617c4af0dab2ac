"""Tries the wheels beside the versions of torch, Python and the stores' clients that users have.

``python -m tools.versions`` makes a fresh environment for each row of ``requirements/versions.toml``, one after the
other, installs the wheels in it, runs the tests that the file names, and deletes it. ``--list`` prints the rows' names.
What became of each is kept in ``docs/versions.json``; the table of the README is written from that, and has only rows
whose tests have passed. ``make test-versions`` builds the wheels and runs this.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements"
WORK = ROOT / "build" / "versions"
RESULTS = ROOT / "docs" / "versions.json"
README = ROOT / "README.md"
#: The packages whose versions are noted, as the table has them.
_NOTED = ("torch", "fsspec", "s3fs", "gcsfs", "adlfs", "obstore")
_BEGIN, _END = "<!-- supported: begin -->", "<!-- supported: end -->"
#: Seconds for the tests of a row.
_PATIENCE = 1800

Row = dict[str, str]
Result = dict[str, Any]


class _NotInstalled(Exception):
    """There is no such Python here, or no set of packages that goes together."""


def main() -> int:
    """Runs rows, keeps what became of them, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.versions", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="names of rows [default: all]")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    arguments = parser.parse_args()
    table = read_table()
    rows = {name_of(row): row for row in table["row"]}
    if arguments.list:
        print("\n".join(rows))
        return 0
    if unknown := set(arguments.rows) - rows.keys():
        parser.error(f"no such rows: {', '.join(sorted(unknown))}; --list prints their names")
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    chosen = arguments.rows or list(rows)
    for name in chosen:
        print(f"{name} ...", flush=True)
        results[name] = run_row(name, rows[name], table)
        print(f"{name}: {summary(results[name])}", flush=True)
        kept = {name: results[name] for name in rows if name in results}
        RESULTS.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
        README.write_text(with_table(README.read_text(encoding="utf-8"), kept.values()), encoding="utf-8")
    return int(any(results[name]["outcome"] == "failed" for name in chosen))


def read_table() -> dict[str, Any]:
    """Returns requirements/versions.toml: rows, the tests to run, and what these do without."""
    return tomllib.loads((REQUIREMENTS / "versions.toml").read_text(encoding="utf-8"))


def name_of(row: Row) -> str:
    """Returns the name of a row, for the command line and the results."""
    return f"torch-{row['torch']}-python-{row['python']}-{row['clients']}"


def run_row(name: str, row: Row, table: dict[str, Any]) -> Result:
    """Tries one row in an environment of its own, which is deleted again."""
    began = time.monotonic()
    result: Result = {"date": datetime.date.today().isoformat(), **row}
    environment, logs = WORK / name, WORK / f"{name}.log"
    shutil.rmtree(environment, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        with logs.open("w", encoding="utf-8") as log:
            _install(environment, row, table["without"], log)
            result |= _versions(environment)
            result["install_s"] = round(time.monotonic() - began)
            result |= _test(environment, table["tests"], log)
    except (_NotInstalled, subprocess.TimeoutExpired) as error:
        result |= {"outcome": "not run" if isinstance(error, _NotInstalled) else "failed", "why": f"{error}"}
    finally:
        shutil.rmtree(environment, ignore_errors=True)
    return {**result, "seconds": round(time.monotonic() - began)}


def requirements_of(row: Row, without: Iterable[str], test: str, cloud: str) -> list[str]:
    """Returns what a row installs beside the wheels: torch, the clients, and what the tests need.

    Args:
        row: The row.
        without: Names of packages that are left out of ``test``.
        test: The text of requirements/test.txt.
        cloud: The text of requirements/cloud.txt, whose minimums are the oldest clients.

    """
    clients = _lines(cloud)
    if row["clients"] == "oldest":
        clients = [line.replace(">=", "==") for line in clients]
    left_out = set(without)
    tests = [line for line in _lines(test) if re.split(r"[^\w-]", line)[0] not in left_out and not line.startswith("-")]
    return ["torch" if row["torch"] == "newest" else f"torch=={row['torch']}", *clients, *tests]


def with_table(readme: str, results: Iterable[Result]) -> str:
    """Returns the README with the table of what has passed between its two marks."""
    lines = [
        "| torch | Python | fsspec | s3fs | gcsfs | adlfs | obstore | run on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    passed = [result for result in results if result["outcome"] == "passed"]
    for one in sorted(passed, key=lambda one: [_key(one["versions"][name]) for name in ("torch", "python", "fsspec")]):
        cells = [one["versions"][name] for name in ("torch", "python", *_NOTED[1:])]
        lines.append(f"| {' | '.join(cells)} | {one['date']} |")
    head, begin, rest = readme.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"README.md has no {_BEGIN} with a {_END} after it: write both where the table goes")
    return "\n".join([head + begin, *lines, end + tail])


def summary(result: Result) -> str:
    """Returns what became of a row, in one line."""
    counts = ", ".join(f"{result[kind]} {kind}" for kind in ("passed", "failed", "skipped") if result.get(kind))
    return f"{result['outcome']} in {result['seconds']} s ({result.get('why') or counts})"


def _key(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]


def _install(environment: Path, row: Row, without: Iterable[str], log: Any) -> None:
    wheels = sorted(map(str, (ROOT / "build" / "wheels").glob("*.whl")))
    texts = [(REQUIREMENTS / f"{name}.txt").read_text(encoding="utf-8") for name in ("test", "cloud")]
    packages = requirements_of(row, without, *texts)
    uv = [sys.executable, "-m", "uv"]
    for command, reason in (
        ([*uv, "venv", "--python", row["python"], str(environment)], f"there is no Python {row['python']}"),
        ([*uv, "pip", "install", "--python", str(_python(environment)), *wheels, *packages], "no packages that fit"),
    ):
        if subprocess.run(command, stdout=log, stderr=log, cwd=ROOT, check=False).returncode:
            raise _NotInstalled(f"{reason}: see {Path(log.name).relative_to(ROOT)}")


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def _versions(environment: Path) -> Result:
    program = (
        "import importlib.metadata, json, platform, sys\n"
        "versions = {name: importlib.metadata.version(name) for name in sys.argv[1:]}\n"
        "print(json.dumps({'python': platform.python_version(), **versions}))"
    )
    command = [str(_python(environment)), "-c", program, *_NOTED]
    return {"versions": json.loads(subprocess.run(command, capture_output=True, check=True).stdout)}


def _test(environment: Path, tests: Iterable[str], log: Any) -> Result:
    """Runs the tests, and returns their outcome, how many have passed, failed and been skipped, and which failed."""
    report = Path(log.name).with_suffix(".xml")
    report.unlink(missing_ok=True)
    options = ["-m", "not slow", "-p", "no:cacheprovider", "--numprocesses=2", "--dist=worksteal"]
    command = [str(_python(environment)), "-m", "pytest", *options, f"--junitxml={report}", *tests]
    variables = {**os.environ, "VIRTUAL_ENV": str(environment)}
    log.flush()
    subprocess.run(command, cwd=ROOT, env=variables, stdout=log, stderr=log, timeout=_PATIENCE, check=False)
    if not report.is_file():
        return {"outcome": "failed", "why": f"the tests did not run: see {Path(log.name).relative_to(ROOT)}"}
    passed, skipped, failures = 0, 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    counts: Result = {"passed": passed, "failed": len(failures), "skipped": skipped, "failures": failures}
    return {"outcome": "passed" if passed and not failures else "failed", **counts}


if __name__ == "__main__":
    sys.exit(main())
