"""Finds the place of each edit in Lightning's pristine source by its syntax tree, and makes the edit there.

An edit names a file, a scope (``Class.method``, or nothing for the module) and one of

* ``find``, an expression or one or more consecutive statements, with one of
  ``replace``: what takes its place, or nothing, which removes statements;
  ``before``, ``after``: statements beside it, or beside the statement that an expression is part of;
  ``wrap``: what goes around it, with ``...`` in its place;
* ``body``: what takes the place of a function's whole body, its docstring excepted.

Either may have an ``import``, which can also stand alone: ``from`` imports, inserted once among the module's imports.
An import that nothing in its scope uses after the edits, and something used before, is dropped.

Positions come from the tree, never from line numbers or surrounding text, so a patch survives any change of Lightning's
that leaves the statement itself alone. Whatever is not exactly one match is a :class:`PatchError`. All edits of a file
are matched against the same pristine text and must not overlap, which makes the order of patches irrelevant.
"""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from patches import imports
from patches.edit import place
from patches.format import Edit, Patch, PatchError
from patches.layout import Layout
from patches.splice import Splice, spliced


class Change(NamedTuple):
    """What a file becomes, and the names of the patches that make it so."""

    content: bytes
    patches: list[str]


def apply_patches(tree: Path, patches: Sequence[Patch]) -> dict[Path, list[str]]:
    """Makes every edit in ``tree`` and copies the modules that the patches add; nothing is written if one fails.

    Returns:
        The changed and replaced files of Lightning with the names of the patches that touched them. A module that
        did not exist before is not among them.

    """
    result = changes(Layout(tree), patches)
    touched = {path: change.patches for path, change in result.items() if path.exists()}
    for path, change in result.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(change.content)
    return touched


def changes(layout: Layout, patches: Sequence[Patch]) -> dict[Path, Change]:
    """Every file that ``patches`` edit or add, without writing any."""
    result: dict[Path, Change] = {}
    edits: dict[Path, list[Edit]] = {}
    for patch in patches:
        for path, content in layout.added(patch).items():
            if path in result:
                raise PatchError(f"patches {result[path].patches[0]!r} and {patch.name!r} both add {path.name!r}")
            result[path] = Change(content, [patch.name])
        for edit in layout.edits(patch):
            edits.setdefault(layout.path(edit.spec["file"]), []).append(edit)
    for path, its_edits in edits.items():
        if path in result:
            raise PatchError(f"{its_edits[0]}: patch {result[path].patches[0]!r} replaces the whole file")
        names = list(dict.fromkeys(edit.patch for edit in its_edits))
        result[path] = Change(edit_file(path, its_edits, layout), names)
    return result


def edit_file(path: Path, edits: Sequence[Edit], layout: Layout) -> bytes:
    """The content of the file at ``path`` after ``edits``, which are all matched against its present content."""
    if not path.is_file():
        raise PatchError(f"{edits[0]}: the file does not exist")
    source = path.read_bytes()
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise PatchError(f"{edits[-1]}: the file is not Python: {error}") from error
    splices: dict[Splice, Edit] = {}
    own = [(place(edit, source, layout), edit) for edit in edits if not edit.is_import]
    for splice, edit in [*own, *imports.insertions(edits, source, layout).items()]:
        for other in splices:
            _check_apart(edit, splice, splices[other], other)
        splices[splice] = edit
    result = spliced(source, splices)
    try:
        unused = imports.orphans(source, result)
    except SyntaxError as error:  # each is right by itself, but two can empty a block, for instance
        raise PatchError(f"{'; '.join(map(str, edits))}: together they leave what is not Python: {error}") from error
    if "" in unused:
        unused[""] -= layout.imported_from(path)
    return imports.without(result, unused, edits[0])


def _check_apart(edit: Edit, splice: Splice, other_edit: Edit, other: Splice) -> None:
    if other.start < splice.end and splice.start < other.end:
        raise PatchError(f"{edit}: overlaps an edit of patch {other_edit.patch!r}")
    if splice[:2] == other[:2] and not (splice.shared and other.shared):
        raise PatchError(f"{edit}: inserts at the same place as an edit of patch {other_edit.patch!r}")
