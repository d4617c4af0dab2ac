"""The rows of checkpoints in the report of a profiler."""

from collections.abc import Sequence
from typing import Any

_BACKGROUND = " (background)"


def row_of(stage: str, background: bool = False) -> str:
    """Returns the action's name for a stage of :class:`~lightning.fabric.storage.save_report.SaveReport`."""
    return f"checkpoint_{stage}{_BACKGROUND if background else ''}"


def _is_background(action: str) -> bool:
    """Returns whether the action went on beside training, so that its time is not part of the run's."""
    return action.endswith(_BACKGROUND)


def background_last(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns the rows of SimpleProfiler's table, with those of the background at the end.

    Args:
        rows: Each has name, mean and total, or name, mean, number, total and percentage. Those of the background lose
            the percentage: the run's time does not contain theirs.
    """
    beside = [(*row[:4], "-") if len(row) == 5 else row for row in rows if _is_background(row[0])]
    return [row for row in rows if not _is_background(row[0])] + beside


def in_order(rows: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], int]:
    """Returns the rows of SimpleProfiler's long table by their part of the run's time, and the number of calls."""
    ordered = background_last(sorted(rows, key=lambda row: row[4], reverse=True))
    return ordered, sum(row[2] for row in ordered if not _is_background(row[0]))
