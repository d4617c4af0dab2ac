"""Installing with pip and uv: in the place of stock Lightning, editable, and without a trace when it is gone."""

import json
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.packaging.tools import RELEASE, VERSION, Environment, Run, contents, copy_tree

both = pytest.mark.parametrize("name", ["lightning", "pytorch"])
DISTRIBUTIONS = {"lightning": "lightning", "pytorch": "pytorch-lightning"}
INSTALL_OFFLINE = ["install", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check"]


def find_uv() -> str:
    uv = shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")
    return uv or pytest.skip("uv is not installed")


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], run: Run, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with both distributions, and with the running environment's torch."""
    environment = Environment(tmp_path_factory.mktemp("installed") / "venv", run, see_running=True)
    # The running environment may hold ours as well, which pip would take for what is asked for.
    environment.pip(*INSTALL_OFFLINE, "--ignore-installed", *wheels.values())
    return environment


def test_all_versions_say_that_they_are_ours(installed: Environment) -> None:
    code = (
        "import importlib.metadata as m, lightning, lightning.fabric, lightning.pytorch, lightning_fabric;"
        "import pytorch_lightning;"
        "print(lightning.__version__, lightning.fabric.__version__, lightning.pytorch.__version__,"
        "lightning_fabric.__version__, pytorch_lightning.__version__, m.version('lightning'),"
        "m.version('pytorch-lightning'), lightning.__file__)"
    )
    output = installed.run(installed.python, "-c", code, cwd=installed.folder).stdout.split()
    assert output == [VERSION] * 7 + [str(installed.site / "lightning" / "__init__.py")]


def test_pip_check_is_clean_with_both_installed(installed: Environment) -> None:
    assert "No broken requirements found" in installed.pip("check")


def test_version_satisfies_pins_and_ranges_of_the_release(installed: Environment) -> None:
    report = installed.pip(
        "install", "--dry-run", "--no-index", f"lightning=={RELEASE}", f"pytorch-lightning>={RELEASE}"
    )
    assert "Would install" not in report


@both
def test_installing_over_stock_replaces_it_and_uninstalling_leaves_nothing(
    name: str, wheels: dict[str, Path], pristine: dict[str, Path], run: Run, tmp_path: Path
) -> None:
    environment = Environment(tmp_path / "venv", run)
    empty = environment.files()
    environment.pip(*INSTALL_OFFLINE, pristine[name])
    environment.pip("install", "--no-index", "--no-deps", wheels[name])
    expected = {path for path in contents(wheels[name]) if not path.endswith(".dist-info/RECORD")}
    site = {path.relative_to(environment.site).as_posix() for path in environment.site.rglob("*") if path.is_file()}
    assert expected <= site
    assert not [path for path in site if path.split("/")[0].endswith(f"{RELEASE}.dist-info")]
    added = {path for path in site - expected if ".dist-info/" not in path and "__pycache__" not in path}
    assert not added
    environment.pip("uninstall", "--yes", DISTRIBUTIONS[name])
    assert environment.files() == empty


def test_one_command_installs_both_from_git_and_another_goes_back_to_stock(
    run: Run, upstream: Path, tmp_path: Path
) -> None:
    tree = copy_tree(tmp_path / "tree")
    run("git", "init", "--quiet", cwd=tree)
    run("git", "add", "--all", "--force", cwd=tree)
    run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "all", cwd=tree)
    environment = Environment(tmp_path / "venv", run)
    empty = environment.files()
    url = f"git+file://{tree}"
    isolation = ["--no-build-isolation"] if sys.version_info < (3, 11) else []  # tomli comes from the index
    install = ["install", "--no-index", "--no-deps", *isolation]
    environment.pip(*install, url, f"{url}#subdirectory=pytorch-lightning")
    assert versions(environment) == dict.fromkeys(DISTRIBUTIONS.values(), VERSION)
    stock = [f"{name}=={RELEASE}" for name in DISTRIBUTIONS.values()]
    environment.pip(*install, "--find-links", upstream, "--force-reinstall", *stock)
    assert versions(environment) == dict.fromkeys(DISTRIBUTIONS.values(), RELEASE)
    environment.pip("uninstall", "--yes", *DISTRIBUTIONS.values())
    assert environment.files() == empty


def versions(environment: Environment) -> dict[str, str]:
    listed = json.loads(environment.pip("list", "--format", "json"))
    return {one["name"]: one["version"] for one in listed if one["name"] in DISTRIBUTIONS.values()}


