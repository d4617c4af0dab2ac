"""One edit in one file: finds its place in the source, and what to put there."""

import ast
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from patches import syntax
from patches.format import Edit, Landed, NoMatch, PatchError
from patches.layout import Layout

_LANDED = "the patch is applied here, or it landed upstream (then drop it)"
#: Packages whose imports stand together, whichever of them a tree has.
_DISTRIBUTIONS = ("lightning", "lightning_fabric", "pytorch_lightning")


class Splice(NamedTuple):
    """Bytes ``start`` to ``end`` of a file become ``text``."""

    start: int
    end: int
    text: str


def place(edit: Edit, source: bytes, layout: Layout) -> Splice | None:
    """Where in ``source`` the edit goes, and what it puts there; None for an import that is there already."""
    spec = {key: layout.text(value) for key, value in edit.spec.items()}
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise PatchError(f"{edit}: the file is not Python: {error}") from error
    if "import" in spec:
        return _place_import(edit, tree, source, spec["import"])
    scope = _scope(edit, tree, spec.get("in"))
    if "landed" in spec:
        landed = [syntax.undotted(statement) for statement in _statements(edit, spec["landed"])]
        if syntax.matches(syntax.undotted(scope), landed):
            raise Landed(f"{edit}: {spec['landed']!r} is there already: {_LANDED}")
    if "body" in spec:
        return _place_body(edit, tree, scope, source, spec["body"])
    there = syntax.matches(scope, _statements(edit, spec["replace"]))
    # A replacement may well contain what it replaces: that is not a place where anything is left to do.
    done = {id(node) for run in there for top in run for node in ast.walk(top)}
    matches = [run for run in syntax.matches(scope, _statements(edit, spec["find"])) if id(run[0]) not in done]
    if len(matches) == 1:
        return _checked(edit, tree, matches[0], source, spec["replace"])
    if matches:
        raise PatchError(f"{edit}: {spec['find']!r} matches {len(matches)} places, and must match exactly one")
    if there:
        raise Landed(f"{edit}: the replacement is there already: {_LANDED}")
    raise NoMatch(f"{edit}: {spec['find']!r} matches no place, and must match exactly one")


def _scope(edit: Edit, tree: ast.Module, path: str | None) -> ast.AST:
    scope: ast.AST = tree
    for name in path.split(".") if path else []:
        found = syntax.definitions(scope, name)
        if len(found) != 1:
            raise PatchError(f"{edit}: {len(found) or 'no'} definitions of {name!r}, and there must be exactly one")
        scope = found[0]
    return scope


def _statements(edit: Edit, text: str) -> list[ast.stmt]:
    try:
        return syntax.statements(text)
    except SyntaxError as error:
        raise PatchError(f"{edit}: {text!r} is not Python: {error}") from error


def _place_import(edit: Edit, tree: ast.Module, source: bytes, text: str) -> Splice | None:
    """Among the module's imports from the same package, where import sorting would put it."""
    new = _statements(edit, text)
    if len(new) != 1 or not isinstance(new[0], ast.ImportFrom) or not new[0].module or new[0].level:
        raise PatchError(f"{edit}: {text!r} is not one absolute 'from ... import ...'")
    module = new[0].module
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    there = {(alias.name, alias.asname) for node in imports if node.module == module for alias in node.names}
    if there.issuperset((alias.name, alias.asname) for alias in new[0].names):
        return None
    package = module.partition(".")[0]
    siblings = _DISTRIBUTIONS if package in _DISTRIBUTIONS else (package,)
    family = [node for node in imports if str(node.module).partition(".")[0] in siblings]
    if not family:
        raise PatchError(f"{edit}: the module imports nothing from {package!r} that {text!r} could stand beside")
    later = next((node for node in family if str(node.module) > module), None)
    line = later.lineno if later else (family[-1].end_lineno or 0) + 1
    tree.body.insert(tree.body.index(later) if later else tree.body.index(family[-1]) + 1, new[0])
    at = _offset(source, line, 0)
    return _verified(edit, tree, source, Splice(at, at, ast.unparse(new[0]) + "\n"))


