"""The tables of what is measured, predicted and answered; between markers of a page, if there is one."""

import statistics
from pathlib import Path
from typing import Any

from report import around_markers, number

GB = 1e9


def of_planning(measured: list[dict[str, Any]]) -> str:
    """A row for each step: processor time, of it in garbage collections, and the longest hold of the GIL."""
    lines = [f"| ranks | {' | '.join(str(one['ranks']) for one in measured)} |", "|---|" + "---|" * len(measured)]
    for name in measured[0]["steps"]:
        cells = (one["steps"][name] for one in measured)
        texts = ("{cpu_s:.3g} s ({collecting_s:.2g} s), {hold_s:.2g} s".format(**cell) for cell in cells)
        lines.append(f"| {name} | {' | '.join(texts)} |")
    for name in measured[0]["bytes"]:
        lines.append(f"| {name} | {' | '.join(format(one['bytes'][name], ',') for one in measured)} |")
    return "\n".join(lines)


def error(row: dict[str, Any]) -> float:
    """By what part of the median that was measured the prediction is off."""
    median = statistics.median(row["measured_s"])
    return float((row["predicted_s"] - median) / median)


def of_validation(results: dict[str, Any]) -> str:
    """The cases, one a row."""
    lines = ["| | | predicted | measured | error |", "|---|---|---|---|---|"]
    for row in results["cases"]:
        median = f"{statistics.median(row['measured_s']):.2f} s"
        spread = f"{min(row['measured_s']):.2f} - {max(row['measured_s']):.2f}"
        lines.append(
            f"| {row['way']} | {row['case']} | {row['predicted_s']:.2f} s | {median} ({spread}) | {error(row):+.0%} |"
        )
    return "\n".join(lines)


def of_answers(rows: list[dict[str, Any]]) -> str:
    """The answers, one save a row."""
    lines = [
        "| nodes, state | | stall | durable after | writes | most in 1 s | sent again | a month's writes | storage |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        job = f"{row['nodes']:,}, {row['size'] / GB:,.0f} GB"
        if "failure" in row:
            lines.append(f"| {job} | {row['way']} | fails: {row['failure']} | | | | | | |")
            continue
        lines.append(
            f"| {job} | {row['way']} | {number(row['stall'])} s | {number(row['durable'])} s | {row['writes']:,} |"
            f" {row['busiest']:,} | {row['retries']:,} | ${row['requests_usd']:,.0f} | ${row['storage_usd']:,.0f} |"
        )
    return "\n".join(lines)


def put(page: Path, tables: dict[str, str]) -> None:
    """Puts each table between the markers of its name.

    Raises:
        ValueError: The page lacks them.
    """
    text = page.read_text()
    for name, table in tables.items():
        before, after = around_markers(text, name)
        text = f"{before}\n\n{table}\n\n{after}"
    page.write_text(text)
