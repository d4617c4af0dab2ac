"""Writes what ``run.py`` measured as tables into a Markdown page, between two markers for each kind of checkpoint.

Run it with ``python benchmarks/report.py RESULTS PAGE``; the tables of what is not in the results stay as they are.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = "ours"
#: What can limit a timing, by where its seconds are.
PARTS = {"client's processor": "cpu_s", "server's processor": "server_cpu_s", "link": "link_s"}
LIMITED = {
    "save": "save, unsigned",
    "signed": "save, signed",
    "load": "restore",
    "sharded_save": "save, FSDP2",
    "sharded_fsdp1": "save, FSDP1",
    "sharded_small": "small tensors in the order of the file",
    "sharded_mixed": "small tensors in another order",
    "sharded_load": "restore",
}


@dataclass(frozen=True)
class Row:
    """A number to show.

    Attributes:
        figure: Its figure in the results.
        key: Its name in each run.
        label: What it is called, where the sizes of the run are filled in.
        unit: Its unit.
        compared: Whether it says something about a release.
        percentile: What of all numbers is shown, in percent, for the median and the extremes.
    """

    figure: str
    key: str
    label: str
    unit: str
    compared: bool = True
    percentile: int | None = None


FILE_ROWS = (
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
    Row("load", "wall_s", "Restore of {size}, {link}: wall time", "s"),
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
SHARDED_ROWS = (
    Row("sharded_save", "cpu_s_per_gib", "FSDP2, save of {size} a rank to S3: processor time per GiB", "s"),
    Row("sharded_save", "wall_s", "... wall time", "s"),
    Row("sharded_save", "memory_mib", "... extra memory of a rank", "MiB"),
    Row("sharded_trainer", "memory_mib", "... extra memory of a rank in `Trainer.save_checkpoint`", "MiB"),
    Row("sharded_fsdp1", "cpu_s_per_gib", "FSDP1, the same save: processor time per GiB", "s"),
    Row("sharded_fsdp1", "wall_s", "... wall time", "s"),
    Row("sharded_fsdp1", "memory_mib", "... extra memory of a rank", "MiB"),
    Row("sharded_small", "requests", "Restore of {small} a rank, {latency_ms} ms: requests", ""),
    Row("sharded_small", "wall_s", "... wall time", "s"),
    Row("sharded_mixed", "requests", "The same, saved in the order of {kinds} kinds of tensors: requests", ""),
    Row("sharded_mixed", "wall_s", "... wall time", "s"),
    Row("sharded_load", "wall_s", "Restore of {size} a rank, {link}: wall time", "s"),
    Row("sharded_load", "cpu_s", "... processor time of both ranks", "s"),
    Row("sharded_load", "memory_mib", "... extra memory of a rank", "MiB"),
    Row("sharded_local", "save_wall_s", "Save of {size} a rank to a local disk: wall time", "s"),
    Row("sharded_local", "save_cpu_s", "... processor time of both ranks", "s"),
    Row("sharded_local", "save_memory_mib", "... extra memory of a rank", "MiB"),
    Row("sharded_local", "load_wall_s", "Restore of it: wall time", "s"),
    Row("sharded_local", "load_cpu_s", "... processor time of both ranks", "s"),
    Row("sharded_local", "load_memory_mib", "... extra memory of a rank", "MiB"),
)  # fmt: skip


def _stall_rows(figure: str, what: str, aim: str) -> tuple[Row, ...]:
    return (
        Row(figure, "first_s", f"{what}: stall of the first save", "s"),
        Row(figure, "stalls_s", "... of the later ones", "s"),
        Row(figure, "stalls_s", "... 99th percentile of these", "s", percentile=99),
        Row(figure, "copies_s", "... `copy_` of the state in one thread (control)", "s", compared=False),
        Row(figure, "ratio", f"... stall of the later ones / copy{aim}", ""),
        Row(figure, "saved_s", "... until a later one is saved", "s"),
        Row(figure, "memory_mib", "... extra memory while saving", "MiB"),
        Row(figure, "kept_mib", "... and after it", "MiB", compared=False),
    )


_FSDP1 = "stall_fsdp1"
ASYNC_ROWS = (
    *_stall_rows("stall", "State of {state} in one file", " (at most 1.5 is aimed at)"),
    *_stall_rows("stall_fsdp2", "FSDP2, {size} a rank, sharded", " (at most 2 is aimed at)"),
    *_stall_rows(_FSDP1, "FSDP1, the same", ""),
    Row(_FSDP1, "collected_s", "... FSDP1's own `state_dict` and `optim_state_dict`", "s", compared=False),
    Row(_FSDP1, "rest_ratio", "... stall without these / copy (at most 4 is aimed at)", ""),
    Row("steps", "without_ms", "A step of training in one thread, no save", "ms", compared=False),
    Row("steps", "during_ms", "... while {state} are uploaded", "ms"),
    Row("steps", "ratio", "... with / without (at most 1.1 is aimed at)", ""),
    Row("steps", "idle_ratio", "... without, again / without (control)", "", compared=False),
    Row("steps", "steps_ms", "... 99th percentile, during the upload", "ms", percentile=99),
    Row("steps", "idle_steps_ms", "... 99th percentile, no save (control)", "ms", compared=False, percentile=99),
    Row("steps", "longest_ms", "... longest, during the upload", "ms"),
    Row("steps", "idle_longest_ms", "... longest, no save (control)", "ms", compared=False),
    Row("steps", "uploaded_s", "... time from the save to its end", "s"),
)
#: The rows that go between the markers of each name.
PAGE = {"results": FILE_ROWS, "sharded": SHARDED_ROWS, "async": ASYNC_ROWS}


def size(mib: int) -> str:
    return f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib} MiB"


def label(row: Row, sizes: dict[str, int]) -> str:
    link = "{latency_ms} ms and {megabytes_per_s} MB/s a connection".format(**sizes)
    small = "{small_tensors} tensors of {small_kib} KiB".format(**sizes)
    large, state = size(sizes["large_mib"]), size(sizes["state_mib"])
    return row.label.format(size=size(sizes["mib"]), large=large, state=state, link=link, small=small, **sizes)


def number(value: float) -> str:
    """Three digits, or all of a whole number."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def values(results: dict[str, Any], row: Row, release: str) -> list[float]:
    """What was measured in all runs, of which each has one number or several; empty if nothing was."""
    found = [run[row.key] for run in results["figures"].get(row.figure, {}).get(release, [])]
    return [value for one in found for value in (one if isinstance(one, list) else [one])]


