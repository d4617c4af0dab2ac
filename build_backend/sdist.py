"""Packs the source tree as an sdist from which the same wheel can be built, with or without git."""

import gzip
import io
import tarfile
from pathlib import Path

from build_backend.assemble import version
from build_backend.distribution import ROOT, Distribution
from build_backend.wheel import source_date

# Named one by one: a working folder may hold anything, keys and data included.
CONTENT = (
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "NOTICE",
    "README.md",
    "benchmarks",
    "build_backend",
    "demo",
    "docs",
    "patches",
    "pyproject.toml",
    "pytorch-lightning",
    "requirements",
    "setup.py",
    "src",
    "tests",
    "tools",
)
_CACHES = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def sdist_stem(distribution: Distribution) -> str:
    """Return the name of the sdist's top folder, which is also that of the file."""
    return f"{distribution.file_name}-{version(distribution)}"


def write_sdist(path: Path, distribution: Distribution, metadata: bytes) -> None:
    """Write an sdist: same content, same bytes."""
    stem = sdist_stem(distribution)
    date = source_date()
    with (
        open(path, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=date) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        _add(archive, f"{stem}/PKG-INFO", metadata, 0o644, date)
        for file in _files():
            mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            _add(archive, f"{stem}/{file.relative_to(ROOT).as_posix()}", file.read_bytes(), mode, date)


def _files() -> list[Path]:
    """Return the files of the source tree; what a later stage of the project adds may still be missing."""
    files: list[Path] = []
    for name in CONTENT:
        path = ROOT / name
        below = path.rglob("*") if path.is_dir() else [path]
        files += [file for file in below if file.is_file() and not _CACHES.intersection(file.parts)]
    return sorted(files)


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int, date: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    member.mode = mode
    member.mtime = date
    archive.addfile(member, io.BytesIO(content))
