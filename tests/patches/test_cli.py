"""The command line: what it prints, its exit status, and that an error leaves everything as it was."""

import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from build_backend import upstream
from patches import __main__ as cli
from patches import layout
from patches.format import load_patches

HEADER = 'subject = "S"\nwhy = "W"\nupstream = "own"\ndrop = "never"\ntests = []\nadds = {}\nrequires = {}\n'
EDIT = '[[edit]]\nfile = "lightning/pytorch/boat.py"\nfind = "{}"\nreplace = "{}"\n'
RELEASED = ("lightning", "pytorch_lightning")
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


class TestCheck:
    """Releases come from a folder here, through pip as ever."""

    @pytest.fixture
    def pins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for name, fabric, pytorch, source in (
            ("lightning", "lightning/fabric", "lightning/pytorch", "row()\nsail()\ndrift()\n"),
            ("pytorch_lightning", "lightning_fabric", "pytorch_lightning", "row()\nsail()\n"),
        ):
            information = f"{name}-3.1.dist-info"
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n"
            with zipfile.ZipFile(tmp_path / f"{name}-3.1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{fabric}/__init__.py", "")
                wheel.writestr(f"{pytorch}/boat.py", source)
                wheel.writestr(f"{information}/METADATA", metadata)
                wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                wheel.writestr(f"{information}/RECORD", "")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        pins = tmp_path / "upstream.txt"
        pins.write_text("# why\nlightning==1.0 \\\n    --hash=sha256:0\n")
        monkeypatch.setattr(upstream, "PINS", pins)
        return pins

    def test_both_distributions_and_pins_nothing_unasked(self, run: Run, pins: Path) -> None:
        before = pins.read_text()
        status, out, _ = run("check", "3.1", "row")
        name, *lines = out.splitlines()
        assert status == 0
        assert name.startswith("lightning 3.1, sha256 ")
        assert [line for line in lines if "sha256" not in line] == ["row: applies", "row: applies"]
        assert pins.read_text() == before

    def test_pins_what_it_has_seen_though_a_patch_is_broken(self, run: Run, pins: Path, tmp_path: Path) -> None:
        status, out, _ = run("check", "--pin", "3.1", "sail")
        hashes = [sha256((tmp_path / f"{name}-3.1-py3-none-any.whl").read_bytes()) for name in RELEASED]
        assert status == 1
        assert "sail: broken: " in out
        assert pins.read_text() == "# why\n" + "".join(
            f"{name.replace('_', '-')}==3.1 \\\n    --hash=sha256:{content.hexdigest()}\n"
            for name, content in zip(RELEASED, hashes, strict=True)
        )

    def test_unknown_and_malicious_versions_are_refused(self, run: Run, pins: Path) -> None:
        before = pins.read_text()
        status, _, err = run("check", "4", "--pin")
        assert status == 1
        assert err.startswith("error: pip could not download lightning 4")
        assert run("check", "2.6.3", "--pin")[::2] == (
            1,
            "error: lightning 2.6.3 was malicious: check another version\n",
        )
        assert pins.read_text() == before


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
