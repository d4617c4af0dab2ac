"""Where the released wheels come from: only ever the pinned ones, whatever pip's user has configured."""

import hashlib
import os
import sys
from pathlib import Path

import pytest

from build_backend import upstream as upstream_module
from build_backend.distribution import LIGHTNING
from build_backend.upstream import read_pin, without_credentials
from tests.packaging.tools import RELEASE, VERSION, Run, copy_tree

NAME = f"lightning-{RELEASE}-py3-none-any.whl"
#: Written twice, for a pin that was changed by mistake to be noticed.
SHA256 = "2bcbd6ee840071cd076c7dc9953d7ac1040df92f1c5fa76583aae644f037ab85"
# The first steps of a front end; they need the released wheel, and the rest would only take time.
PREPARE = "import setup; print(setup.get_requires_for_build_wheel(), setup.prepare_metadata_for_build_wheel('dist'))"


@pytest.fixture
def own_tree(tmp_path: Path) -> Path:
    """A source tree with an empty cache."""
    tree = copy_tree(tmp_path / "tree")
    (tree / "dist").mkdir()
    return tree


@pytest.fixture
def mirror(upstream: Path) -> dict[str, str]:
    """Settings that make pip find the released wheels in a folder, in the place of the package index."""
    return {"LIGHTNING_UPSTREAM_DIR": "", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(upstream)}


def test_pins_are_the_released_hashes() -> None:
    pin = read_pin(LIGHTNING)
    assert pin.sha256 == SHA256


def test_wrong_file_in_upstream_dir_is_refused_with_both_hashes(own_tree: Path, run: Run, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / NAME).write_bytes(b"malicious")
    result = run(sys.executable, "-c", PREPARE, cwd=own_tree, check=False, LIGHTNING_UPSTREAM_DIR=str(wrong))
    assert result.returncode != 0
    for part in (str(wrong / NAME), SHA256, hashlib.sha256(b"malicious").hexdigest(), "Nothing was built"):
        assert part in result.stderr
    assert not list((own_tree / "dist").iterdir())


def test_missing_file_in_upstream_dir_says_what_to_do(own_tree: Path, run: Run, tmp_path: Path) -> None:
    result = run(sys.executable, "-c", PREPARE, cwd=own_tree, check=False, LIGHTNING_UPSTREAM_DIR=str(tmp_path))
    assert f"{tmp_path / NAME} does not exist: put the released wheel" in result.stderr


@pytest.mark.network
@pytest.mark.parametrize("package_name", ["lightning", "pytorch"])
def test_released_wheel_is_downloaded_from_the_index_and_cached(
    package_name: str, own_tree: Path, run: Run, pristine: dict[str, Path], tmp_path: Path
) -> None:
    environment = {"LIGHTNING_UPSTREAM_DIR": "", "PACKAGE_NAME": package_name}
    run(sys.executable, "-c", PREPARE, cwd=own_tree, **environment)
    cached = own_tree / "build" / "upstream" / pristine[package_name].name
    assert cached.read_bytes() == pristine[package_name].read_bytes()
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    run(sys.executable, "-c", PREPARE, cwd=own_tree, **environment, **offline)


def test_pip_is_required_only_for_a_download(own_tree: Path, run: Run, mirror: dict[str, str]) -> None:
    assert run(sys.executable, "-c", PREPARE, cwd=own_tree, **mirror).stdout.startswith("['pip>=22']")
    assert run(sys.executable, "-c", PREPARE, cwd=own_tree, **mirror).stdout.startswith("[]")


