"""Every way to build gives the same distributions, and every wrong way says what to do."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.packaging.tools import ROOT, Run, build, contents

both = pytest.mark.parametrize("name", ["lightning", "pytorch"])


def interpreters() -> list[str]:
    """The Pythons of this machine that we support: those on the path, and those that pyenv keeps off it."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for version in ("3.10", "3.11", "3.12", "3.13"):
        installed = sorted(pyenv.glob(f"{version}.*/bin/python{version}"))
        for candidate in filter(None, [shutil.which(f"python{version}"), *map(str, installed)]):
            # A shim of pyenv exists for versions that are switched off, too, and fails.
            if subprocess.run([candidate, "-m", "venv", "-h"], capture_output=True, check=False).returncode == 0:
                found.append(candidate)
                break
    return found


@pytest.mark.network
@pytest.mark.parametrize("python", interpreters())
def test_builds_without_torch_on_each_python(
    python: str, wheels: dict[str, Path], run: Run, tree: Path, tmp_path: Path
) -> None:
    run(python, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    fresh = tmp_path / "venv" / "bin" / "python"
    assert run(fresh, "-c", "import torch", cwd=tmp_path, check=False).returncode != 0
    run(fresh, "-m", "pip", "wheel", "--no-deps", "-w", tmp_path, tree, cwd=tmp_path)
    assert contents(tmp_path / wheels["lightning"].name) == contents(wheels["lightning"])


@both
def test_wheel_from_sdist_equals_wheel_from_tree(
    name: str, wheels: dict[str, Path], run: Run, tree: Path, tmp_path: Path
) -> None:
    sdist = build(run, tree, tmp_path, name, kind="sdist")
    with tarfile.open(sdist) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4 and 3.10.12
        archive.extractall(tmp_path / "unpacked", **safely)
    unpacked = tmp_path / "unpacked" / sdist.name.removesuffix(".tar.gz")
    # Without PACKAGE_NAME: an sdist knows which distribution it was made for.
    again = build(run, unpacked, tmp_path, "")
    assert again.name == wheels[name].name
    assert again.read_bytes() == wheels[name].read_bytes()


def test_build_front_end_goes_from_sdist_to_wheel(
    wheels: dict[str, Path], run: Run, tree: Path, tmp_path: Path
) -> None:
    pytest.importorskip("build")
    command = ["-m", "build", "--no-isolation", "--outdir", tmp_path, tree]
    run(sys.executable, *command, cwd=tmp_path, PACKAGE_NAME="pytorch")
    assert (tmp_path / wheels["pytorch"].name).read_bytes() == wheels["pytorch"].read_bytes()


def test_sdist_is_reproducible_and_holds_no_leftovers(run: Run, tree: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(tree, copy)
    for leftover in (
        "build/upstream/x.whl",
        ".venv/x",
        "src/lightning/__pycache__/x.pyc",
        ".mypy_cache/x",
        "secret.env",
    ):
        (copy / leftover).parent.mkdir(parents=True, exist_ok=True)
        (copy / leftover).write_text("x")
    first = build(run, tree, tmp_path / "1", "lightning", kind="sdist")
    second = build(run, copy, tmp_path / "2", "lightning", kind="sdist")
    assert first.read_bytes() == second.read_bytes()


def test_sdist_holds_every_tracked_file(run: Run, tree: Path, tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a checkout")
    tracked = set(run("git", "ls-files", cwd=ROOT).stdout.splitlines())
    with tarfile.open(build(run, tree, tmp_path, "lightning", kind="sdist")) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames()}
    missing = {name for name in tracked - packed if (ROOT / name).exists()}
    assert not missing, "name their folders in build_backend/sdist.py"


def test_unknown_package_name_is_refused(run: Run, tree: Path, tmp_path: Path) -> None:
    result = run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", tree, cwd=tmp_path,
                 check=False, PACKAGE_NAME="nonsense")  # fmt: skip
    assert result.returncode != 0
    assert "PACKAGE_NAME='nonsense' names no distribution of this project: leave it unset or use" in (
        result.stdout + result.stderr
    )
    assert not list(tmp_path.iterdir())


def test_running_setup_py_says_what_to_use(run: Run, tree: Path) -> None:
    result = run(sys.executable, "setup.py", "install", cwd=tree, check=False)
    assert result.returncode != 0
    assert "Use: pip install ." in result.stderr
    assert "Traceback" not in result.stderr