def columns(results: dict[str, Any], rows: Iterable[Row]) -> list[str]:
    """The releases, ours last, and what was measured beside them."""
    measured = [name for row in rows for name in results["figures"].get(row.figure, {})]
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
    if row.percentile is not None:
        return f"{number(middle(found, row))} {row.unit}"
    unit = row.unit
    least, median, most = (number(value) for value in (min(found), middle(found, row), max(found)))
    return f"{median} {unit}".strip() + (f" ({least} - {most})" if least != most else "")


def main_table(results: dict[str, Any], rows: tuple[Row, ...]) -> list[str]:
    """All numbers, and what ours are of those of the release that we start from."""
    releases = columns(results, rows)
    base = f"stock {results['versions'][OURS]['lightning'].partition('+')[0]}"
    lines = [f"| | {' | '.join(releases)} | {OURS} / {base} |", "|---|" + "---|" * (len(releases) + 1)]
    for row in rows:
        if row.figure not in results["figures"]:
            continue
        cells = [cell(values(results, row, release), row) for release in releases]
        ours, theirs = (values(results, row, release) for release in (OURS, base))
        ratio = f"{middle(ours, row) / middle(theirs, row):.2f}" if row.compared and ours and theirs else ""
        lines.append(f"| {label(row, results['sizes'])} | {' | '.join([*cells, ratio])} |")
    return lines


def limits_table(results: dict[str, Any], rows: tuple[Row, ...]) -> list[str]:
    """What took the time of a save to a store, or of a restore from one."""
    lines = [
        f"| | | {' | '.join(PARTS)} | limited by | connections | client, payload |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
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


def how_many(results: dict[str, Any], rows: Iterable[Row]) -> str:
    """Runs of each figure of these rows, of which more may have been measured for some."""
    found = {len(runs) for row in rows for runs in results["figures"].get(row.figure, {}).values()}
    return " to ".join(dict.fromkeys((str(min(found)), str(max(found))))) + (" run" if found == {1} else " runs")


def sentences(results: dict[str, Any], rows: tuple[Row, ...]) -> list[str]:
    """On what was measured."""
    machine, sizes = results["machine"], results["sizes"]
    if rows == FILE_ROWS:
        how_often = "{runs} runs of each timing, {memory_runs} of memory and requests"
        rest = "Tensors of {tensor_mib} MiB."
    elif rows == ASYNC_ROWS:
        how_often = f"{how_many(results, rows)} of each figure, with {{saves}} saves after the first"
        rest = "Tensors of {tensor_mib} MiB in the file. Two ranks where it is sharded."
    else:
        how_often = "{sharded_runs} runs of each figure, {long_runs} of the {kinds} kinds of tensors"
        rest = "Two ranks."
    told = f"Medians, with the least and the greatest: {how_often}, releases in turn. {rest}".format(**sizes)
    lines = [
        f"{machine['system']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory, Python"
        f" {machine['python']}. {told}"
    ]
    for release, versions in results["versions"].items():
        lines.append(f"- {release}: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    return lines


def render(results: dict[str, Any], rows: tuple[Row, ...]) -> str:
    """All that goes between two markers."""
    machine, *versions = sentences(results, rows)
    blocks = [[machine], versions, main_table(results, rows)]
    if rows != ASYNC_ROWS:
        blocks.append(limits_table(results, rows))
    return "\n\n".join("\n".join(block) for block in blocks)


def around_markers(page: str, name: str) -> tuple[str, str]:
    """The page up to the first marker of that name, and from the second, both included.

    Raises:
        ValueError: The page lacks them.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    found_end, after = rest.partition(end)[1:]
    if not found or not found_end:
        raise ValueError(f"the page needs the lines {begin} and {end}, between which the results go")
    return before + begin, end + after


def main(results: Path, page: Path) -> None:
    """Puts the tables into the page."""
    measured, text = json.loads(results.read_text()), page.read_text()
    for name, rows in PAGE.items():
        if any(row.figure in measured["figures"] for row in rows):
            before, after = around_markers(text, name)
            text = f"{before}\n\n{render(measured, rows)}\n\n{after}"
    page.write_text(text)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