def test_download_without_pip_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LIGHTNING_UPSTREAM_DIR", raising=False)
    monkeypatch.setattr(upstream_module, "CACHE", tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip is needed to download lightning 2\.6\.6, .*: install it there"):
        upstream_module.read_pristine_wheel(LIGHTNING)


def test_corrupted_cache_is_fetched_again(
    own_tree: Path, run: Run, mirror: dict[str, str], pristine: dict[str, Path]
) -> None:
    cached = own_tree / "build" / "upstream" / NAME
    cached.parent.mkdir(parents=True)
    cached.write_bytes(pristine["lightning"].read_bytes()[:-1])
    run(sys.executable, "-c", PREPARE, cwd=own_tree, **mirror)
    assert cached.read_bytes() == pristine["lightning"].read_bytes()
    assert [path.name for path in cached.parent.iterdir()] == [NAME]


def test_tampered_download_is_refused_and_not_cached(
    own_tree: Path, run: Run, mirror: dict[str, str], pristine: dict[str, Path], tmp_path: Path
) -> None:
    tampered = tmp_path / "tampered"
    tampered.mkdir()
    (tampered / NAME).write_bytes(pristine["lightning"].read_bytes() + b"\0")
    result = run(sys.executable, "-c", PREPARE, cwd=own_tree, check=False, **mirror | {"PIP_FIND_LINKS": str(tampered)})
    assert result.returncode != 0
    assert f"pip could not download lightning {RELEASE}" in result.stderr
    assert "LIGHTNING_UPSTREAM_DIR" in result.stderr
    assert not list((own_tree / "build" / "upstream").iterdir())


HOSTILE = {
    "constraint": "{constraints}",
    "require-hashes": "1",
    "no-binary": ":all:",
    "only-binary": ":none:",
    "target": "{folder}/target",
    "prefix": "{folder}/prefix",
    "user": "1",
    "dry-run": "1",
    "requirement": "{constraints}",
    "python-version": "2.7",
    "require-virtualenv": "1",
    "quiet": "3",
    "log": "{folder}/pip.log",
}


@pytest.fixture
def hostile(tmp_path: Path) -> dict[str, str]:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("lightning==2.5.0\npytorch-lightning==2.5.0 --hash=sha256:" + "0" * 64 + "\n")
    return {key: value.format(constraints=constraints, folder=tmp_path) for key, value in HOSTILE.items()}


def test_settings_of_pip_in_the_environment_do_not_break_the_download(
    own_tree: Path, run: Run, mirror: dict[str, str], hostile: dict[str, str]
) -> None:
    environment = {f"PIP_{key.upper().replace('-', '_')}": value for key, value in hostile.items()}
    assert VERSION in run(sys.executable, "-c", PREPARE, cwd=own_tree, **environment | mirror).stdout


def test_settings_of_pip_in_a_configuration_file_do_not_break_the_download_but_the_index_counts(
    own_tree: Path, run: Run, upstream: Path, hostile: dict[str, str], tmp_path: Path
) -> None:
    settings = hostile | {"find-links": f"\n    {tmp_path}\n    {upstream}", "no-index": "yes"}
    lines = [f"{key} = {value}" for key, value in settings.items() if key != "python-version"]
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nindex_url = http://127.0.0.1:9/%40\n" + "\n".join(lines) + "\n[download]\nretries = 0\n")
    environment = {"PIP_CONFIG_FILE": str(file), "LIGHTNING_UPSTREAM_DIR": "", "PIP_FIND_LINKS": ""}
    run(sys.executable, "-c", PREPARE, cwd=own_tree, **environment)


def test_variables_override_a_configuration_file_as_in_pip(
    own_tree: Path, run: Run, mirror: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nfind-links = /nonexistent\n[download]\nfind-links = /nonexistent\nno-index = no\n")
    run(sys.executable, "-c", PREPARE, cwd=own_tree, PIP_CONFIG_FILE=str(file), **mirror)


@pytest.mark.parametrize("source", ["variable", "file"])
def test_credentials_of_an_index_stay_out_of_error_messages(
    source: str, own_tree: Path, run: Run, tmp_path: Path
) -> None:
    url = "http://someone:s3cr3t%40x@127.0.0.1:9/simple"
    environment = {
        "LIGHTNING_UPSTREAM_DIR": "",
        "PIP_RETRIES": "0",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
    }
    if source == "variable":
        environment |= {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": url, "PIP_PROXY": url}
    else:
        file = tmp_path / "pip.conf"
        file.write_text(f"[global]\nindex-url = {url}\nproxy = {url}\n")
        environment["PIP_CONFIG_FILE"] = str(file)
    result = run(sys.executable, "-c", PREPARE, cwd=own_tree, check=False, **environment)
    assert f"pip could not download lightning {RELEASE}" in result.stderr
    assert "s3cr3t" not in result.stdout + result.stderr
    assert "someone" not in result.stdout + result.stderr


def test_masking_leaves_nothing_before_the_host() -> None:
    text = "at https://token@host/a@b and http://u:p@ss:w@rd@host:1/x, file:///folder/a@b"
    assert without_credentials(text) == "at https://****@host/a@b and http://****@host:1/x, file:///folder/a@b"


def test_unreadable_pins_are_named(own_tree: Path, run: Run) -> None:
    (own_tree / "requirements" / "upstream.txt").write_text(f"lightning=={RELEASE}\n")
    result = run(sys.executable, "-c", PREPARE, cwd=own_tree, check=False)
    assert (
        f"upstream.txt: expected 'name==version --hash=sha256:<64 hex digits>', found 'lightning=={RELEASE}'"
        in result.stderr
    )
