"""One set of built wheels for the whole session."""

import os
import subprocess
from pathlib import Path

import pytest

from build_backend.distribution import PACKAGE_NAMES
from build_backend.upstream import read_pin, read_pristine_wheel
from tests.packaging.tools import Run, build, copy_tree


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("packaging")


@pytest.fixture(scope="session")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both released wheels."""
    folder = tmp_path_factory.mktemp("upstream")
    for distribution in PACKAGE_NAMES.values():
        (folder / read_pin(distribution).file_name).write_bytes(read_pristine_wheel(distribution))
    return folder


@pytest.fixture(scope="session")
def run(upstream: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a command offline: with the released wheels at hand and without the developer's own settings."""
    home = tmp_path_factory.mktemp("home")

    def run(*command: str | Path, cwd: Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        base = {key: value for key, value in os.environ.items() if key not in ("PACKAGE_NAME", "SOURCE_DATE_EPOCH")}
        base |= {"LIGHTNING_UPSTREAM_DIR": str(upstream), "UV_CACHE_DIR": str(home / "uv"), "PYTHONHASHSEED": "random"}
        result = subprocess.run(
            [str(part) for part in command], cwd=cwd, env=base | env, capture_output=True, text=True, check=False
        )
        if check:
            assert result.returncode == 0, result.stdout + result.stderr
        return result

    return run


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree without git, for everything that is built here and leaves no trace in it."""
    return copy_tree(tmp_path_factory.mktemp("source") / "tree")


@pytest.fixture(scope="session")
def wheels(run: Run, tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels, by PACKAGE_NAME."""
    out = tmp_path_factory.mktemp("wheels")
    return {name: build(run, tree, out, name) for name in PACKAGE_NAMES}


@pytest.fixture(scope="session")
def pristine(upstream: Path) -> dict[str, Path]:
    """Both released wheels, by PACKAGE_NAME."""
    return {name: upstream / read_pin(distribution).file_name for name, distribution in PACKAGE_NAMES.items()}
