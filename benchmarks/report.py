"""Writes what ``run.py`` measured as tables into a Markdown page, between two markers.

Run it with ``python benchmarks/report.py RESULTS PAGE``.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
OURS = "ours"
#: What can limit a timing, by where its seconds are.
PARTS = {"client's processor": "cpu_s", "server's processor": "server_cpu_s", "link": "link_s"}
LIMITED = {"save": "save, unsigned", "signed": "save, signed", "load": "restore"}


@dataclass(frozen=True)
class Row:
    """A number to show.

    Attributes:
        figure: Its figure in the results.
        key: Its name in each run.
        label: What it is called, where the sizes of the run are filled in.
        unit: Its unit.
        compared: Whether it says something about a release.
    """

    figure: str
    key: str
    label: str
    unit: str
    compared: bool = True


ROWS = (
    Row("save", "cpu_s", "Save of {size} to S3, body unsigned: processor time", "s"),
    Row("save", "wall_s", "... wall time", "s"),
    Row("save", "memory_mib", "... extra memory", "MiB"),
    Row("signed", "cpu_s", "Save of {size} to S3, body signed: processor time", "s"),
    Row("signed", "wall_s", "... wall time", "s"),
    Row("large", "memory_mib", "Save of {large} to S3: extra memory", "MiB"),
    Row("hold_up", "longest_ms", "Longest delay of the main thread while another saves {size}", "ms"),
    Row("hold_up", "p99_ms", "... 99th percentile", "ms"),
    Row("hold_up", "idle_longest_ms", "... longest while the other is idle (control)", "ms", compared=False),
    Row("hold_up", "idle_p99_ms", "... 99th percentile of the control", "ms", compared=False),
    Row("load", "wall_s", "Restore of {size}, {latency_ms} ms and {megabytes_per_s} MB/s a connection: wall time", "s"),
    Row("load", "cpu_s", "... processor time", "s"),
    Row("load", "memory_mib", "... extra memory", "MiB"),
    Row("resume", "restore_mib", "Training state of {size} restored: extra memory until then", "MiB"),
    Row("resume", "step_mib", "... and during the first step after that", "MiB"),
    Row("fit", "requests", "Requests of a fit of {epochs} epochs", ""),
    Row("local", "wall_s", "Save of {size} to a local disk: wall time of the call", "s"),
    Row("local", "durable_s", "... wall time until it is on the disk", "s"),
    Row("local", "cpu_s", "... processor time of the call", "s"),
    Row("import", "cpu_s", "`import lightning`: processor time", "s"),
)  # fmt: skip


def size(mib: int) -> str:
    return f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib} MiB"


def label(row: Row, sizes: dict[str, int]) -> str:
    return row.label.format(size=size(sizes["mib"]), large=size(sizes["large_mib"]), **sizes)


def number(value: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def values(results: dict[str, Any], row: Row, release: str) -> list[float]:
    """What was measured, run by run; empty if it was not."""
    return [run[row.key] for run in results["figures"].get(row.figure, {}).get(release, [])]


def cell(found: list[float], unit: str) -> str:
    """The median, and the least and the greatest where they differ."""
    if not found:
        return "not measured"
    least, middle, most = (number(value) for value in (min(found), statistics.median(found), max(found)))
    return f"{middle} {unit}".strip() + (f" ({least} - {most})" if least != most else "")


def main_table(results: dict[str, Any]) -> list[str]:
    """All numbers, and what ours are of those of the release that we start from."""
    releases = list(results["versions"])
    base = f"stock {results['versions'][OURS]['lightning'].partition('+')[0]}"
    lines = [f"| | {' | '.join(releases)} | {OURS} / {base} |", "|---|" + "---|" * (len(releases) + 1)]
    for row in ROWS:
        if row.figure not in results["figures"]:
            continue
        cells = [cell(values(results, row, release), row.unit) for release in releases]
        ours, theirs = (values(results, row, release) for release in (OURS, base))
        ratio = f"{statistics.median(ours) / statistics.median(theirs):.2f}" if row.compared and ours and theirs else ""
        lines.append(f"| {label(row, results['sizes'])} | {' | '.join([*cells, ratio])} |")
    return lines


def limits_table(results: dict[str, Any]) -> list[str]:
    """What took the time of a save to a store, or of a restore from one."""
    lines = [
        f"| | | {' | '.join(PARTS)} | limited by | connections | client, payload |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        if row.figure not in LIMITED or row.key != "wall_s":
            continue
        for release, runs in results["figures"].get(row.figure, {}).items():
            shares = {part: statistics.median(run[key] / run["wall_s"] for run in runs) for part, key in PARTS.items()}
            cells = [f"{share:.0%}" for share in shares.values()]
            cells.append(max(shares, key=lambda part: shares[part]))
            cells.append(number(statistics.median(run["connections"] for run in runs)))
            cells.append(", ".join(sorted({one for run in runs for one in run["clients"] + run["payloads"]})))
            lines.append(f"| {LIMITED[row.figure]} | {release} | {' | '.join(cells)} |")
    return lines


def sentences(results: dict[str, Any]) -> list[str]:
    """On what was measured."""
    machine, sizes = results["machine"], results["sizes"]
    lines = [
        f"{machine['system']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory, Python"
        f" {machine['python']}. Medians, with the least and the greatest: {sizes['runs']} runs of each timing,"
        f" {sizes['memory_runs']} of memory and requests, releases in turn. Tensors of {sizes['tensor_mib']} MiB."
    ]
    for release, versions in results["versions"].items():
        lines.append(f"- {release}: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    return lines


def render(results: dict[str, Any]) -> str:
    """All that goes between the markers."""
    machine, *versions = sentences(results)
    blocks = [[machine], versions, main_table(results), limits_table(results)]
    return "\n\n".join("\n".join(block) for block in blocks)


def main(results: Path, page: Path) -> None:
    """Puts the tables into the page.

    Raises:
        ValueError: The page lacks the markers.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    end, after = rest.partition(END)[1:]
    if not begin or not end:
        raise ValueError(f"{page} needs the lines {BEGIN} and {END}, between which the results go")
    text = render(json.loads(results.read_text()))
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
