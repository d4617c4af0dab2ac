"""What the wheels contain: upstream's files, our changes, and nothing else."""

import ast
import base64
import csv
import difflib
import hashlib
import io
import re
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from build_backend import assemble
from build_backend.distribution import LIGHTNING, PACKAGE_NAMES, PYTORCH_LIGHTNING
from patches.engine import apply_patches
from patches.format import load_patches, rename
from tests.packaging.tools import RELEASE, ROOT, VERSION, Run, build, contents, dist_info

EXTRAS = """\
Provides-Extra: s3
Requires-Dist: s3fs>=2024.6.0; extra == "s3"
Requires-Dist: obstore>=0.11.0; extra == "s3"
Provides-Extra: gcs
Requires-Dist: gcsfs>=2024.6.0; extra == "gcs"
Requires-Dist: obstore>=0.11.0; extra == "gcs"
Provides-Extra: azure
Requires-Dist: adlfs>=2024.7.0; extra == "azure"
Requires-Dist: obstore>=0.11.0; extra == "azure"
Provides-Extra: cloud
Requires-Dist: s3fs>=2024.6.0; extra == "cloud"
Requires-Dist: gcsfs>=2024.6.0; extra == "cloud"
Requires-Dist: adlfs>=2024.7.0; extra == "cloud"
Requires-Dist: obstore>=0.11.0; extra == "cloud"
""".splitlines()

both = pytest.mark.parametrize("name", PACKAGE_NAMES)


def our_files(name: str) -> dict[str, bytes]:
    """Our modules by their path in the wheel, with the imports that they have there."""
    files = {}
    for path in (ROOT / "src").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            relative, content = path.relative_to(ROOT / "src").as_posix(), path.read_bytes()
            if name == "pytorch":
                relative = relative.replace("lightning/fabric", "lightning_fabric", 1)
                relative = relative.replace("lightning/pytorch", "pytorch_lightning", 1)
                content = rename(content.decode()).encode() if path.suffix == ".py" else content
            files[relative] = content
    return files


@both
def test_wheels_are_named_after_the_release_with_a_local_version(name: str, wheels: dict[str, Path]) -> None:
    stem = PACKAGE_NAMES[name].name.replace("-", "_")
    assert wheels[name].name == f"{stem}-{VERSION}-py3-none-any.whl"


@both
def test_metadata_differs_from_upstream_in_version_extras_and_notice_only(
    name: str, wheels: dict[str, Path], pristine: dict[str, Path]
) -> None:
    theirs = dist_info(pristine[name], "METADATA").decode().split("\n")
    ours = dist_info(wheels[name], "METADATA").decode().split("\n")
    changes = [line for line in difflib.ndiff(theirs, ours) if line[0] in "+-"]
    added = [f"Version: {VERSION}", "License-File: NOTICE", *EXTRAS]
    assert [line[2:] for line in changes if line[0] == "-"] == [f"Version: {RELEASE}"]
    assert [line[2:] for line in changes if line[0] == "+"] == added


@both
def test_all_upstream_extras_and_requirements_survive(
    name: str, wheels: dict[str, Path], pristine: dict[str, Path]
) -> None:
    theirs = Parser().parsestr(dist_info(pristine[name], "METADATA").decode())
    ours = Parser().parsestr(dist_info(wheels[name], "METADATA").decode())
    for field in ("Provides-Extra", "Requires-Dist", "Classifier", "Requires-Python"):
        assert set(theirs.get_all(field, [])) <= set(ours.get_all(field, [])), field
    assert ours.get_payload() == theirs.get_payload()


@both
def test_licence_and_entry_points_survive_and_our_notice_stands_beside(
    name: str, wheels: dict[str, Path], pristine: dict[str, Path]
) -> None:
    kept = ["licenses/LICENSE", "top_level.txt"] + (["entry_points.txt"] if name == "lightning" else [])
    for file in kept:
        assert dist_info(wheels[name], file) == dist_info(pristine[name], file)
    assert dist_info(wheels[name], "licenses/NOTICE") == (ROOT / "NOTICE").read_bytes()
    assert b"setuptools" not in dist_info(wheels[name], "WHEEL")
    assert b"Root-Is-Purelib: true\nTag: py3-none-any\n" in dist_info(wheels[name], "WHEEL")


@both
def test_record_lists_every_file_with_its_hash_and_size(name: str, wheels: dict[str, Path]) -> None:
    files = contents(wheels[name])
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(dist_info(wheels[name], "RECORD").decode()))}
    assert list(rows) == list(files)
    assert list(files)[-1].endswith(".dist-info/RECORD")
    assert rows.pop(list(files)[-1]) == ["", ""]
    for path, (digest, size) in rows.items():
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[path]).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={expected}", str(len(files[path])))


