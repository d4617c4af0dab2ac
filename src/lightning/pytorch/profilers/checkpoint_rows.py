"""The rows of checkpoints in the report of a profiler."""

from collections.abc import Sequence
from typing import Any

_BACKGROUND = " (background)"


def row_of(stage: str, background: bool = False) -> str:
    """What the action is called, for a stage of :class:`~lightning.fabric.storage.save_report.SaveReport`."""
    return f"checkpoint_{stage}{_BACKGROUND if background else ''}"


def _is_background(action: str) -> bool:
    """Whether the action went on beside training, so that its time is not part of the run's."""
    return action.endswith(_BACKGROUND)


def background_last(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The rows of SimpleProfiler's table, in their order but for those of the background.

    Args:
        rows: Name, mean and total, or name, mean, number, total and percentage, which those of the background lose:
            the run's time does not contain theirs.
    """
    beside = [(*row[:4], "-") if len(row) == 5 else row for row in rows if _is_background(row[0])]
    return [row for row in rows if not _is_background(row[0])] + beside


def in_order(rows: Sequence[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], int]:
    """The rows of SimpleProfiler's long table by their part of the run's time, and the number of calls in it."""
    ordered = background_last(sorted(rows, key=lambda row: row[4], reverse=True))
    return ordered, sum(row[2] for row in ordered if not _is_background(row[0]))
