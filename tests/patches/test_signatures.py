"""Every call that works with the release goes on working: the public interface of each file that the patches touch.

It is compared by the syntax trees. Nothing may differ but for added optional keyword parameters, annotations aside.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from patches.engine import apply_patches
from patches.format import load_patches


class Parameter(NamedTuple):
    kind: str
    name: str
    default: str | None


class Function(NamedTuple):
    """What a caller relies on: ``kind`` tells whether to await it, and ``decorators`` whether to call it at all."""

    kind: str
    decorators: list[str]
    parameters: list[Parameter]


class Class(NamedTuple):
    decorators: list[str]
    bases: list[str]


Interface = dict[str, Function | Class | str]


def interface(source: str | bytes) -> Interface:
    """The public names of a module and of its classes; one that is defined again has a number, such as a setter."""
    found: Interface = {}
    for name, value in _members(ast.parse(source), ""):
        repetitions = sum(known.partition("#")[0] == name for known in found)
        found[f"{name}#{repetitions + 1}" if repetitions else name] = value
    return found


def _members(scope: ast.AST, prefix: str) -> Iterator[tuple[str, Function | Class | str]]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if _is_public(node.name):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                yield prefix + node.name, Function(type(node).__name__, decorators, _parameters(node.args))
        elif isinstance(node, ast.ClassDef):
            # Private ones count too: loops and the like are reached through attributes, and are subclassed.
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            yield prefix + node.name, Class(decorators, [ast.unparse(base) for base in node.bases])
            yield from _members(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in chain.from_iterable(ast.walk(target) for target in targets):
                if isinstance(name, ast.Name) and _is_public(name.id):
                    yield prefix + name.id, "variable"
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            pass  # nobody who imports the module has what is made there
        elif isinstance(node, (ast.stmt, ast.excepthandler)):
            yield from _members(node, prefix)


def _is_public(name: str) -> bool:
    return not name.startswith("_") or (name.startswith("__") and name.endswith("__"))


def _parameters(arguments: ast.arguments) -> list[Parameter]:
    def text(default: ast.expr | None) -> str | None:
        return None if default is None else ast.unparse(default)

    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    kinds = ["positional only"] * len(arguments.posonlyargs) + ["positional"] * len(arguments.args)
    result = [
        Parameter(kind, one.arg, text(value)) for kind, one, value in zip(kinds, positional, defaults, strict=True)
    ]
    result += [Parameter("*", arguments.vararg.arg, None)] if arguments.vararg else []
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    result += [Parameter("keyword", one.arg, text(value)) for one, value in keywords]
    return result + ([Parameter("**", arguments.kwarg.arg, None)] if arguments.kwarg else [])


def differences(old: Interface, new: Interface) -> list[str]:
    """What makes ``new`` another interface than ``old``."""
    found = [f"{name}: removed" for name in old.keys() - new.keys()]
    found += [f"{name}: added" for name in new.keys() - old.keys()]
    for name in old.keys() & new.keys():
        before, after = old[name], new[name]
        if isinstance(before, Function) and isinstance(after, Function):
            if before[:2] != after[:2] or not _accepts_the_same(before.parameters, after.parameters):
                found.append(f"{name}: {before} became {after}")
        elif before != after:
            found.append(f"{name}: {before} became {after}")
    return sorted(found)


def _accepts_the_same(before: list[Parameter], after: list[Parameter]) -> bool:
    def ordered(parameters: list[Parameter]) -> list[Parameter]:
        return [parameter for parameter in parameters if parameter.kind != "keyword"]

    added = [one for one in after if one not in before and one.kind in ("positional", "keyword") and one.default]
    names = {one.name for one in before}
    kept = [one for one in after if one not in added]
    if any(one.name in names for one in added) or ordered(kept) != ordered(before) or sorted(kept) != sorted(before):
        return False
    # A new one that can be given by position must come after all others, and not before what *args collects.
    positions = [one for one in after if one.kind in ("positional only", "positional", "*")]
    first = next((number for number, one in enumerate(positions) if one in added), len(positions))
    return all(one in added for one in positions[first:])


SOURCE = """
import os
try:
    LIMIT = 3
except ImportError:
    LIMIT = 4
_private = 1

def row(boat, speed=1, /, place="a", *, far=False, wet): ...
def _hidden(): ...
async def sail(*boats, **more): ...

class Boat(Base):
    size: int = 1
    @property
    def mast(self): ...
    @mast.setter
    def mast(self, value): ...
    def __init__(self, name): ...
    def _hidden(self): ...

