import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning.fabric.storage.transport.text import open_text
from tests.servers import Bucket

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
HPARAMS = {"rate": 0.1, "name": "ä\r\nb, c", "layers": [1, 2]}


@pytest.fixture(params=["local", "memory", "ftp", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return request.getfixturevalue("bucket").url
    if request.param == "memory":
        fsspec.filesystem("memory").makedirs(tmp_path.name, exist_ok=True)
        return f"memory://{tmp_path.name}"
    return str(tmp_path) if request.param == "local" else request.getfixturevalue("ftp")


def saving(name: str) -> Any:
    return importlib.import_module(f"{name}.core.saving")


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("form", ["yaml", "csv"])
def test_hyperparameters_come_back_from_any_place(name: str, form: str, folder: str) -> None:
    save, load = {
        "yaml": (saving(name).save_hparams_to_yaml, saving(name).load_hparams_from_yaml),
        "csv": (saving(name).save_hparams_to_tags_csv, saving(name).load_hparams_from_tags_csv),
    }[form]
    path = f"{folder}/x.{form}"
    with pytest.warns(RuntimeWarning, match="Missing Tags"):
        assert load(path) == {}
    save(path, Namespace(**HPARAMS))
    assert load(path) == HPARAMS
    given = Path(path)  # which has lost a slash if it was a URL
    save(given, {"rate": 2})
    assert load(given) == {"rate": 2} == load(path)


@pytest.mark.parametrize("folder", ["local", "memory", "ftp"], indirect=True)
def test_a_missing_folder_is_an_error_where_there_are_folders(folder: str) -> None:
    for save in (
        saving("lightning.pytorch").save_hparams_to_yaml,
        saving("lightning.pytorch").save_hparams_to_tags_csv,
    ):
        with pytest.raises(RuntimeError, match="Missing folder"):
            save(f"{folder}/none/x", HPARAMS)


def test_a_save_that_fails_leaves_the_file_before(folder: str) -> None:
    with open_text(f"{folder}/x", "w") as file:
        file.write("before")
    with pytest.raises(ZeroDivisionError), open_text(f"{folder}/x", "w") as file:
        file.write(f"after {1 / 0}")
    with open_text(f"{folder}/x", "r") as file:
        assert file.read() == "before"


def test_a_refused_save_is_an_error_that_names_the_file(bucket: Bucket) -> None:
    with (
        bucket.refusing(lambda method, path: 403 if method == "PUT" else None),
        pytest.raises(PermissionError, match=rf"Could not write {bucket.url}/x\.yaml"),
    ):
        saving("lightning.pytorch").save_hparams_to_yaml(f"{bucket.url}/x.yaml", HPARAMS)


def test_a_file_that_another_process_has_just_written_is_found(bucket: Bucket) -> None:
    bucket.put("run/a.yaml", b"a: 1")
    assert fsspec.filesystem("s3").ls(f"{bucket.name}/run") == [f"{bucket.name}/run/a.yaml"]  # and remembered
    bucket.put("run/b.yaml", b"b: 2")
    assert saving("lightning.pytorch").load_hparams_from_yaml(f"{bucket.url}/run/b.yaml") == {"b": 2}