@both
def test_editable_install_follows_the_sources_and_uninstalling_leaves_nothing(
    name: str, run: Run, tmp_path: Path
) -> None:
    tree = copy_tree(tmp_path / "tree")
    environment = Environment(tmp_path / "venv", run, see_running=True)
    empty = environment.files()
    command = ["install", "--no-index", "--no-deps", "--no-build-isolation", "--editable", tree]
    environment.pip(*command, PACKAGE_NAME=name)
    package = "lightning" if name == "lightning" else "pytorch_lightning"
    code = f"import importlib.util; print(importlib.util.find_spec('{package}').origin)"
    origin = Path(run(environment.python, "-c", code, cwd=tmp_path).stdout.strip())
    assembled = tree / "build" / "editable" / DISTRIBUTIONS[name]
    assert origin == assembled / package / "__init__.py"
    storage = "lightning/fabric/storage" if name == "lightning" else "lightning_fabric/storage"
    added = tree / "src" / "lightning" / "fabric" / "storage" / "added_later.py"
    added.write_text("import lightning.fabric.utilities\n")
    if name == "lightning":
        assert (assembled / storage / "added_later.py").samefile(added)
    (assembled / package / "stale.py").touch()
    environment.pip(*command, PACKAGE_NAME=name)
    assert not (assembled / package / "stale.py").exists()
    if name == "pytorch":
        lines = (assembled / storage / "added_later.py").read_text().splitlines()
        assert lines[0].startswith("# Generated from src/lightning/fabric/storage/added_later.py")
        assert lines[1:] == ["import lightning_fabric.utilities"]
    assert [path.name for path in assembled.parent.iterdir()] == [DISTRIBUTIONS[name]]
    environment.pip("uninstall", "--yes", DISTRIBUTIONS[name])
    assert environment.files() == empty


def test_editable_install_without_symbolic_links_says_what_to_do(run: Run, tree: Path, tmp_path: Path) -> None:
    code = (
        "import os, setup\n"
        "def refuse(*args): raise OSError('A required privilege is not held by the client')\n"
        "os.symlink = refuse\n"
        f"setup.build_editable({str(tmp_path)!r})"
    )
    result = run(sys.executable, "-c", code, cwd=tree, check=False)
    assert "allow symbolic links (on Windows, developer mode) or install without --editable" in result.stderr
    assert not list(tmp_path.iterdir())
    assert not list((tree / "build" / "editable").iterdir())


def test_uv_installs_both_and_leaves_nothing(run: Run, tree: Path, tmp_path: Path) -> None:
    uv = find_uv()
    environment = Environment(tmp_path / "venv", run)
    empty = environment.files()
    # 3.10 needs tomli in the build environment, which comes from the index.
    offline = ["--offline"] if sys.version_info >= (3, 11) else []
    command = [uv, "pip", "install", *offline, "--no-deps", "--python", environment.python]
    run(*command, tree, tree / "pytorch-lightning", cwd=tmp_path)
    listing = run(uv, "pip", "list", "--python", environment.python, cwd=tmp_path).stdout.split()
    assert [listing[listing.index(name) + 1] for name in DISTRIBUTIONS.values()] == [VERSION] * 2
    run(uv, "pip", "uninstall", "--python", environment.python, *DISTRIBUTIONS.values(), cwd=tmp_path)
    assert environment.files() - {".lock"} == empty  # uv's own, in every environment that it touches


def test_uv_builds_both_again_after_a_change_of_the_sources(run: Run, tmp_path: Path) -> None:
    uv = find_uv()
    tree = copy_tree(tmp_path / "tree")
    environment = Environment(tmp_path / "venv", run, see_running=True)
    command = [uv, "pip", "install", "--no-deps", "--no-build-isolation", "--python", environment.python]
    run(*command, tree, tree / "pytorch-lightning", cwd=tmp_path)
    (tree / "src" / "lightning" / "fabric" / "storage" / "added_later.py").write_text('"""Added."""\n')
    run(*command, tree, tree / "pytorch-lightning", cwd=tmp_path)
    for package in ("lightning/fabric", "lightning_fabric"):
        assert (environment.site / package / "storage" / "added_later.py").exists()


@pytest.mark.network
def test_uv_build_environment_can_download_the_released_wheel(run: Run, tmp_path: Path) -> None:
    uv = find_uv()
    tree = copy_tree(tmp_path / "tree")
    run(uv, "build", "--wheel", "--out-dir", tmp_path / "out", tree, cwd=tmp_path, LIGHTNING_UPSTREAM_DIR="")
    assert (tmp_path / "out" / f"lightning-{VERSION}-py3-none-any.whl").exists()