class _Loop:
    def run(self, steps=None): ...
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("far=False, wet", "far=False, wet, new=None"),
        ("far=False, wet", "new=None, wet, far=False"),
        ('place="a", *', 'place="a", new=None, *'),
        ("**more", "new=None, **more"),
        ("self, name", "self, name, new=()"),
        ("self, steps=None", "self, steps: int | None = None, *, new=1"),
        ("def _hidden()", "def _other(x)"),
        ("def _hidden(self): ...", ""),
        ("_private = 1", "_other = 2"),
        ("import os", "import sys"),
        ("boat, speed=1, /", "boat: Boat, speed: int = 1, /"),
    ],
)
def test_allowed(old: str, new: str) -> None:
    assert old in SOURCE
    assert differences(interface(SOURCE), interface(SOURCE.replace(old, new))) == []


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("def row(", "def _row(", "row"),
        ("async def sail(*boats, **more): ...", "", "sail"),
        ("async def sail", "def sail", "sail"),
        ("    LIMIT = 3\nexcept ImportError:\n    LIMIT = 4", "    pass\nfinally:\n    pass", "LIMIT"),
        ("_private = 1", "public = 1", "public"),
        ("def _hidden()", "def shown()", "shown"),
        ("class Boat(Base)", "class Ship(Base)", "Boat"),
        ("class Boat(Base)", "class Boat", "Boat"),
        ("class _Loop:", "class _Ring:", "_Loop"),
        ("@property\n", "\n", "Boat.mast"),
        ("    @mast.setter\n    def mast(self, value): ...\n", "", "Boat.mast#2"),
        ("size: int = 1", "length: int = 1", "Boat.size"),
        ("self, name", "self, title", "Boat.__init__"),
        ("self, name", "self, name, new", "Boat.__init__"),
        ("self, name", "self, name='x'", "Boat.__init__"),
        ("self, name", "self, new=None, name=None", "Boat.__init__"),
        ("self, name", "self", "Boat.__init__"),
        ("steps=None", "steps", "_Loop.run"),
        ("steps=None", "steps=1", "_Loop.run"),
        ("steps=None", "new=None, steps=None", "_Loop.run"),
        ("self, steps=None", "self, *, steps=None", "_Loop.run"),
        ("self, steps=None", "self, steps=None, *more", "_Loop.run"),
        ("boat, speed=1, /", "boat, speed=1", "row"),
        ("boat, speed=1, /", "speed, boat=1, /", "row"),
        ("wet", "wet, new", "row"),
        ("wet", "wet=None", "row"),
        ("*boats", "new=None, *boats", "sail"),
        (", **more", "", "sail"),
    ],
)
def test_noticed(old: str, new: str, name: str) -> None:
    assert old in SOURCE
    found = differences(interface(SOURCE), interface(SOURCE.replace(old, new)))
    assert name in [text.partition(":")[0] for text in found]


@pytest.mark.parametrize("distribution", ["lightning", "pytorch"])
def test_patched_modules(distribution: str, pristine: Callable[[str], Path], tmp_path: Path) -> None:
    before = pristine(distribution)
    shutil.copytree(before, tmp_path, dirs_exist_ok=True)
    touched = apply_patches(tmp_path, load_patches())
    assert touched
    found = {}
    for path in touched:
        file = path.relative_to(tmp_path)
        if changed := differences(interface((before / file).read_bytes()), interface(path.read_bytes())):
            found[file.as_posix()] = changed
    # written anew on Fabric's, from which it has the rest
    package = "pytorch_lightning" if distribution == "pytorch" else "lightning/pytorch"
    plugin = {text.partition(":")[0] for text in found.pop(f"{package}/plugins/io/async_plugin.py")}
    inherited, added = {"__init__", "save_checkpoint", "teardown"}, {"checkpoint_io", "checkpoint_io#2"}
    assert plugin == {"AsyncCheckpointIO", *(f"AsyncCheckpointIO.{name}" for name in inherited | added)}
    assert found == {}


#: Prints what the command line takes for each class of these modules, which jsonargparse reads from their sources too.
ARGUMENTS = """
import inspect, json, warnings
warnings.simplefilter("ignore")
from jsonargparse._parameter_resolvers import get_signature_parameters
from lightning.pytorch import Trainer, callbacks, loggers, profilers, strategies
from lightning.pytorch.plugins import io

classes = {"Trainer": Trainer}
for module in (callbacks, loggers, profilers, strategies, io):
    classes |= {name: value for name, value in vars(module).items() if inspect.isclass(value) and name[0] != "_"}
print(json.dumps({
    name: [parameter.name for parameter in get_signature_parameters(value, None)] for name, value in classes.items()
}))
"""


@pytest.mark.slow
def test_the_command_line_takes_all_arguments_of_all_classes_as_before(pristine: Callable[[str], Path]) -> None:
    before, after = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", ARGUMENTS],
                env={**os.environ, **path},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.splitlines()[-1]
        )
        for path in ({"PYTHONPATH": str(pristine("lightning"))}, {})
    )
    missing = {name: set(arguments) - set(after[name]) for name, arguments in before.items()}
    assert {name: gone for name, gone in missing.items() if gone} == {}
    assert "flush_secs" in after["TensorBoardLogger"]
