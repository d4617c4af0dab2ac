"""Tells for each patch whether a tree still needs it, has it, or has changed under it."""

from collections.abc import Sequence
from typing import NamedTuple

from patches.engine import changes, edit_file
from patches.format import Landed, NoMatch, Patch, PatchError
from patches.layout import Layout


class Status(NamedTuple):
    """``state`` is "applies", "landed" or "broken"; ``reason`` says why, for "broken" only."""

    state: str
    reason: str = ""


def judge(layout: Layout, patch: Patch) -> Status:
    """Judges ``patch`` by its own edits, whatever it requires.

    It has landed when all its edits have. Some edits serve others and prove nothing by themselves: statements to remove
    that are gone count as landed only beside an edit that has, and imports do not count then. A patch of nothing but
    imports and modules has landed when they are there.
    """
    try:
        result = changes(layout, [patch])
    except PatchError as error:
        return _explain(layout, patch, error)
    there = all(path.is_file() and path.read_bytes() == change.content for path, change in result.items())
    return Status("landed" if there else "applies")


def _explain(layout: Layout, patch: Patch, error: PatchError) -> Status:
    """Why ``patch`` does not apply as a whole, for which ``error`` is only the first reason."""
    landed: list[str] = []
    gone: list[str] = []
    broken: list[str] = []
    left = 0
    for edit in (edit for edit in layout.edits(patch) if not edit.is_import):
        try:
            edit_file(layout.path(edit.spec["file"]), [edit], layout)
            left += 1
        except Landed as reason:
            landed.append(f"landed only in part: {reason}")
        except NoMatch as reason:
            (broken if edit.spec.get("replace") != "" else gone).append(str(reason))
        except PatchError as reason:
            broken.append(str(reason))
    if landed and not broken and not left:
        return Status("landed")
    return Status("broken", _one_line([*broken, *gone, *landed] or [str(error)]))


def _one_line(reasons: Sequence[str]) -> str:
    return " ".join("; ".join(reasons).split())
