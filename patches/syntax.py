"""Questions about Python source that are answered by its syntax tree, and never by the text."""

import ast
import copy
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def statements(text: str) -> list[ast.stmt]:
    """Parses statements that may be indented as a whole."""
    return ast.parse(textwrap.dedent(text)).body


def definitions(scope: ast.AST, name: str) -> list[Definition]:
    """The classes and functions called ``name`` directly in ``scope``; a property's setter is ``name.setter``."""
    return [node for node in own_statements(scope) if isinstance(node, Definition) and _name(node) == name]


def _name(node: Definition) -> str:
    setter = f"{node.name}.setter"
    return setter if setter in map(ast.unparse, node.decorator_list) else node.name


def own_statements(scope: ast.AST) -> Iterator[ast.AST]:
    """The statements of ``scope``, also those inside ``if`` and the like, but not those inside further definitions."""
    for child in ast.iter_child_nodes(scope):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield child
            if not isinstance(child, Definition):
                yield from own_statements(child)


def same(left: Any, right: Any) -> bool:
    """Whether two nodes, or lists of nodes, mean the same; positions and formatting make no difference."""
    if type(left) is not type(right):
        return False
    if isinstance(left, ast.AST):
        left = [getattr(left, name, None) for name in left._fields]
        right = [getattr(right, name, None) for name in right._fields]
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def fits(node: Any, pattern: Any) -> bool:
    """Whether a node, or list of nodes, means the same as ``pattern``, in which ``...`` leaves something open.

    It stands for any expression; at the end of a call's arguments for any that may follow; and for a whole block.
    """
    if _is_open(pattern):
        return isinstance(node, ast.expr)
    if type(node) is not type(pattern):
        return False
    if isinstance(pattern, ast.Call) and pattern.args and _is_open(pattern.args[-1]) and not pattern.keywords:
        given = pattern.args[:-1]
        return fits(node.func, pattern.func) and fits(node.args[: len(given)], given)
    if isinstance(pattern, ast.AST):
        return all(fits(getattr(node, name, None), getattr(pattern, name, None)) for name in pattern._fields)
    if isinstance(pattern, list):
        if len(pattern) == 1 and isinstance(pattern[0], ast.Expr) and _is_open(pattern[0].value):
            return bool(node) and isinstance(node[0], ast.stmt)
        return len(node) == len(pattern) and all(map(fits, node, pattern))
    return bool(node == pattern)


def _is_open(pattern: Any) -> bool:
    return isinstance(pattern, ast.Constant) and pattern.value is ...


def matches(scope: ast.AST, wanted: Sequence[Any]) -> list[list[Any]]:
    """The runs of statements in ``scope`` that fit ``wanted`` and, if it is one expression, the expressions that do.

    What stands inside an f-string is not looked at: Python 3.10 and 3.11 do not know its position.
    """
    found: list[list[Any]] = []
    sought = wanted[0].value if len(wanted) == 1 and isinstance(wanted[0], ast.Expr) else None

    def visit(node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            if wanted and children and isinstance(children[0], ast.stmt):
                runs = (children[i : i + len(wanted)] for i in range(len(children) - len(wanted) + 1))
                found.extend(run for run in runs if fits(run, list(wanted)))
            for child in children:
                if not isinstance(child, ast.AST):
                    continue
                if sought is not None and not isinstance(node, ast.Expr) and fits(child, sought):
                    found.append([child])  # below an ast.Expr it is the statement that has matched
                if not isinstance(child, ast.JoinedStr):
                    visit(child)

    visit(scope)
    return found


def whole(scope: ast.AST, nodes: list[Any]) -> list[Any]:
    """``nodes`` if they are statements, and the innermost statement around an expression."""
    if isinstance(nodes[0], ast.stmt):
        return nodes
    around = (node for node in ast.walk(scope) if isinstance(node, ast.stmt))  # from the outermost to the innermost
    return [node for node in around if any(part is nodes[0] for part in ast.walk(node))][-1:]


def undotted(node: ast.AST) -> Any:
    """A copy in which every called ``a.b.c`` is just ``c``: the same method may be reached on another way."""
    node = copy.deepcopy(node)
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            call.func = ast.Name(call.func.attr, ast.Load())
    return node


def substitute(tree: ast.AST, old: Sequence[Any], new: Any) -> None:
    """Puts ``new``, a list of statements or one expression, in the place of the nodes ``old`` of ``tree``."""

    class Substitution(ast.NodeTransformer):
        def visit(self, node: Any) -> Any:
            if node is old[0]:
                return new
            if any(node is other for other in old[1:]):
                return None
            if isinstance(node, ast.stmt) and not first_line(node) <= old[0].lineno <= (node.end_lineno or 0):
                return node  # only to save time
            return self.generic_visit(node)

    Substitution().visit(tree)


def first_line(node: Any) -> int:
    """The line on which a statement or expression starts; a definition starts with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return int(min([node.lineno, *(decorator.lineno for decorator in decorators)]))
