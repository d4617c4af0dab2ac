"""Writes what ``run.py`` measured as tables into a Markdown page, between two markers for each kind of checkpoint.

Run it with ``python benchmarks/report.py RESULTS PAGE``; the tables of what is not in the results stay as they are.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from figures import Figure, Row, Sizes, all_figures

OURS = "ours"
#: What can limit a timing, by where its seconds are.
PLACES = {"client's processor": "cpu_s", "server's processor": "server_cpu_s", "link": "link_s"}
#: The names of the markers of each part, and what else is said of its figures.
PARTS = {
    "files": ("results", "Tensors of {tensor_mib} MiB."),
    "sharded": ("sharded", "Two ranks."),
    "async": (
        "async",
        "{saves} saves after the first in each run. Tensors of {tensor_mib} MiB in the file. Two ranks where it is"
        " sharded.",
    ),
}


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table of Markdown."""
    lines = ["|".join(f" {cell} " if cell else " " for cell in row) for row in (head, *rows)]
    return "\n".join(f"|{line}|" for line in (lines[0], "|".join(["---"] * len(head)), *lines[1:]))


def number(value: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def values(results: dict[str, Any], figure: str, row: Row, release: str) -> list[float]:
    """What was measured in all runs, of which each has one number or several; empty if nothing was."""
    found = [run[row.key] for run in results["figures"].get(figure, {}).get(release, [])]
    return [value for one in found for value in (one if isinstance(one, list) else [one])]


def columns(results: dict[str, Any], figures: Iterable[str]) -> list[str]:
    """The releases, ours last, and what was measured beside them."""
    measured = [release for name in figures for release in results["figures"].get(name, {})]
    return [*(name for name in dict.fromkeys([*results["versions"], *measured]) if name != OURS), OURS]


def middle(found: list[float], row: Row) -> float:
    """The number that is shown of several: their median, or a percentile as the least that so many do not exceed."""
    if row.percentile is None:
        return statistics.median(found)
    return sorted(found)[math.ceil(len(found) * row.percentile / 100) - 1]


def cell(found: list[float], row: Row) -> str:
    """A median with the least and the greatest where they differ; a percentile alone."""
    if not found:
        return "not measured"
    shown = f"{number(middle(found, row))} {row.unit}".strip()
    least, most = number(min(found)), number(max(found))
    return shown if least == most or row.percentile is not None else f"{shown} ({least} - {most})"


def main_table(results: dict[str, Any], figures: dict[str, Figure]) -> str:
    """All numbers, and what ours are of those of the release that we start from."""
    releases = columns(results, figures)
    base = f"stock {results['versions'][OURS]['lightning'].partition('+')[0]}"
    lines = []
    for name, figure in figures.items():
        for row in figure.rows:
            ours, theirs = (values(results, name, row, release) for release in (OURS, base))
            ratio = f"{middle(ours, row) / middle(theirs, row):.2f}" if row.is_compared and ours and theirs else ""
            lines.append([row.label, *(cell(values(results, name, row, one), row) for one in releases), ratio])
    return table(["", *releases, f"{OURS} / {base}"], lines)


def limits_table(results: dict[str, Any], figures: dict[str, Figure]) -> str:
    """What took the time of a save to a store, or of a restore from one."""
    lines = []
    for name, figure in figures.items():
        for release, runs in results["figures"][name].items() if figure.timing else ():
            shares = {
                place: statistics.median(run[key] / run["wall_s"] for run in runs) for place, key in PLACES.items()
            }
            cells = [f"{share:.0%}" for share in shares.values()]
            cells += [max(shares, key=lambda place: shares[place])]
            cells += [number(statistics.median(run["connections"] for run in runs))]
            cells += [", ".join(sorted({one for run in runs for one in run["clients"] + run["payloads"]}))]
            lines.append([figure.timing, release, *cells])
    return table(["", "", *PLACES, "limited by", "connections", "client, payload"], lines)


def how_often(results: dict[str, Any], figures: Iterable[str]) -> str:
    """How many runs there are of which figures, by their names in the results."""
    names: dict[int, list[str]] = {}
    for name in figures:
        names.setdefault(max(map(len, results["figures"][name].values())), []).append(name)
    counts = [f"{runs} {'run' if runs == 1 else 'runs'}" for runs in names]
    if len(names) == 1:
        return f"{counts[0]} of each figure"
    return "; ".join(f"{count} of {', '.join(one)}" for count, one in zip(counts, names.values(), strict=True))


def render(results: dict[str, Any], figures: dict[str, Figure], sentence: str) -> str:
    """All that goes between two markers."""
    machine = results["machine"]
    told = (
        f"{machine['system']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory, Python"
        f" {machine['python']}. Medians, with the least and the greatest: {how_often(results, figures)}. Releases in"
        f" turn. {sentence}"
    )
    versions = [
        f"- {release}: " + ", ".join(f"{name} {version}" for name, version in found.items())
        for release, found in results["versions"].items()
    ]
    blocks = [told, "\n".join(versions), main_table(results, figures)]
    if any(figure.timing for figure in figures.values()):
        blocks.append(limits_table(results, figures))
    return "\n\n".join(blocks)


def put(page: Path, texts: dict[str, str]) -> None:
    """Puts each text between the markers of its name.

    Raises:
        ValueError: The page lacks them.
    """
    content = page.read_text()
    for name, text in texts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = content.partition(begin)
        found_end, after = rest.partition(end)[1:]
        if not found or not found_end:
            raise ValueError(f"the page needs the lines {begin} and {end}, between which the results go")
        content = f"{before}{begin}\n\n{text}\n\n{end}{after}"
    page.write_text(content)


def main(results: Path, page: Path) -> None:
    """Puts the tables into the page."""
    measured = json.loads(results.read_text())
    texts, sizes = {}, Sizes(**measured["sizes"])
    for part, figures in all_figures(sizes).items():
        found = {name: figure for name, figure in figures.items() if name in measured["figures"]}
        marker, sentence = PARTS[part]
        if found:
            texts[marker] = render(measured, found, sentence.format(**vars(sizes)))
    put(page, texts)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
