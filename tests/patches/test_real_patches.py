"""The patches of this repository, on the release that they are made for."""

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from patches.engine import apply_patches, changes
from patches.format import REPOSITORY, load_patches, select
from patches.layout import Layout
from patches.status import judge

Pristine = Callable[[str], Path]
PATCHES = load_patches()
each_patch = pytest.mark.parametrize("name", [patch.name for patch in PATCHES])
both = pytest.mark.parametrize("distribution", ["lightning", "pytorch"])


@both
def test_all_together(distribution: str, pristine: Pristine) -> None:
    for path, change in changes(Layout(pristine(distribution)), PATCHES).items():
        compile(change.content, path, "exec")


def test_order_makes_no_difference(pristine: Pristine) -> None:
    layout = Layout(pristine("lightning"))
    forward, backward = changes(layout, PATCHES), changes(layout, PATCHES[::-1])
    assert {path: change.content for path, change in forward.items()} == {
        path: change.content for path, change in backward.items()
    }


@pytest.mark.parametrize("distribution", ["lightning", pytest.param("pytorch", marks=pytest.mark.slow)])
@each_patch
def test_each_alone_with_what_it_requires(distribution: str, name: str, pristine: Pristine) -> None:
    for path, change in changes(Layout(pristine(distribution)), select(PATCHES, [name])).items():
        compile(change.content, path, "exec")


@both
def test_nothing_imports_a_name_that_a_patched_module_lost(
    distribution: str, pristine: Pristine, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(pristine(distribution), tree)
    touched = apply_patches(tree, PATCHES)
    modules = {".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__") for path in touched}
    for path in tree.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                for alias in node.names:
                    assert has_name(tree, node.module, alias.name), f"{path} imports {alias.name} from {node.module}"


def has_name(tree: Path, module: str, name: str) -> bool:
    folder = tree.joinpath(*module.split("."))
    if (folder / f"{name}.py").exists() or (folder / name).is_dir():
        return True
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
    return False


@both
def test_status_of_pristine_lightning(distribution: str, pristine: Pristine) -> None:
    assert {judge(Layout(pristine(distribution)), patch) for patch in PATCHES} == {("applies", "")}


@pytest.mark.slow
@each_patch
def test_status_once_a_patch_has_landed(name: str, pristine: Pristine, tmp_path: Path) -> None:
    shutil.copytree(pristine("lightning"), tmp_path, dirs_exist_ok=True)
    landed = select(PATCHES, [name])
    apply_patches(tmp_path, landed)
    assert {judge(Layout(tmp_path), patch) for patch in landed} == {("landed", "")}


def test_status_of_the_others_once_a_patch_has_landed(pristine: Pristine, tmp_path: Path) -> None:
    shutil.copytree(pristine("lightning"), tmp_path, dirs_exist_ok=True)
    landed, *others = select(PATCHES, ["profile-train-dataloader-setup", *(patch.name for patch in PATCHES)])
    apply_patches(tmp_path, [landed])
    assert judge(Layout(tmp_path), landed).state == "landed"
    assert {judge(Layout(tmp_path), patch) for patch in others} == {("applies", "")}


def test_each_module_of_ours_belongs_to_exactly_one_patch() -> None:
    modules = [path for path in (REPOSITORY / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    added = [name for patch in PATCHES for name in patch.adds if name.startswith("src/")]
    assert sorted(added) == sorted(path.relative_to(REPOSITORY).as_posix() for path in modules)


@each_patch
def test_what_a_patch_names_exists(name: str) -> None:
    (patch,) = (patch for patch in PATCHES if patch.name == name)
    assert patch.tests
    assert [file for file in [*patch.tests, *patch.adds] if not (REPOSITORY / file).is_file()] == []


@each_patch
def test_modules_of_ours_that_a_patch_needs_come_with_it(name: str) -> None:
    """By the imports in its edits and in the modules it adds."""
    chosen = select(PATCHES, [name])
    ours = {module_name(file): file for patch in PATCHES for file in patch.adds if file.startswith("src/")}
    texts = [text for patch in chosen for edit in patch.edits for key, text in edit.spec.items() if key == "import"]
    texts += [(REPOSITORY / file).read_text("utf-8") for patch in chosen for file in patch.adds if file.endswith(".py")]
    needed = {
        candidate
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.module
        for candidate in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }
    missing = {ours[module] for module in needed & ours.keys()} - {file for patch in chosen for file in patch.adds}
    assert missing == set()


def module_name(file: str) -> str:
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
