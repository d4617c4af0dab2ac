"""Builds the device's library, once for each state of its sources and each release of torch and Python.

``python -m tests.late_device.build`` builds; the tests only look whether that has been done.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCES = Path(__file__).with_name("cpp")
BUILDS = Path(__file__).parents[2] / "build" / "late_device"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")


def library() -> Path:
    """Where the library is, once it has been built."""
    state = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for source in sorted(SOURCES.iterdir()):
        state.update(source.read_bytes())
    return BUILDS / state.hexdigest()[:16] / f"_late{sysconfig.get_config_var('EXT_SUFFIX')}"


def build() -> None:
    target = library()
    if target.exists():
        return
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise SystemExit("A C++ compiler is missing, which builds the device for tests: install g++, or set CXX")
    shutil.rmtree(BUILDS, ignore_errors=True)
    target.parent.mkdir(parents=True)
    includes = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]

    def compile_one(source: Path) -> str:
        made = target.with_name(f"{source.stem}.o")
        subprocess.run([compiler, *_FLAGS, *includes, "-c", source, "-o", made], check=True)
        return str(made)

    with ThreadPoolExecutor(2) as threads:
        objects = list(threads.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
    libraries = [f"-L{path}" for path in library_paths()] + ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    unfinished = target.with_suffix(".unfinished")
    subprocess.run([compiler, "-shared", *objects, *libraries, "-o", unfinished], check=True)
    unfinished.rename(target)


if __name__ == "__main__":
    build()
