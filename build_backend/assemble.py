"""Turns a released wheel's files into ours: patches applied, our modules laid over, the version written."""

import io
import os
import re
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from build_backend.distribution import LOCAL_VERSION, ROOT, Distribution
from build_backend.upstream import read_pin
from patches.engine import apply_patches
from patches.format import load_patches, rename

SOURCES = ROOT / "src"
_CODING_LINE = re.compile(rb"[ \t\f]*#.*?coding[:=]")


def version(distribution: Distribution) -> str:
    """Return the version of ours: the pinned release's with our local suffix."""
    return f"{read_pin(distribution).version}+{LOCAL_VERSION}"


@dataclass
class Assembly:
    """A tree of import packages ready to be installed.

    Attributes:
        tree: The folder that holds the packages.
        patched: Upstream's files that patches changed, with the names of the patches.
        replaced: Upstream's files that one of our modules took the place of.

    """

    tree: Path
    patched: dict[Path, list[str]] = field(default_factory=dict)
    replaced: set[Path] = field(default_factory=set)


def assemble(distribution: Distribution, pristine: bytes, tree: Path, *, editable: bool = False) -> Assembly:
    """Assemble a distribution's import packages in the empty folder ``tree``.

    Args:
        distribution: The distribution.
        pristine: The released wheel.
        tree: Where to put the packages.
        editable: Whether to link our modules to the source tree instead of copying them.

    Raises:
        ValueError: If one of our modules has no place in the distribution, or takes the place of a patched file.

    """
    with zipfile.ZipFile(io.BytesIO(pristine)) as archive:
        members = [name for name in archive.namelist() if PurePosixPath(name).parts[0] in distribution.packages]
        archive.extractall(tree, members)
    upstream = {tree / member for member in members}
    assembly = Assembly(tree, patched=apply_patches(tree, load_patches()))
    for source, target in _our_files(distribution, tree):
        content = _content(source, distribution)
        if target in assembly.patched and target.read_bytes() != content:
            raise ValueError(
                f"{source} replaces a file that a patch edits, and the edit would be lost: drop one of them"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        if target in upstream:
            assembly.replaced.add(target)
            assembly.patched.pop(target, None)
    if editable:
        _follow_sources(distribution, tree, upstream)
    for package in distribution.packages:
        (tree / package / "version.info").write_bytes(version(distribution).encode() + b"\n")
    return assembly


def stamp_notices(assembly: Assembly, distribution: Distribution) -> None:
    """Write the notice of the Apache License's section 4(b) into each upstream file that was changed or replaced."""
    release = f"Lightning {read_pin(distribution).version}"
    notices = {path: f"was changed by the patches {', '.join(names)}" for path, names in assembly.patched.items()}
    notices |= dict.fromkeys(assembly.replaced, "was replaced as a whole")
    for path, change in notices.items():
        if path.suffix == ".py":
            notice = f"# This file of {release} {change}; see NOTICE.\n".encode()
            path.write_bytes(insert_comment(path.read_bytes(), notice))


def insert_comment(source: bytes, comment: bytes) -> bytes:
    """Put a comment line at the top of a module: below what Python or the shell reads in the first lines."""
    lines = source.splitlines(keepends=True)
    position = 0
    if lines[:1] and lines[0].startswith(b"#!"):
        position = 1
    if lines[position:] and _CODING_LINE.match(lines[position]):  # Python looks for it in the first two lines only
        position += 1
    return b"".join([*lines[:position], comment, *lines[position:]])


def _our_files(distribution: Distribution, tree: Path) -> list[tuple[Path, Path]]:
    files = sorted(path for path in SOURCES.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return [(file, tree / distribution.place(PurePosixPath(file.relative_to(SOURCES).as_posix()))) for file in files]


def _content(source: Path, distribution: Distribution) -> bytes:
    content = source.read_bytes()
    if distribution.renames_imports and source.suffix == ".py":
        return rename(content.decode("utf-8")).encode("utf-8")
    return content


def _follow_sources(distribution: Distribution, tree: Path, upstream: set[Path]) -> None:
    """Make our modules in ``tree`` links to the source tree, or mark them as generated where imports are renamed.

    A folder that is all ours becomes one link, so that a module that is added to it later is there at once.

    """
    upstream_folders = {folder for file in upstream for folder in file.parents}
    for source, target in _our_files(distribution, tree):
        if distribution.renames_imports:
            name = source.relative_to(ROOT).as_posix()
            header = f"# Generated from {name} with the imports renamed: edit that file, then run `make dev` again.\n"
            if source.suffix == ".py":
                target.write_bytes(insert_comment(target.read_bytes(), header.encode()))
            continue
        while target.parent not in upstream_folders:
            source, target = source.parent, target.parent
        if target.is_symlink():
            continue
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()
        _link(source, target)


def _link(source: Path, target: Path) -> None:
    try:
        os.symlink(source, target)
    except OSError as error:
        # A copy would look the same and silently stop following the source tree.
        raise OSError(
            f"cannot link {target} to {source}, which an editable install needs: allow symbolic links (on Windows,"
            " developer mode) or install without --editable"
        ) from error
