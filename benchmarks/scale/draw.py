"""Draws what ``scenarios.py`` found: ``python benchmarks/scale/draw.py RESULTS PICTURE``. Needs matplotlib."""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

#: What each panel shows, and its title.
PANELS = {
    "stall": "Training stands still, seconds",
    "durable": "Until it is durable, seconds",
    "busiest": "Most writes in one second",
    "requests_usd": "Writes of a month, dollars",
}
COLOURS = ("#8a8a8a", "#1f6fb4", "#e08a1e", "#3a9a4a")


def draw_panel(axes: Axes, rows: list[dict[str, Any]], key: str, title: str) -> None:
    """One line for each way to save; a save that fails has no point."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for way, colour in zip(ways, COLOURS, strict=True):
        points = [(row["nodes"], row[key]) for row in rows if row["way"] == way and key in row]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=way)
    jobs = sorted({(row["nodes"], row["size"]) for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([nodes for nodes, _ in jobs], [f"{nodes:,}\n{size / 1e12:g} TB" for nodes, size in jobs])
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.grid(color="#e0e0e0", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def main(results: Path, picture: Path) -> None:
    """Draws all panels over the number of nodes."""
    rows = json.loads(results.read_text())["rows"]
    mpl.rcParams["svg.hashsalt"] = "scale"  # the same numbers give the same file
    mpl.rcParams["svg.fonttype"] = "none"  # text, not its outlines
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for (key, title), axes in zip(PANELS.items(), figure.subplots(1, len(PANELS)), strict=True):
        draw_panel(axes, rows, key, title)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
