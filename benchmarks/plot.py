"""Draws the results of ``run.py``, or of ``scale/scenarios.py``: ``python benchmarks/plot.py RESULTS PICTURE``.

It needs matplotlib.
"""

import json
import re
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
from figures import Row, Sizes, all_figures
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import OURS, columns, number, values

COLUMNS = 5
COLOURS = ("#b8b8b8", "#8a8a8a", "#d8b070", "#1f6fb4")
#: Of large jobs: what each panel shows, and its title; and a colour for each way to save.
SCALE_PANELS = {
    "stall": "Training stands still, seconds",
    "durable": "Until it is durable, seconds",
    "busiest": "Most writes in one second",
    "requests_usd": "Writes of a month, dollars",
}
SCALE_COLOURS = ("#8a8a8a", "#1f6fb4", "#e08a1e", "#3a9a4a", "#a05fb4", "#b43a3a")


def draw_bars(axes: Axes, results: dict[str, Any], name: str, row: Row, title: str, releases: list[str]) -> None:
    """One bar for each release: the median, with a line from the least to the greatest."""
    for position, release in enumerate(releases):
        found = values(results, name, row, release)
        if not found:
            axes.text(position, 0, "not\nmeasured", ha="center", va="bottom", fontsize=7)
            continue
        middle = statistics.median(found)
        spread = [[middle - min(found)], [max(found) - middle]]
        colour = COLOURS[-1] if release == OURS else COLOURS[position]
        axes.bar(position, middle, yerr=spread, width=0.7, color=colour, ecolor="#404040", capsize=3)
        top = (position, max(found))
        axes.annotate(number(middle), top, (0, 3), textcoords="offset points", ha="center", fontsize=8)
    names = [re.sub(r" |(?<=[._])(?=\D)", "\n", release) for release in releases]
    axes.set_xticks(range(len(releases)), names, fontsize=8)
    axes.set_xlim(-0.6, len(releases) - 0.4)
    axes.set_title("\n".join(textwrap.wrap(title, 26)), fontsize=9)
    axes.set_ylabel(row.unit, fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.15)


def draw_figures(results: dict[str, Any]) -> Figure:
    """A panel for each row that has one."""
    panels, subject = [], ""
    for part in all_figures(Sizes(**results["sizes"])).values():
        for name, row in ((name, row) for name, figure in part.items() for row in figure.rows):
            label = re.sub(r" \(.*\)$|`", "", row.label)
            subject = subject if label.startswith("...") else label.partition(":")[0]
            if row.is_drawn and name in results["figures"]:
                panels.append((name, row, label.replace("...", f"{subject},").replace(":", ",")))
    height = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(12, 3.2 * height), layout="constrained")
    grid = figure.subplots(height, COLUMNS, squeeze=False)
    releases = columns(results, [name for name, *_ in panels])
    for (name, row, title), axes in zip(panels, grid.flat, strict=False):
        draw_bars(axes, results, name, row, title, releases)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    return figure


def draw_scale(rows: list[dict[str, Any]]) -> Figure:
    """Panels over the number of nodes, with a line for each way to save; a save that fails has no point."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    jobs = sorted({(row["nodes"], row["size"]) for row in rows})
    ways = dict(zip(dict.fromkeys(row["way"] for row in rows), SCALE_COLOURS, strict=True))
    for (key, title), axes in zip(SCALE_PANELS.items(), figure.subplots(1, len(SCALE_PANELS)), strict=True):
        for way, colour in ways.items():
            points = [(row["nodes"], row[key]) for row in rows if row["way"] == way and key in row]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=way)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([nodes for nodes, _ in jobs], [f"{nodes:,}\n{size / 1e12:g} TB" for nodes, size in jobs])
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        axes.grid(color="#e0e0e0", linewidth=0.5)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(ways), fontsize=8, frameon=False
    )
    return figure


def main(results: Path, picture: Path) -> None:
    """Draws all panels of what is in the results."""
    content = json.loads(results.read_text())
    mpl.rcParams["svg.hashsalt"] = "benchmarks"  # the same numbers give the same file
    mpl.rcParams["svg.fonttype"] = "none"  # text, not its outlines
    figure = draw_figures(content) if "figures" in content else draw_scale(content["rows"])
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
