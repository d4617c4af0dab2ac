"""Turns patches into commits on a git checkout of Lightning, and into files for ``git am``."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from patches.engine import changes, edit_file
from patches.format import REPOSITORY, Edit, Patch, PatchError
from patches.layout import Layout

# git sets these for hooks, and they would make it look at another repository than the one it is told.
_DIVERTING = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}


def export(checkout: Path, patches: Sequence[Patch], branch: str, out: Path | None = None) -> None:
    """Creates ``branch`` in ``checkout`` and switches to it, with one commit per patch on top of the present one.

    The commits are made in a temporary work tree and the branch comes last, so that whatever fails leaves the checkout
    as it was.

    Args:
        checkout: A clean git checkout of Lightning.
        patches: The patches, each after those that it requires.
        branch: The name of the new branch.
        out: A new or empty folder that gets one file per commit for ``git am``.

    """
    _check(checkout, branch, out)
    with _temporary_work_tree(checkout) as tree:
        for patch, files in _commits(tree, patches):
            for path, content in files.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            _git(tree, "add", "--all", "--force")  # also what Lightning's .gitignore would leave out
            _git(tree, "commit", "--quiet", "--cleanup=whitespace", "--file=-", text=message(patch))
        tip = _git(tree, "rev-parse", "HEAD")
        if out is not None:
            folder = f"--output-directory={out.resolve()}"
            _git(tree, "format-patch", "--quiet", "--no-cover-letter", folder, f"-{len(patches)}")
    _git(checkout, "switch", "--quiet", "--create", branch, tip)


def message(patch: Patch) -> str:
    """The commit message of ``patch``."""
    facts = {"Upstream": patch.upstream, "Drop": patch.drop, "Tests": ", ".join(patch.tests)}
    lines = "\n".join(f"{name}: {' '.join(text.split())}" for name, text in facts.items() if text)
    return f"{patch.subject}\n\n{patch.why.strip()}\n\n{lines}\n"


def _commits(tree: Path, patches: Sequence[Patch]) -> list[tuple[Patch, dict[Path, bytes]]]:
    """Each patch with the files of its commit. All edits are matched against ``tree``, so it must still be pristine."""
    layout = Layout(tree)
    changes(layout, patches)  # finds what does not fit together
    commits = []
    edits: dict[Path, list[Edit]] = {}
    for patch in patches:
        files = layout.added(patch) | _tests(tree, patch)
        for edit in patch.edits:
            edits.setdefault(layout.path(edit.spec["file"]), []).append(edit)
        for path in {layout.path(edit.spec["file"]) for edit in patch.edits}:
            files[path] = edit_file(path, edits[path], layout)
        commits.append((patch, files))
    return commits


def _tests(tree: Path, patch: Patch) -> dict[Path, bytes]:
    names = [name for name in patch.adds if name.startswith("tests/")]
    for name in names:
        if not (REPOSITORY / name).is_file():
            raise PatchError(f"patch {patch.name!r} adds {name!r}, which does not exist")
    return {tree / name: (REPOSITORY / name).read_text("utf-8").encode() for name in names}


def _check(checkout: Path, branch: str, out: Path | None) -> None:
    if not checkout.is_dir() or not _succeeds(checkout, "rev-parse", "--git-dir"):
        raise PatchError(f"{checkout} is no git repository: clone Lightning there, or name the folder of a clone")
    top = Path(_git(checkout, "rev-parse", "--show-toplevel"))
    if not top.samefile(checkout):
        raise PatchError(f"{checkout} is a folder inside the git repository {top}: name a clone's top folder")
    if not (checkout / "src/lightning/fabric").is_dir():
        raise PatchError(f"{checkout} is no checkout of Lightning: it has no src/lightning/fabric")
    if _git(checkout, "status", "--porcelain"):
        raise PatchError(f"{checkout} has uncommitted changes: commit, stash or remove them (see git status)")
    if not _succeeds(checkout, "check-ref-format", "--branch", branch):
        raise PatchError(f"{branch!r} is no name for a branch: choose another one with --branch")
    if _succeeds(checkout, "show-ref", "--verify", "--quiet", f"refs/heads/{branch}"):
        raise PatchError(
            f"{checkout} has a branch {branch!r} already: choose another name with --branch, or delete it with"
            f" git branch -D {branch}"
        )
    for who in ("GIT_AUTHOR_IDENT", "GIT_COMMITTER_IDENT"):
        if not _succeeds(checkout, "-c", "user.useConfigOnly=true", "var", who):
            raise PatchError(
                "git does not know who makes the commits: set it with git config --global user.name NAME and"
                " git config --global user.email ADDRESS"
            )
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PatchError(f"{out} is not an empty folder: files of an earlier export would mix with the new ones")


@contextmanager
def _temporary_work_tree(checkout: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _git(checkout, "worktree", "add", "--quiet", "--detach", str(tree), "HEAD")
        try:
            yield tree
        finally:
            _git(checkout, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *arguments: str, text: str | None = None) -> str:
    result = _run(folder, arguments, text)
    if result.returncode:
        detail = (result.stdout + result.stderr).strip()
        raise PatchError(f"git {' '.join(arguments)} failed in {folder}: {detail}")
    return result.stdout.strip()


def _succeeds(folder: Path, *arguments: str) -> bool:
    return _run(folder, arguments).returncode == 0


def _run(folder: Path, arguments: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    # Hooks are for what a person commits: they could change the files, or refuse them.
    command = ["git", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder), *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in _DIVERTING}
    return subprocess.run(command, env=environment, input=text, capture_output=True, encoding="utf-8", check=False)
