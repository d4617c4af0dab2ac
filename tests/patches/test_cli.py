"""The command line: what it prints, its exit status, and that an error leaves everything as it was."""

from collections.abc import Callable
from pathlib import Path

import pytest

from patches import __main__ as cli
from patches import layout
from patches.format import load_patches

HEADER = 'subject = "S"\nwhy = "W"\nupstream = "own"\ndrop = "never"\ntests = []\nadds = {}\nrequires = {}\n'
EDIT = '[[edit]]\nfile = "lightning/pytorch/boat.py"\nfind = "{}"\nreplace = "{}"\n'
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command with the made-up patches "row", "sail" (requires "row") and "wait" (which removes) on a tree."""
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "row.toml").write_text(HEADER.format([], []) + EDIT.format("row()", "row(2)"))
    sail = EDIT.format("sail()", "sail(2)") + EDIT.format("drift()", "")
    (folder / "sail.toml").write_text(HEADER.format([], ["row"]) + sail)
    wait = '[[edit]]\nfile = "lightning/pytorch/boat.py"\nimport = "from lightning.pytorch import sea"\n'
    (folder / "wait.toml").write_text(HEADER.format(["src/lightning/pytorch/raft.py"], []) + wait)
    (tmp_path / "src/lightning/pytorch").mkdir(parents=True)
    (tmp_path / "src/lightning/pytorch/raft.py").write_text("x = 1\n")
    monkeypatch.setattr(layout, "REPOSITORY", tmp_path)
    monkeypatch.setattr(cli, "load_patches", lambda: load_patches(folder))

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["patches", *map(str, arguments)])
        status = cli.main()
        return (status, *capsys.readouterr())

    return run


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree/lightning/fabric").mkdir(parents=True)
    (tmp_path / "tree/lightning/pytorch").mkdir()
    boat(tmp_path / "tree").write_text("from lightning import x\n\nrow()\nsail()\ndrift()\n")
    return tmp_path / "tree"


def boat(tree: Path) -> Path:
    return tree / "lightning/pytorch/boat.py"


class TestApply:
    def test_all_and_names_the_changed_files(self, run: Run, tree: Path) -> None:
        assert run("apply", tree) == (0, "lightning/pytorch/boat.py: row, sail, wait\n", "")
        expected = "from lightning import x\nfrom lightning.pytorch import sea\n\nrow(2)\nsail(2)\n"
        assert boat(tree).read_text() == expected
        assert (tree / "lightning/pytorch/raft.py").read_text() == "x = 1\n"

    def test_chosen_ones_with_those_that_they_require(self, run: Run, tree: Path) -> None:
        assert run("apply", tree, "sail") == (0, "lightning/pytorch/boat.py: row, sail\n", "")

    def test_one_alone(self, run: Run, tree: Path) -> None:
        assert run("apply", tree, "row") == (0, "lightning/pytorch/boat.py: row\n", "")

    def test_error_goes_to_stderr_and_leaves_the_tree(self, run: Run, tree: Path) -> None:
        boat(tree).write_text(boat(tree).read_text().replace("sail()", "paddle()"))
        before = boat(tree).read_text()
        status, out, err = run("apply", tree)
        assert (status, out) == (1, "")
        assert err.startswith("error: patch 'sail', file 'lightning/pytorch/boat.py', scope '<module>': ")
        assert boat(tree).read_text() == before
        assert not (tree / "lightning/pytorch/raft.py").exists()

    def test_unknown_patch(self, run: Run, tree: Path) -> None:
        status, _, err = run("apply", tree, "fly")
        assert status == 1
        assert "there is no patch 'fly' (asked for); there are: row, sail, wait" in err

    def test_other_folder(self, run: Run, tmp_path: Path) -> None:
        status, _, err = run("apply", tmp_path / "nowhere")
        assert status == 1
        assert "neither a checkout of Lightning nor an unpacked wheel" in err

    def test_tree_that_cannot_be_written(self, run: Run, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path, content: bytes) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "write_bytes", refuse)
        status, _, err = run("apply", tree)
        assert status == 1
        assert "Permission denied" in err
        assert "boat.py" in err or "raft.py" in err


class TestStatus:
    def test_all_apply(self, run: Run, tree: Path) -> None:
        assert run("status", tree) == (0, "row: applies\nsail: applies\nwait: applies\n", "")

    def test_all_landed_after_apply(self, run: Run, tree: Path) -> None:
        run("apply", tree)
        assert run("status", tree) == (1, "row: landed\nsail: landed\nwait: landed\n", "")

    def test_one_landed(self, run: Run, tree: Path) -> None:
        run("apply", tree, "row")
        assert run("status", tree) == (1, "row: landed\nsail: applies\nwait: applies\n", "")

    def test_chosen_ones_with_those_that_they_require(self, run: Run, tree: Path) -> None:
        assert run("status", tree, "sail") == (0, "row: applies\nsail: applies\n", "")

    def test_broken_with_the_reason_in_one_line(self, run: Run, tree: Path) -> None:
        boat(tree).write_text("row()\nrow()\nsail()\n")
        status, out, _ = run("status", tree)
        assert status == 1
        row, sail, wait = out.splitlines()
        assert row.startswith(
            "row: broken: patch 'row', file 'lightning/pytorch/boat.py', scope '<module>': 'row()' matches 2"
        )
        # An edit of it applies, so that the missing statement to remove is not gone because the patch landed.
        assert sail.startswith("sail: broken: patch 'sail', file ")
        assert "'drift()' matches no place" in sail
        assert wait.startswith("wait: broken: ")
        assert "imports nothing from 'lightning'" in wait

    def test_landed_in_part_is_broken(self, run: Run, tree: Path) -> None:
        boat(tree).write_text("sail(2)\ndrift()\n")
        _, out, _ = run("status", tree, "sail")
        assert "\nsail: broken: landed only in part: patch 'sail', file " in out

    def test_landed_beside_an_edit_that_fits_nowhere_is_broken(self, run: Run, tree: Path) -> None:
        boat(tree).write_text("sail(2)\ndrift()\ndrift()\n")
        _, out, _ = run("status", tree, "sail")
        sail = out.splitlines()[1]
        assert "'drift()' matches 2 places" in sail
        assert "landed only in part" in sail

    def test_missing_file_is_broken(self, run: Run, tree: Path) -> None:
        boat(tree).unlink()
        _, out, _ = run("status", tree, "row")
        assert "row: broken: " in out
        assert "the file does not exist" in out


class TestCount:
    def test_edits_files_and_what_is_quoted_with_the_statements_inside(self, run: Run, tmp_path: Path) -> None:
        many = EDIT.format("if x:\\n    a()\\nb()", "") + EDIT.format("c", "d").replace("boat", "raft")
        (tmp_path / "patches/drown.toml").write_text(HEADER.format([], []) + many)
        assert run("count") == (0, "edits: 6 in 2 files\nquoted: 3 statements, 4 expressions\n", "")

    def test_chosen_ones_with_those_that_they_require(self, run: Run) -> None:
        assert run("count", "sail") == (0, "edits: 3 in 1 files\nquoted: 0 statements, 3 expressions\n", "")


@pytest.mark.parametrize("arguments", [[], ["fly"], ["apply"], ["status"], ["export"]])
def test_wrong_usage_is_explained(run: Run, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    assert "usage: python -m patches" in capsys.readouterr().err
