"""Imports of a file: those that edits need, and those that nothing needs after the edits."""

import ast
import re
from collections.abc import Collection, Iterator

from patches import syntax
from patches.format import Edit, PatchError
from patches.splice import Splice, offset, removed, span, spliced, statements, verified

_WIDTH = 120

#: Packages whose imports stand together, whichever of them a tree has.
_DISTRIBUTIONS = ("lightning", "lightning_fabric", "pytorch_lightning")


def insertions(edit: Edit, source: bytes, text: str) -> list[Splice]:
    """Adds ``from`` imports among the module's from the same package, where import sorting would put them."""
    new = statements(edit, text)
    return [splice for node in new if (splice := _insertion(edit, source, node)) is not None]


def _insertion(edit: Edit, source: bytes, new: ast.stmt) -> Splice | None:
    text = ast.unparse(new)
    if not isinstance(new, ast.ImportFrom) or not new.module or new.level:
        raise PatchError(f"{edit}: {text!r} is not an absolute 'from ... import ...'")
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    there = {(alias.name, alias.asname) for node in imports if node.module == new.module for alias in node.names}
    if there.issuperset((alias.name, alias.asname) for alias in new.names):
        return None
    package = new.module.partition(".")[0]
    siblings = _DISTRIBUTIONS if package in _DISTRIBUTIONS else (package,)
    family = [node for node in imports if str(node.module).partition(".")[0] in siblings]
    if not family:
        raise PatchError(f"{edit}: the module imports nothing from {package!r} that {text!r} could stand beside")
    later = next((node for node in family if str(node.module) > new.module), None)
    line = later.lineno if later else (family[-1].end_lineno or 0) + 1
    tree.body.insert(tree.body.index(later) if later else tree.body.index(family[-1]) + 1, new)
    at = offset(source, line, 0)
    return verified(edit, tree, source, Splice(at, at, text + "\n", shared=True))


def orphans(pristine: bytes, edited: bytes) -> dict[str, set[str]]:
    """Names that were imported and used before the edits, and are imported but not used after them, by their scope.

    Only imports that stand directly in the module or in a function are looked at: those in ``if TYPE_CHECKING`` and
    ``try`` serve others than the code alone.
    """
    before, after = dict(_scopes(ast.parse(pristine))), dict(_scopes(ast.parse(edited)))
    return {
        path: names
        for path, scope in after.items()
        if path in before and _bound(scope) and (names := (_bound(scope) & _used(before[path])) - _used(scope))
    }


def without(edited: bytes, names: dict[str, set[str]], edit: Edit) -> bytes:
    """``edited`` without the imports of ``names``, as :func:`orphans` gives them; ``edit`` is named in errors."""
    for path, unused in names.items():
        for name in sorted(unused):
            edited = spliced(edited, [_removal(edit, edited, path, name)])
    return edited


def imported_from(sources: Collection[str], module: str) -> set[str]:
    """The names that any of ``sources`` imports from ``module``, which are its to give although it uses none."""
    statement = re.compile(rf"from\s+{re.escape(module)}\s+import\s+(\([^)]*\)|.*)")
    return {name for text in sources for found in statement.findall(text) for name in re.findall(r"\w+", found)}


def _removal(edit: Edit, source: bytes, path: str, name: str) -> Splice:
    tree = ast.parse(source)
    scope = dict(_scopes(tree))[path]
    node = next(node for node in _imports(scope) if name in map(_name, node.names))
    if len(node.names) == 1:
        return removed(edit, tree, [node], source)
    node.names = [alias for alias in node.names if _name(alias) != name]
    text = ast.unparse(node)
    if isinstance(node, ast.ImportFrom) and (node.end_lineno != node.lineno or len(text) + node.col_offset > _WIDTH):
        margin = " " * node.col_offset
        lines = "".join(f"{margin}    {ast.unparse(alias)},\n" for alias in node.names)
        text = f"{text.partition(' import ')[0]} import (\n{lines}{margin})"
    return verified(edit, tree, source, Splice(*span(source, [node]), text))


def _scopes(scope: ast.AST, path: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The module and its functions, also those of classes, by where they are; a repeated name has a number."""
    if not isinstance(scope, ast.ClassDef):
        yield path, scope
    seen: dict[str, int] = {}
    for node in syntax.own_statements(scope):
        if isinstance(node, syntax.Definition):
            seen[node.name] = seen.get(node.name, 0) + 1
            yield from _scopes(node, f"{path}.{node.name}#{seen[node.name]}")


def _imports(scope: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in getattr(scope, "body", []) if isinstance(node, (ast.Import, ast.ImportFrom))]


def _bound(scope: ast.AST) -> set[str]:
    return {_name(alias) for node in _imports(scope) for alias in node.names}


def _name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _used(scope: ast.AST) -> set[str]:
    """The names in the code of ``scope``, in its examples, and in strings that can be annotations or in ``__all__``."""
    used: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            examples = re.findall(r"(?m)^\s*(?:>>>|\.\.\.) (.*)", node.value)
            used.update(
                re.findall(r"\w+", " ".join([*examples, node.value] if _is_expression(node.value) else examples))
            )
    return used


def _is_expression(text: str) -> bool:
    try:
        ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return False
    return True
