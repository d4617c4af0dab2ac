"""Changes of a file's text, each proved by the syntax tree of what comes of it."""

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from patches import syntax
from patches.format import Edit, PatchError


class Splice(NamedTuple):
    """Bytes ``start`` to ``end`` of a file become ``text``; others may insert at the same place if ``shared``."""

    start: int
    end: int
    text: str
    shared: bool = False


def statements(edit: Edit, text: str) -> list[ast.stmt]:
    """Parses a text of ``edit``."""
    try:
        return syntax.statements(text)
    except SyntaxError as error:
        raise PatchError(f"{edit}: {text!r} is not Python: {error}") from error


def verified(edit: Edit, expected: ast.Module, source: bytes, splice: Splice) -> Splice:
    """``splice``, if it makes of ``source`` what ``expected`` says."""
    try:
        result = ast.parse(spliced(source, [splice]))
    except SyntaxError as error:
        raise PatchError(f"{edit}: the result is not Python: {error}") from error
    if not syntax.same(result, expected):
        raise PatchError(
            f"{edit}: {splice.text!r} would mean something else at that place (a missing pair of parentheses, an"
            " 'elif', or a string of several lines that indentation changes?)"
        )
    return splice


def removed(edit: Edit, tree: ast.Module, nodes: Sequence[Any], source: bytes) -> Splice:
    """The splice that removes the statements ``nodes`` with their lines, and a blank line that is one too many then."""
    start, end = span(source, nodes)
    line_start = offset(source, syntax.first_line(nodes[0]), 0)
    tail = re.match(rb"[ \t]*(#[^\r\n]*)?(\r?\n|$)", source[end:])
    if tail is None or source[line_start:start].strip():
        raise PatchError(f"{edit}: a statement can only be removed when it has its lines for itself")
    end += tail.end()
    before = source[:line_start].rpartition(b"\n")[0].rpartition(b"\n")[2].strip()
    if not before or before.endswith(b":"):  # at the start of a block or paragraph: no blank line may remain there
        blank = re.match(rb"[ \t]*\r?\n", source[end:])
        end += blank.end() if blank else 0
    syntax.substitute(tree, nodes, [])
    return verified(edit, tree, source, Splice(line_start, end, ""))


def span(source: bytes, nodes: Sequence[Any]) -> tuple[int, int]:
    """Where in ``source`` the first of ``nodes`` starts, with its decorators, and the last one ends."""
    start = offset(source, syntax.first_line(nodes[0]), nodes[0].col_offset)
    return start, offset(source, nodes[-1].end_lineno, nodes[-1].end_col_offset)


def offset(source: bytes, line: int, column: int) -> int:
    """The position of a line and a column of the syntax tree in ``source``."""
    return sum(len(text) for text in source.splitlines(keepends=True)[: line - 1]) + column


def spliced(source: bytes, splices: Iterable[Splice]) -> bytes:
    """``source`` with all ``splices`` made, in the file's own kind of line ends."""
    newline = b"\r\n" if source.partition(b"\n")[0].endswith(b"\r") else b"\n"
    for splice in sorted(splices, reverse=True):
        source = source[: splice.start] + splice.text.encode().replace(b"\n", newline) + source[splice.end :]
    return source
