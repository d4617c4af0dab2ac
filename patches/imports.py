"""Imports of a file: those that edits need, and those that nothing needs after the edits."""

import ast
import re
from collections.abc import Iterable, Iterator

from patches import syntax
from patches.format import Edit, PatchError
from patches.layout import Layout
from patches.splice import Splice, offset, removed, span, spliced, statements, verified

_WIDTH = 120

#: Packages whose imports stand together, whichever of them a tree has.
_DISTRIBUTIONS = ("lightning", "lightning_fabric", "pytorch_lightning")


def insertions(edits: Iterable[Edit], source: bytes, layout: Layout) -> dict[Splice, Edit]:
    """Adds what ``edits`` import to the module's imports from the same package, where import sorting would put it."""
    wanted: dict[str, tuple[Edit, dict[str, ast.alias]]] = {}
    for edit in (edit for edit in edits if "import" in edit.spec):
        for node in statements(edit, layout.text(edit.spec["import"])):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
                raise PatchError(f"{edit}: {ast.unparse(node)!r} is not an absolute 'from ... import ...'")
            _, names = wanted.setdefault(node.module, (edit, {}))
            names.update({ast.unparse(alias): alias for alias in node.names})
    splices = {}
    for module, (edit, names) in wanted.items():
        splice = _insertion(edit, source, module, names)
        if splice is not None:
            splices[splice] = edit
    return splices


def _insertion(edit: Edit, source: bytes, module: str, names: dict[str, ast.alias]) -> Splice | None:
    tree = ast.parse(source)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    there = {ast.unparse(alias) for node in imports if node.module == module for alias in node.names}
    missing = sorted(names.keys() - there, key=lambda name: (not name[0].isupper(), name))
    if not missing:
        return None
    new = ast.ImportFrom(module, [names[name] for name in missing], 0)
    text = _text(new, "")
    package = module.partition(".")[0]
    siblings = _DISTRIBUTIONS if package in _DISTRIBUTIONS else (package,)
    family = [node for node in imports if str(node.module).partition(".")[0] in siblings]
    if not family:
        raise PatchError(f"{edit}: the module imports nothing from {package!r} that {text!r} could stand beside")
    later = next((node for node in family if str(node.module) > module), None)
    line = later.lineno if later else (family[-1].end_lineno or 0) + 1
    tree.body.insert(tree.body.index(later) if later else tree.body.index(family[-1]) + 1, new)
    at = offset(source, line, 0)
    return verified(edit, tree, source, Splice(at, at, text + "\n", shared=True))


def _text(node: ast.Import | ast.ImportFrom, margin: str, on_lines: bool = False) -> str:
    text = ast.unparse(node)
    if isinstance(node, ast.Import) or not (on_lines or len(margin + text) > _WIDTH):
        return text
    lines = "".join(f"{margin}    {ast.unparse(alias)},\n" for alias in node.names)
    return f"{text.partition(' import ')[0]} import (\n{lines}{margin})"


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


def _removal(edit: Edit, source: bytes, path: str, name: str) -> Splice:
    tree = ast.parse(source)
    scope = dict(_scopes(tree))[path]
    node = next(node for node in _imports(scope) if name in map(_name, node.names))
    if len(node.names) == 1:
        return removed(edit, tree, [node], source)
    node.names = [alias for alias in node.names if _name(alias) != name]
    text = _text(node, " " * node.col_offset, on_lines=node.end_lineno != node.lineno)
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