@both
def test_every_upstream_file_is_unchanged_unless_reported_as_modified(
    name: str, wheels: dict[str, Path], pristine: dict[str, Path], tmp_path: Path
) -> None:
    theirs = {path: data for path, data in contents(pristine[name]).items() if ".dist-info/" not in path}
    ours = {path: data for path, data in contents(wheels[name]).items() if ".dist-info/" not in path}
    with zipfile.ZipFile(pristine[name]) as archive:
        archive.extractall(tmp_path)
    reported = {path.relative_to(tmp_path).as_posix() for path in apply_patches(tmp_path, load_patches())}
    replaced = theirs.keys() & our_files(name).keys()
    versions = {f"{package}/version.info" for package in PACKAGE_NAMES[name].packages}
    changed = {path for path, data in theirs.items() if ours.get(path) != data}
    assert changed == reported | replaced | versions
    assert ours.keys() - theirs.keys() == our_files(name).keys() - theirs.keys()
    for path in sorted(reported - replaced):
        notice, rest = ours[path].split(b"\n", 1)
        assert re.fullmatch(rb"# This file of Lightning 2\.6\.6 was changed by the patches .+; see NOTICE\.", notice)
        assert rest == (tmp_path / path).read_bytes()
    for path in versions:
        assert ours[path] == f"{VERSION}\n".encode()


@both
def test_our_modules_are_in_their_place(name: str, wheels: dict[str, Path], pristine: dict[str, Path]) -> None:
    theirs, ours = contents(pristine[name]), contents(wheels[name])
    for path, content in our_files(name).items():
        line = f"# This file of Lightning {RELEASE} was replaced as a whole; see NOTICE.\n".encode()
        notice = line if path in theirs else b""
        assert ours[path] == notice + content


def test_the_twin_imports_nothing_of_the_other_distribution(wheels: dict[str, Path]) -> None:
    files = contents(wheels["pytorch"])
    for path in our_files("pytorch"):
        if path.endswith(".py"):
            assert not re.search(rb"\blightning\.(fabric|pytorch)\b", files[path]), path


@both
def test_every_module_compiles(name: str, wheels: dict[str, Path]) -> None:
    for path, content in contents(wheels[name]).items():
        if path.endswith(".py"):
            ast.parse(content, path)


@both
def test_same_input_gives_the_same_wheel_byte_for_byte(
    name: str, wheels: dict[str, Path], run: Run, tree: Path, tmp_path: Path
) -> None:
    for file in (tree / "src").rglob("*"):
        file.touch()  # dates of the working tree must not matter
    again = build(run, tree, tmp_path, name)
    assert again.read_bytes() == wheels[name].read_bytes()


def test_source_date_epoch_sets_the_dates_and_nothing_else(
    wheels: dict[str, Path], run: Run, tree: Path, tmp_path: Path
) -> None:
    dated = build(run, tree, tmp_path, "lightning", SOURCE_DATE_EPOCH="1700000000")
    assert contents(dated) == contents(wheels["lightning"])
    with zipfile.ZipFile(dated) as archive:
        assert {member.date_time for member in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}
        assert {member.external_attr >> 16 for member in archive.infolist()} == {0o100644}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (b'"""Doc."""\nfrom __future__ import annotations\n', b'#N\n"""Doc."""\nfrom __future__ import annotations\n'),
        (b"#!/usr/bin/env python\nx = 1\n", b"#!/usr/bin/env python\n#N\nx = 1\n"),
        (b"# -*- coding: latin-1 -*-\nx = 1\n", b"# -*- coding: latin-1 -*-\n#N\nx = 1\n"),
        (b"#!/bin/sh\n# coding: latin-1\nx = 1\n", b"#!/bin/sh\n# coding: latin-1\n#N\nx = 1\n"),
        (b"", b"#N\n"),
    ],
)
def test_notice_goes_where_it_changes_no_meaning(source: bytes, expected: bytes) -> None:
    assert assemble.insert_comment(source, b"#N\n") == expected


def test_a_module_without_a_place_in_the_twin_is_refused(
    monkeypatch: pytest.MonkeyPatch, pristine: dict[str, Path], tmp_path: Path
) -> None:
    sources = tmp_path / "src"
    (sources / "lightning").mkdir(parents=True)
    (sources / "lightning" / "lost.py").write_text("x = 1\n")
    monkeypatch.setattr(assemble, "SOURCES", sources)
    with pytest.raises(
        ValueError, match=r"src/lightning/lost\.py has no place .* src/lightning/fabric, src/lightning/py"
    ):
        assemble.assemble(PYTORCH_LIGHTNING, pristine["pytorch"].read_bytes(), tmp_path / "tree")


def test_a_module_that_would_undo_a_patch_is_refused(
    monkeypatch: pytest.MonkeyPatch, pristine: dict[str, Path], tmp_path: Path
) -> None:
    patched = next(edit.spec["file"] for patch in load_patches() for edit in patch.edits)
    sources = tmp_path / "src"
    (sources / patched).parent.mkdir(parents=True)
    (sources / patched).write_text("x = 1\n")
    monkeypatch.setattr(assemble, "SOURCES", sources)
    with pytest.raises(ValueError, match="replaces a file that a patch edits"):
        assemble.assemble(LIGHTNING, pristine["lightning"].read_bytes(), tmp_path / "tree")
