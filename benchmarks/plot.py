"""Draws what ``run.py`` measured: ``python benchmarks/plot.py RESULTS PICTURE``. Needs matplotlib."""

import json
import re
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import OURS, PAGE, Row, columns, number, size, values

COLUMNS = 5
COLOURS = ("#b8b8b8", "#8a8a8a", "#d8b070", "#1f6fb4")
PANELS = {
    ("save", "wall_s"): "Save of {size} to S3, wall time",
    ("save", "cpu_s"): "Save of {size} to S3, processor time",
    ("signed", "cpu_s"): "Save of {size} to S3, signed, processor time",
    ("save", "memory_mib"): "Save of {size} to S3, extra memory",
    ("large", "memory_mib"): "Save of {large} to S3, extra memory",
    ("hold_up", "longest_ms"): "Longest delay of a thread while another saves",
    ("load", "wall_s"): "Restore of {size} over a slow link, wall time",
    ("resume", "step_mib"): "Restored state, extra memory at the first step",
    ("fit", "requests"): "Requests of a fit of {epochs} epochs",
    ("local", "durable_s"): "Save of {size} to a local disk, wall time",
    ("sharded_save", "cpu_s_per_gib"): "FSDP2, save of {size} a rank to S3, processor time per GiB",
    ("sharded_save", "memory_mib"): "FSDP2, save of {size} a rank to S3, extra memory of a rank",
    ("sharded_fsdp1", "memory_mib"): "FSDP1, save of {size} a rank to S3, extra memory of a rank",
    ("sharded_small", "wall_s"): "{small_tensors} small tensors in order, {latency_ms} ms, wall time",
    ("sharded_mixed", "wall_s"): "{small_tensors} small tensors in another order, wall time",
    ("sharded_mixed", "requests"): "{small_tensors} small tensors in another order, requests",
    ("sharded_load", "wall_s"): "Restore of {size} a rank over a slow link, wall time",
    ("sharded_local", "save_wall_s"): "Save of {size} a rank to a local disk, wall time",
    ("sharded_local", "load_wall_s"): "Restore of it from a local disk, wall time",
    ("stall", "ratio"): "Stall of a save of {state} in the background / copy",
    ("stall", "memory_mib"): "Save of {state} in the background, extra memory",
    ("stall_fsdp2", "ratio"): "FSDP2, stall of a save in the background / copy",
    ("stall_fsdp1", "ratio"): "FSDP1, stall of a save in the background / copy",
    ("steps", "ratio"): "Step during an upload of {state} / without",
}


def draw_panel(axes: Axes, results: dict[str, Any], row: Row, title: str, releases: list[str]) -> None:
    """One bar for each release: the median, with a line from the least to the greatest."""
    for position, release in enumerate(releases):
        found = values(results, row, release)
        if not found:
            axes.text(position, 0, "not\nmeasured", ha="center", va="bottom", fontsize=7)
            continue
        middle = statistics.median(found)
        spread = [[middle - min(found)], [max(found) - middle]]
        colour = COLOURS[-1] if release == OURS else COLOURS[position]
        axes.bar(position, middle, yerr=spread, width=0.7, color=colour, ecolor="#404040", capsize=3)
        axes.annotate(
            number(middle), (position, max(found)), (0, 3), textcoords="offset points", ha="center", fontsize=8
        )
    names = [re.sub(r" |(?<=[._])(?=\D)", "\n", release) for release in releases]
    axes.set_xticks(range(len(releases)), names, fontsize=8)
    axes.set_xlim(-0.6, len(releases) - 0.4)
    axes.set_title("\n".join(textwrap.wrap(title, 26)), fontsize=9)
    axes.set_ylabel(row.unit, fontsize=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def main(results: Path, picture: Path) -> None:
    """Draws all panels whose figure was measured."""
    measured = json.loads(results.read_text())
    sizes = measured["sizes"]
    rows = {(row.figure, row.key): row for of_kind in PAGE.values() for row in of_kind}
    panels = {rows[place]: title for place, title in PANELS.items() if place[0] in measured["figures"]}
    height = -(-len(panels) // COLUMNS)
    mpl.rcParams["svg.hashsalt"] = "benchmarks"  # the same numbers give the same file
    mpl.rcParams["svg.fonttype"] = "none"  # text, not its outlines
    figure = Figure(figsize=(12, 3.2 * height), layout="constrained")
    grid = figure.subplots(height, COLUMNS, squeeze=False)
    for (row, title), axes in zip(panels.items(), grid.flat, strict=False):
        large, state = size(sizes["large_mib"]), size(sizes["state_mib"])
        titled = title.format(size=size(sizes["mib"]), large=large, state=state, **sizes)
        draw_panel(axes, measured, row, titled, columns(measured, panels))
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
