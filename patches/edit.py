"""One edit in one file: finds its place in the source, and what to put there."""

import ast
import copy
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from patches import syntax
from patches.format import FOUND_KINDS, Edit, Landed, NoMatch, PatchError
from patches.layout import Layout
from patches.splice import Splice, offset, removed, span, statements, verified

_LANDED = "the patch is applied here, or it landed upstream (then drop it)"


def place(edit: Edit, source: bytes, layout: Layout) -> Splice:
    """Where in ``source`` the edit goes, and what it puts there, imports excepted."""
    spec = {key: layout.text(value) for key, value in edit.spec.items()}
    tree = ast.parse(source)
    scope = _scope(edit, tree, spec.get("in"))
    _check_shadowing(edit, scope, spec.get("import", ""))
    if "landed" in spec:
        landed = [syntax.undotted(statement) for statement in statements(edit, spec["landed"])]
        if syntax.matches(syntax.undotted(scope), landed):
            raise Landed(f"{edit}: {spec['landed']!r} is there already: {_LANDED}")
    if "body" in spec:
        return _place_body(edit, tree, scope, source, spec["body"])
    return _place_found(edit, tree, scope, source, spec)


def _scope(edit: Edit, tree: ast.Module, path: str | None) -> ast.AST:
    scope: ast.AST = tree
    for name in re.split(r"\.(?!setter\b)", path) if path else []:
        found = syntax.definitions(scope, name)
        if len(found) != 1:
            raise PatchError(f"{edit}: {len(found) or 'no'} definitions of {name!r}, and there must be exactly one")
        scope = found[0]
    return scope


def _check_shadowing(edit: Edit, scope: ast.AST, imports: str) -> None:
    """Refuses a name to import that a function has as a variable: its call would find that, or nothing yet."""
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    names = {alias.asname or alias.name for node in statements(edit, imports) for alias in getattr(node, "names", ())}
    own = {node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(scope) if isinstance(node, ast.arg)}
    if shadowed := names & own:
        raise PatchError(f"{edit}: {sorted(shadowed)[0]!r} is a variable there: import something of another name")


def _place_found(edit: Edit, tree: ast.Module, scope: ast.AST, source: bytes, spec: dict[str, str]) -> Splice:
    find = statements(edit, spec["find"])
    kind = next(kind for kind in FOUND_KINDS if kind in spec)
    new = statements(edit, spec[kind])
    if kind == "wrap":
        new = _filled(edit, new, spec[kind], find)
    there = syntax.matches(scope, new)
    # What is put there may well contain what is found: that is not a place where anything is left to do.
    done = {id(node) for run in there for top in run for node in ast.walk(top)}
    matches = [run for run in syntax.matches(scope, find) if id(run[0]) not in done]
    if there and (kind in ("before", "after") or not matches):
        raise Landed(f"{edit}: the replacement is there already: {_LANDED}")
    if not matches:
        raise NoMatch(f"{edit}: {spec['find']!r} matches no place, and must match exactly one")
    if len(matches) > 1:
        raise PatchError(f"{edit}: {spec['find']!r} matches {len(matches)} places, and must match exactly one")
    if kind in ("before", "after"):
        return _inserted(edit, tree, syntax.whole(scope, matches[0]), source, kind, spec[kind], new)
    if kind == "wrap":
        run = copy.deepcopy([node if isinstance(node, ast.stmt) else ast.Expr(node) for node in matches[0]])
        new = _filled(edit, statements(edit, spec[kind]), spec[kind], run)
        return _replaced(edit, tree, matches[0], source, _wrapping(edit, matches[0], source, spec[kind]), new)
    return _replaced(edit, tree, matches[0], source, spec[kind], new)


def _place_body(edit: Edit, tree: ast.Module, scope: ast.AST, source: bytes, body: str) -> Splice:
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        raise PatchError(f"{edit}: 'body' needs a function as its scope")
    documented = ast.get_docstring(scope, clean=False) is not None
    found = scope.body[int(documented) :]
    if not found:
        raise PatchError(f"{edit}: the function has no body beside its docstring")
    new = statements(edit, body)
    if syntax.same(found, new):
        raise Landed(f"{edit}: the function has this body already: {_LANDED}")
    header = (scope.body[0].end_lineno if documented else scope.lineno) or 0
    splice = _replaced(edit, tree, found, source, body, new)
    return _with_comments(splice, header, syntax.first_line(found[0]), source)


