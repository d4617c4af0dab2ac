"""Fills a folder with the wheels that ``offline.sh`` installs on a machine without a package index.

``python tests/gpu/wheels.py FOLDER [--python 3.12]`` downloads, in the versions of this environment, what the tests in
this folder and Lightning need, except torch and what only torch needs: the other machine has that.
"""

import argparse
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

#: What is tested, and what the tests of this folder import.
ROOTS = [
    *("lightning", "pytorch-lightning", "s3fs", "obstore", "pytest", "pytest-timeout"),
    *("moto[s3]", "flask", "flask-cors", "pyftpdlib"),
]
#: On the other machine, or made here.
LEFT_OUT = ("torch", "lightning", "pytorch-lightning")
LINUX = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 35)] + ["manylinux1_x86_64", "manylinux2014_x86_64"]


def needed(python: str) -> dict[str, str]:
    """The distributions by name, each with its version here; "" if it is not needed here, but by the other Python."""
    found: dict[str, str] = {}
    todo = [Requirement(root) for root in ROOTS]
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    seen = set()
    while todo:
        requirement = todo.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name == "torch" or str(requirement) in seen:
            continue
        seen.add(str(requirement))
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
            continue
        for line in requires(name) or ():
            inner = Requirement(line)
            extras = ["", *requirement.extras]
            if inner.marker is None or any(inner.marker.evaluate({**environment, "extra": extra}) for extra in extras):
                todo.append(inner)
    return {name: found[name] for name in sorted(found) if name not in LEFT_OUT}


def fetch(name: str, version: str, python: str, folder: Path) -> None:
    """Downloads a wheel for the other machine; what has none is built here, of Python alone."""
    wanted = f"{name}=={version}" if version else name
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    platforms = [argument for platform in LINUX for argument in ("--platform", platform)]
    chosen = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    if subprocess.run([*pip, "download", "--no-deps", *chosen, "--dest", folder, wanted], check=False).returncode:
        print(f"{wanted} has no wheel, so it is built", file=sys.stderr)
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, wanted], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="such as 3.12")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for old in arguments.folder.glob("*.whl"):
        old.unlink()
    for name, of_here in needed(arguments.python).items():
        fetch(name, of_here, arguments.python, arguments.folder)


if __name__ == "__main__":
    main()
