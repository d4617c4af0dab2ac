"""The tables of what is measured, predicted and answered."""

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import number, table

GB = 1e9


def of_planning(measured: list[dict[str, Any]]) -> str:
    """A row for each step: processor time, of it in garbage collections, and the longest hold of the GIL."""
    cell = "{cpu_s:.3g} s ({collecting_s:.2g} s), {hold_s:.2g} s"
    steps = [[name, *(cell.format(**one["steps"][name]) for one in measured)] for name in measured[0]["steps"]]
    sizes = [[name, *(f"{one['bytes'][name]:,}" for one in measured)] for name in measured[0]["bytes"]]
    return table(["ranks", *(str(one["ranks"]) for one in measured)], steps + sizes)


def error(row: dict[str, Any]) -> float:
    """By what part of the median that was measured the prediction is off."""
    median = statistics.median(row["measured_s"])
    return float((row["predicted_s"] - median) / median)


def of_validation(results: dict[str, Any]) -> str:
    """The cases, one a row."""
    lines = []
    for row in results["cases"]:
        found = row["measured_s"]
        measured = f"{statistics.median(found):.2f} s ({min(found):.2f} - {max(found):.2f})"
        lines.append([row["way"], row["case"], f"{row['predicted_s']:.2f} s", measured, f"{error(row):+.0%}"])
    return table(["", "", "predicted", "measured", "error"], lines)


def of_answers(rows: list[dict[str, Any]]) -> str:
    """The answers, one save a row."""
    columns = "stall", "durable after", "writes", "most in 1 s", "sent again", "a month's writes", "storage"
    lines = []
    for row in rows:
        cells = (
            [f"fails: {row['failure']}", *[""] * (len(columns) - 1)]
            if "failure" in row
            else [
                *(f"{number(row[key])} s" for key in ("stall", "durable")),
                *(f"{row[key]:,}" for key in ("writes", "busiest", "retries")),
                *(f"${row[key]:,.0f}" for key in ("requests_usd", "storage_usd")),
            ]
        )
        lines.append([f"{row['nodes']:,}, {row['size'] / GB:,.0f} GB", row["way"], *cells])
    return table(["nodes, state", "", *columns], lines)