def _with_comments(splice: Splice, header: int, first: int, source: bytes) -> Splice:
    """Widens the splice of a whole body to the comments before its first statement and beside its last one.

    Args:
        splice: The body's statements, and what they become.
        header: The line on which the function's signature starts, or its docstring ends.
        first: The line of the body's first statement.
        source: The file's content.

    """
    start, _, text, _ = splice
    lines = source.splitlines()
    for number in range(first - 1, header, -1):
        line = lines[number - 1].strip()
        if line and not line.startswith(b"#"):
            break
        if line:
            start = offset(source, number, 0)
    if start != splice.start:
        text = source[offset(source, first, 0) : splice.start].decode() + text
    comment = re.match(rb"[ \t]*#[^\r\n]*", source[splice.end :])
    return Splice(start, splice.end + (comment.end() if comment else 0), text)


def _replaced(
    edit: Edit, tree: ast.Module, nodes: Sequence[Any], source: bytes, text: str, new: list[ast.stmt]
) -> Splice:
    """The splice that puts ``text`` in the place of ``nodes``, if the result means what the patch says."""
    text = textwrap.dedent(text).strip("\n").rstrip()
    if isinstance(nodes[0], ast.stmt):
        if not text:
            return removed(edit, tree, nodes, source)
        splice = Splice(*span(source, nodes), _indented(text, source, nodes[0]).lstrip())
        syntax.substitute(tree, nodes, new)
        return verified(edit, tree, source, splice)
    if len(new) != 1 or not isinstance(new[0], ast.Expr):
        raise PatchError(f"{edit}: {text!r} is no expression, and takes the place of one")
    syntax.substitute(tree, nodes, new[0].value)
    return verified(edit, tree, source, Splice(*span(source, nodes), text))


def _inserted(
    edit: Edit, tree: ast.Module, nodes: Sequence[Any], source: bytes, kind: str, text: str, new: list[ast.stmt]
) -> Splice:
    """The splice that puts ``text`` before or after the statements ``nodes``."""
    if not new:
        raise PatchError(f"{edit}: {kind!r} says nothing")
    start, end = span(source, nodes)
    text = _indented(textwrap.dedent(text).strip("\n").rstrip(), source, nodes[0])
    if kind == "before":
        splice = Splice(start, start, text.lstrip() + "\n" + _margin(source, nodes[0]))
    else:
        end += len(source[end:].partition(b"\n")[0].rstrip(b"\r"))
        splice = Splice(end, end, "\n" + text)
    syntax.substitute(tree, nodes, [*new, *nodes] if kind == "before" else [*nodes, *new])
    return verified(edit, tree, source, splice)


def _filled(edit: Edit, nodes: list[ast.stmt], text: str, found: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of ``wrap`` with what is found in the place of their ``...``."""
    hole = _hole(edit, nodes, text)
    module = ast.Module(nodes, [])
    around = next((node for node in ast.walk(module) if isinstance(node, ast.Expr) and node.value is hole), None)
    if around is not None:
        syntax.substitute(module, [around], found)
    elif len(found) == 1 and isinstance(found[0], ast.Expr):
        syntax.substitute(module, [hole], found[0].value)
    else:
        raise PatchError(f"{edit}: {text!r} has its '...' in the place of an expression, and wraps statements")
    return module.body


def _hole(edit: Edit, nodes: list[ast.stmt], text: str) -> ast.Constant:
    constants = (node for top in nodes for node in ast.walk(top) if isinstance(node, ast.Constant))
    holes = [node for node in constants if node.value is ...]
    if len(holes) != 1:
        raise PatchError(f"{edit}: {text!r} needs exactly one '...', which stands for what is found")
    return holes[0]


def _wrapping(edit: Edit, nodes: Sequence[Any], source: bytes, text: str) -> str:
    """The text of ``wrap`` with the source of ``nodes`` in the place of its ``...``."""
    text = textwrap.dedent(text).strip("\n")
    hole = _hole(edit, syntax.statements(text), text)
    at = offset(text.encode(), hole.lineno, hole.col_offset)
    head, tail = text.encode()[:at].decode(), text.encode()[at + 3 :].decode()
    start, end = span(source, nodes)
    found = source[start:end].decode().replace("\r\n", "\n")
    if isinstance(nodes[0], ast.stmt):
        if head.rstrip(" ").endswith(":"):  # "with x: ..." on one line
            head = head.rstrip() + "\n    "
        line = head.rpartition("\n")[2]
        found = found.replace("\n" + _margin(source, nodes[0]), "\n" + ("" if line.strip() else line))
    return head + found + tail


def _margin(source: bytes, node: Any) -> str:
    line = source[offset(source, syntax.first_line(node), 0) :].partition(b"\n")[0]
    return line[: len(line) - len(line.lstrip(b" \t"))].decode()


def _indented(text: str, source: bytes, like: Any) -> str:
    return textwrap.indent(text, _margin(source, like))