def _place_body(edit: Edit, tree: ast.Module, scope: ast.AST, source: bytes, body: str) -> Splice:
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise PatchError(f"{edit}: 'body' needs a function as its scope")
    documented = ast.get_docstring(scope, clean=False) is not None
    found = scope.body[int(documented) :]
    if not found:
        raise PatchError(f"{edit}: the function has no body beside its docstring")
    if syntax.same(found, _statements(edit, body)):
        raise Landed(f"{edit}: the function has this body already: {_LANDED}")
    header = (scope.body[0].end_lineno if documented else scope.lineno) or 0
    return _with_comments(_checked(edit, tree, found, source, body), header, syntax.first_line(found[0]), source)


def _with_comments(splice: Splice, header: int, first: int, source: bytes) -> Splice:
    """Widens the splice of a whole body to the comments before its first statement and beside its last one.

    Args:
        splice: The body's statements, and what they become.
        header: The line on which the function's signature starts, or its docstring ends.
        first: The line of the body's first statement.
        source: The file's content.

    """
    start, _, text = splice
    lines = source.splitlines()
    for number in range(first - 1, header, -1):
        line = lines[number - 1].strip()
        if line and not line.startswith(b"#"):
            break
        if line:
            start = _offset(source, number, 0)
    if start != splice.start:
        text = source[_offset(source, first, 0) : splice.start].decode() + text
    comment = re.match(rb"[ \t]*#[^\r\n]*", source[splice.end :])
    return Splice(start, splice.end + (comment.end() if comment else 0), text)


def _checked(edit: Edit, tree: ast.Module, nodes: Sequence[Any], source: bytes, text: str) -> Splice:
    """The splice that puts ``text`` in the place of ``nodes``, if the result means what the patch says."""
    text = textwrap.dedent(text).strip("\n").rstrip()
    column = nodes[0].col_offset
    line_start = _offset(source, syntax.first_line(nodes[0]), 0)
    start = line_start + column
    end = _offset(source, nodes[-1].end_lineno, nodes[-1].end_col_offset)
    new: Any
    if not isinstance(nodes[0], ast.stmt):
        try:
            new = syntax.expression(text)
        except SyntaxError as error:
            raise PatchError(f"{edit}: {text!r} is no expression, and takes the place of one: {error}") from error
        splice = Splice(start, end, text)
    elif text:
        new = _statements(edit, text)
        line = source[line_start:end]
        margin = line[: len(line) - len(line.lstrip(b" \t"))].decode()
        splice = Splice(start, end, textwrap.indent(text, margin).lstrip())
    else:
        new = []
        tail = re.match(rb"[ \t]*(#[^\r\n]*)?(\r?\n|$)", source[end:])
        if tail is None or source[line_start:start].strip():
            raise PatchError(f"{edit}: a statement can only be removed when it has its lines for itself")
        end += tail.end()
        before = source[:line_start].rpartition(b"\n")[0].rpartition(b"\n")[2].strip()
        if not before or before.endswith(b":"):  # at the start of a block or paragraph: no blank line may remain there
            blank = re.match(rb"[ \t]*\r?\n", source[end:])
            end += blank.end() if blank else 0
        splice = Splice(line_start, end, "")
    syntax.substitute(tree, nodes, new)
    return _verified(edit, tree, source, splice)


def _verified(edit: Edit, expected: ast.Module, source: bytes, splice: Splice) -> Splice:
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


def _offset(source: bytes, line: int, column: int) -> int:
    return sum(len(text) for text in source.splitlines(keepends=True)[: line - 1]) + column


def spliced(source: bytes, splices: Iterable[Splice]) -> bytes:
    """``source`` with all ``splices`` made, in the file's own kind of line ends."""
    newline = b"\r\n" if source.partition(b"\n")[0].endswith(b"\r") else b"\n"
    for splice in sorted(splices, reverse=True):
        source = source[: splice.start] + splice.text.encode().replace(b"\n", newline) + source[splice.end :]
    return source
