"""Patches as commits: on a checkout made from the released wheel, and on small ones for what can go wrong."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from patches import export as export_module
from patches import layout as layout_module
from patches.engine import apply_patches, changes
from patches.export import export, message
from patches.format import REPOSITORY, Edit, Patch, PatchError, load_patches, select
from patches.layout import Layout

PATCHES = load_patches()
NAMES = [patch.name for patch in PATCHES]


@pytest.fixture(scope="module", autouse=True)
def git_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user of git with a name and nothing else, whoever runs the tests."""
    settings = tmp_path_factory.mktemp("user") / "gitconfig"
    settings.write_text("[user]\nname = Somebody\nemail = somebody@example.org\n[init]\ndefaultBranch = main\n")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("GIT_", "EMAIL"))]:
            patch.delenv(name)
        patch.setenv("GIT_CONFIG_GLOBAL", str(settings))
        patch.setenv("GIT_CONFIG_NOSYSTEM", "1")
        yield


def git(folder: Path, *arguments: str | Path) -> str:
    command = ["git", "-C", str(folder), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make_checkout(folder: Path) -> Path:
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Release")
    return folder


def read_tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def released(pristine: Callable[[str], Path], folder: Path) -> Path:
    """What a clone of Lightning at the release looks like, as far as it matters."""
    checkout = folder / "checkout"
    shutil.copytree(pristine("lightning") / "lightning", checkout / "src/lightning")
    for name in ("lightning_fabric", "pytorch_lightning"):
        (checkout / "src" / name).mkdir()
        (checkout / "src" / name / "__about__.py").write_text("")
    return make_checkout(checkout)


@pytest.fixture(scope="module")
def all_exported(released: Path, folder: Path) -> Path:
    export(released, PATCHES, "io-patches", folder / "out")
    return folder / "out"


class TestLightning:
    @pytest.fixture
    def exported(self, released: Path, all_exported: Path) -> Path:
        git(released, "switch", "--quiet", "io-patches")
        return released

    @pytest.fixture
    def checkout(self, released: Path) -> Path:
        git(released, "switch", "--quiet", "main")
        return released

    def test_one_commit_for_each_patch(self, exported: Path) -> None:
        assert git(exported, "status", "--porcelain") == ""
        commits = git(exported, "rev-list", "--reverse", "main..HEAD").split()
        assert [git(exported, "log", "-1", "--format=%B", commit) for commit in commits] == [
            message(patch).strip() for patch in PATCHES
        ]
        assert git(exported, "log", "-1", "--format=%an %ae %cn %ce") == " ".join(
            ["Somebody", "somebody@example.org"] * 2
        )

    def test_files_apply_with_git_am_and_give_the_same_tree(
        self, exported: Path, all_exported: Path, tmp_path: Path
    ) -> None:
        git(tmp_path, "clone", "--quiet", "--branch", "main", exported, "second")
        git(tmp_path / "second", "am", "--quiet", *sorted(all_exported.iterdir()))
        for ref in ("HEAD", "HEAD~1"):
            assert git(tmp_path / "second", "rev-parse", f"{ref}^{{tree}}") == git(
                exported, "rev-parse", f"{ref}^{{tree}}"
            )
        assert git(tmp_path / "second", "log", "-1", "--format=%B") == git(exported, "log", "-1", "--format=%B")

    def test_same_files_as_in_the_assembled_tree(
        self, exported: Path, pristine: Callable[[str], Path], tmp_path: Path
    ) -> None:
        shutil.copytree(pristine("lightning"), tmp_path / "assembled")
        apply_patches(tmp_path / "assembled", PATCHES)
        assert read_tree(exported / "src/lightning") == read_tree(tmp_path / "assembled/lightning")

    def test_nothing_but_the_tests_that_patches_add_beside_it(self, exported: Path) -> None:
        changed = git(exported, "diff", "--name-only", "main", "HEAD").splitlines()
        tests = {file for patch in PATCHES for file in patch.adds if file.startswith("tests/")}
        assert {file for file in changed if not file.startswith("src/lightning/")} == tests
        for file in tests:
            assert (exported / file).read_bytes() == (REPOSITORY / file).read_bytes()

    @pytest.mark.slow
    def test_an_exported_test_passes_in_the_exported_checkout_and_not_before(
        self, checkout: Path, tmp_path: Path
    ) -> None:
        test = "tests/pytorch/test_train_dataloader_setup.py"

        def run() -> subprocess.CompletedProcess[str]:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "no:cacheprovider",
                "-k",
                "Simple and lightning.pytorch",
                test,
            ]
            environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
            return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)

        export(checkout, select(PATCHES, ["profile-train-dataloader-setup"]), "tested")
        done = run()
        assert "1 passed" in done.stdout, done.stdout + done.stderr
        git(checkout, "restore", "--source", "main", "src")
        done = run()
        assert "1 failed" in done.stdout, done.stdout + done.stderr
        git(checkout, "reset", "--quiet", "--hard")

    @pytest.mark.slow  # that each applies alone, tests of the real patches show
    @pytest.mark.parametrize("name", NAMES)
    def test_each_patch_alone_with_what_it_requires(self, name: str, checkout: Path, tmp_path: Path) -> None:
        chosen = select(PATCHES, [name])
        expected = {
            path.relative_to(checkout).as_posix(): change.content
            for path, change in changes(Layout(checkout), chosen).items()
        }
        export(checkout, chosen, f"only-{name}", tmp_path / "out")
        assert git(checkout, "branch", "--show-current") == f"only-{name}"
        assert git(checkout, "rev-list", "--count", "main..HEAD") == str(len(chosen))
        changed = git(checkout, "diff", "--name-only", "main", "HEAD", "--", "src").splitlines()
        assert {file: (checkout / file).read_bytes() for file in changed} == expected
        git(tmp_path, "clone", "--quiet", "--branch", "main", checkout, "second")
        git(tmp_path / "second", "am", "--quiet", *sorted((tmp_path / "out").iterdir()))
        assert git(tmp_path / "second", "rev-parse", "HEAD^{tree}") == git(checkout, "rev-parse", "HEAD^{tree}")

    def test_command_line(self, checkout: Path, tmp_path: Path) -> None:
        arguments = ["export", "--branch", "command", "--out", tmp_path / "out", checkout, NAMES[0]]
        command = [sys.executable, "-m", "patches", *map(str, arguments)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert "on the new branch 'command'" in done.stdout
        assert len(list((tmp_path / "out").iterdir())) == len(select(PATCHES, [NAMES[0]]))
        again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert (again.returncode, again.stdout) == (1, "")
        assert again.stderr.startswith("error: ")


def make_patch(
    name: str = "row", *, adds: list[str] | None = None, tests: list[str] | None = None, **spec: str
) -> Patch:
    edits = [Edit(name, {"file": "lightning/pytorch/boat.py", **spec})] if spec else []
    return Patch(name, f"Let it {name}", "\nBecause.\n", "own", tests or [], "never", adds or [], [], edits)


ROW = make_patch(find="row()", replace="row(2)")
SAIL = make_patch("sail", find="sail()", replace="sail(2)")


class TestSmallCheckout:
    @pytest.fixture
    def repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "repository"
        for file in ("src/lightning/pytorch/raft.py", "tests/test_raft.py", "tests/helpers.py"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("x = 1\n")
        monkeypatch.setattr(layout_module, "REPOSITORY", folder)
        monkeypatch.setattr(export_module, "REPOSITORY", folder)
        return folder

    @pytest.fixture
    def checkout(self, tmp_path: Path, repository: Path) -> Path:
        folder = tmp_path / "checkout"
        (folder / "src/lightning/fabric").mkdir(parents=True)
        (folder / "src/lightning/pytorch").mkdir()
        (folder / "src/lightning/fabric/__init__.py").write_text("")
        (folder / "src/lightning/pytorch/boat.py").write_text("row()\nsail()\n")
        (folder / ".gitignore").write_text("raft.py\nbuild/\n")
        return make_checkout(folder)

    def assert_unchanged(self, checkout: Path) -> None:
        assert git(checkout, "branch", "--format=%(refname:short)") == "main"
        assert git(checkout, "branch", "--show-current") == "main"
        assert git(checkout, "log", "--format=%s") == "Release"
        assert len(git(checkout, "worktree", "list").splitlines()) == 1

    def assert_refused(self, checkout: Path, *patches: Patch, branch: str = "new", out: Path | None = None) -> str:
        with pytest.raises(PatchError) as caught:
            export(checkout, patches or [ROW], branch, out)
        return str(caught.value)

    def test_each_commit_holds_the_patches_up_to_it(self, checkout: Path) -> None:
        export(checkout, [ROW, SAIL], "new")
        file = "src/lightning/pytorch/boat.py"
        assert git(checkout, "show", f"HEAD~1:{file}") == "row(2)\nsail()"
        assert git(checkout, "show", f"HEAD:{file}") == (checkout / file).read_text().strip() == "row(2)\nsail(2)"
        assert git(checkout, "log", "--format=%s") == "Let it sail\nLet it row\nRelease"

    def test_message(self) -> None:
        patch = make_patch(tests=["tests/a.py", "tests/b.py"])
        assert message(patch) == "Let it row\n\nBecause.\n\nUpstream: own\nDrop: never\nTests: tests/a.py, tests/b.py\n"
        assert message(make_patch()).endswith("Drop: never\n")

    def test_lines_of_the_message_that_look_like_comments_are_kept(self, checkout: Path) -> None:
        git(checkout, "config", "commit.cleanup", "strip")
        export(checkout, [replace(ROW, why="# One.\nTwo.")], "new")
        assert "# One.\nTwo." in git(checkout, "log", "-1", "--format=%B")

    def test_modules_and_tests_come_along_even_if_ignored(self, checkout: Path) -> None:
        adds = ["src/lightning/pytorch/raft.py", "tests/helpers.py"]
        export(checkout, [make_patch(adds=adds, tests=["tests/test_raft.py"])], "new")
        assert git(checkout, "diff", "--name-only", "main", "HEAD").splitlines() == adds

    def test_test_that_two_patches_add(self, checkout: Path) -> None:
        row = make_patch(find="row()", replace="row(2)", adds=["tests/test_raft.py"])
        sail = make_patch("sail", find="sail()", replace="sail(2)", adds=["tests/test_raft.py"])
        export(checkout, [row, sail], "new")
        assert git(checkout, "log", "--format=%s", "--", "tests") == "Let it row"

    def test_hooks_of_the_checkout_do_not_run(self, checkout: Path) -> None:
        for name in ("pre-commit", "commit-msg", "post-checkout"):
            hook = checkout / ".git/hooks" / name
            hook.parent.mkdir(exist_ok=True)
            hook.write_text("#!/bin/sh\nexit 1\n")
            hook.chmod(0o755)
        export(checkout, [ROW], "new")
        assert git(checkout, "log", "-1", "--format=%s") == "Let it row"

    def test_inside_a_hook_of_another_repository(
        self, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "other").mkdir()
        git(tmp_path / "other", "init", "--quiet")
        with monkeypatch.context() as inside:
            inside.setenv("GIT_DIR", str(tmp_path / "other/.git"))
            inside.setenv("GIT_INDEX_FILE", str(tmp_path / "other/.git/index"))
            export(checkout, [ROW], "new")
        assert git(checkout, "log", "-1", "--format=%s") == "Let it row"

    def test_file_names_of_the_written_patches(self, checkout: Path, tmp_path: Path) -> None:
        export(checkout, [ROW, SAIL], "new", tmp_path / "out")
        assert sorted(read_tree(tmp_path / "out")) == ["0001-Let-it-row.patch", "0002-Let-it-sail.patch"]

    def test_patch_that_does_not_fit(self, checkout: Path) -> None:
        broken = make_patch("sink", find="sink()", replace="swim()")
        assert "patch 'sink', file" in self.assert_refused(checkout, ROW, broken)
        self.assert_unchanged(checkout)

    def test_overlapping_patches(self, checkout: Path) -> None:
        assert "overlaps" in self.assert_refused(checkout, ROW, make_patch("sail", find="row()", replace="sail()"))
        self.assert_unchanged(checkout)

    def test_test_that_does_not_exist(self, checkout: Path) -> None:
        patch = make_patch(find="row()", replace="row(2)", adds=["tests/test_sea.py"])
        assert "adds 'tests/test_sea.py', which does not exist" in self.assert_refused(checkout, patch)
        self.assert_unchanged(checkout)

    def test_failure_after_the_first_commit(self, checkout: Path, tmp_path: Path) -> None:
        empty = make_patch("nothing", adds=["tests/helpers.py"])
        again = make_patch("again", adds=["tests/helpers.py"])
        assert "git commit" in self.assert_refused(checkout, ROW, empty, again, out=tmp_path / "out")
        self.assert_unchanged(checkout)
        assert not (tmp_path / "out").exists()
        export(checkout, [ROW], "new")

    def test_checkout_without_a_branch_stays_at_its_commit_on_failure(self, checkout: Path) -> None:
        git(checkout, "switch", "--quiet", "--detach")
        self.assert_refused(checkout, make_patch("sink", find="sink()", replace="swim()"))
        assert git(checkout, "branch", "--show-current") == ""
        export(checkout, [ROW], "new")
        assert git(checkout, "branch", "--show-current") == "new"

    @pytest.mark.parametrize("file", ["src/lightning/pytorch/boat.py", "notes.txt"])
    def test_dirty_tree(self, checkout: Path, file: str) -> None:
        (checkout / file).write_text("mine\n")
        assert "has uncommitted changes: commit, stash or remove them" in self.assert_refused(checkout)
        assert (checkout / file).read_text() == "mine\n"
        self.assert_unchanged(checkout)

    def test_existing_branch(self, checkout: Path) -> None:
        assert "choose another name with --branch, or delete it" in self.assert_refused(checkout, branch="main")
        self.assert_unchanged(checkout)

    def test_impossible_branch(self, checkout: Path) -> None:
        assert "'a..b' is no name for a branch" in self.assert_refused(checkout, branch="a..b")

    def test_no_git_repository(self, tmp_path: Path) -> None:
        for folder in (tmp_path, tmp_path / "nowhere"):
            assert "is no git repository: clone Lightning there" in self.assert_refused(folder)

    def test_folder_inside_a_repository(self, checkout: Path) -> None:
        assert "name a clone's top folder" in self.assert_refused(checkout / "src")
        self.assert_unchanged(checkout)

    def test_other_repository(self, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        git(tmp_path / "other", "init", "--quiet")
        assert "no checkout of Lightning: it has no src/lightning/fabric" in self.assert_refused(tmp_path / "other")

    def test_git_that_does_not_know_its_user(self, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        assert "git config --global user.name" in self.assert_refused(checkout)
        self.assert_unchanged(checkout)

    def test_folder_for_the_files_that_is_not_empty(self, checkout: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        export(checkout, [ROW], "first", tmp_path / "out")
        git(checkout, "switch", "--quiet", "main")
        assert "is not an empty folder" in self.assert_refused(checkout, out=tmp_path / "out")
        assert "is not an empty folder" in self.assert_refused(checkout, out=tmp_path / "out/0001-Let-it-row.patch")
