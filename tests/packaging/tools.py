"""Small tools to build, look into and install the distributions."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

from build_backend.distribution import LIGHTNING, LOCAL_VERSION
from build_backend.sdist import CONTENT
from build_backend.upstream import read_pin

ROOT = Path(__file__).resolve().parent.parent.parent
RELEASE = read_pin(LIGHTNING).version
VERSION = f"{RELEASE}+{LOCAL_VERSION}"
Run = Callable[..., subprocess.CompletedProcess[str]]


def copy_tree(target: Path) -> Path:
    target.mkdir()
    for name in CONTENT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, target / name)
    return target


def build(run: Run, tree: Path, out: Path, package_name: str, kind: str = "wheel", **env: str) -> Path:
    """Call the backend as a front end does, and return the built file."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"import setup; print(setup.build_{kind}({str(out)!r}))"
    result = run(sys.executable, "-c", code, cwd=tree, PACKAGE_NAME=package_name, **env)
    return out / result.stdout.strip()


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def dist_info(wheel: Path, name: str) -> bytes:
    return next(content for path, content in contents(wheel).items() if path.endswith(f".dist-info/{name}"))


class Environment:
    """A fresh virtual environment, in which pip of the running one installs.

    With ``see_running``, packages of the running environment can be imported too, after its own, so that nobody has
    to install torch again.
    """

    def __init__(self, folder: Path, run: Run, *, see_running: bool = False) -> None:
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.run = run
        self.site = next(folder.glob("lib/python3*/site-packages"))
        if see_running:
            # Named to be read after the file of an editable install.
            (self.site / "zz_running.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *arguments: str | Path, **env: str) -> str:
        return self.run(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.folder, **env).stdout

    def files(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")}
