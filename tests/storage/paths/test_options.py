import importlib
import os
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.config import conf
from fsspec.registry import _registry
from s3fs import S3FileSystem

from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.storage import options
from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.options import CarryingOptions, set_storage_options
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.tools.discover import names_in
from lightning.fabric.utilities.cloud_io import get_filesystem
from tests.servers import SECRET, Bucket

NOWHERE = "http://127.0.0.1:9"
NO_SCHEME = r"The {}.* begins with http:// or https://, as in http://localhost:9000$"


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(options, "_options", {})
    before = {protocol: given for protocol, given in conf.items()}
    yield
    conf.clear()
    conf.update(before)


@pytest.fixture
def only_by_options(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """A bucket that the environment does not lead to."""
    for name in bucket.server.environment:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOWHERE)
    set_storage_options("s3", endpoint_url=bucket.server.endpoint, key="test")
    set_storage_options("s3://", secret=SECRET)
    return bucket


@pytest.mark.parametrize(
    "package", ["lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"]
)
def test_it_is_imported_from_where_the_trainer_and_fabric_are(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(package)
    own = "lightning.fabric" if package.startswith("lightning.") or package == "lightning" else "lightning_fabric"
    kept = importlib.import_module(f"{own}.storage.options")
    monkeypatch.setattr(kept, "_options", {})
    module.set_storage_options("s3", endpoint_url=NOWHERE)
    assert kept._options["s3"] == {"endpoint_url": NOWHERE}
    assert "set_storage_options" in module.__all__


def test_options_given_once_reach_checkpoints_and_everything_that_uses_fsspec(only_by_options: Bucket) -> None:
    url = only_by_options.url
    save_file({"w": torch.ones(2)}, f"{url}/x.ckpt")
    assert only_by_options.names() == ["x.ckpt"]
    assert torch.equal(load_file(f"{url}/x.ckpt")["w"], torch.ones(2))
    assert get_filesystem(url).ls(url) == [f"{only_by_options.name}/x.ckpt"]  # as loggers and profilers make theirs
    with fsspec.open(f"s3a://{only_by_options.name}/y", "w") as file:
        file.write("y")
    assert only_by_options.get("y") == b"y"


def test_options_of_a_single_call_go_before_those_of_the_run(bucket: Bucket) -> None:
    set_storage_options("s3", endpoint_url=NOWHERE)
    save_file({}, f"{bucket.url}/x.ckpt", {"endpoint_url": bucket.server.endpoint})
    assert bucket.names() == ["x.ckpt"]


def test_options_of_a_run_go_before_those_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for protocol in ("s3", "s3a"):
        monkeypatch.setitem(conf, protocol, {"endpoint_url": NOWHERE, "anon": True})
    set_storage_options("s3", endpoint_url="http://127.0.0.1:10")
    made = S3FileSystem(skip_instance_cache=True)
    assert (made.endpoint_url, made.anon) == ("http://127.0.0.1:10", True)


@pytest.mark.parametrize(
    ("protocol", "given", "error"),
    [
        ("s4", {}, "no protocol 's4'.*'s3'"),
        ("s3://bucket/run", {}, "of a protocol, and not of a place: give 's3'"),
        ("file", {}, "Local paths have no storage options"),
        ("s3", {"endpoint": "hunter2"}, "S3FileSystem has no option `endpoint`: do you mean `endpoint_url`"),
        ("gs", {"key": "hunter2"}, "has no option `key`"),
        ("az", {"qqqqqq": "hunter2"}, r"has no option `qqqqqq`\. It has: account_host, "),
        (
            "s3",
            {"client_kwargs": {"endpoint_ur": "hunter2"}},
            "S3FileSystem has no option `endpoint_ur` in `client_kwargs`: do you mean `endpoint_url`",
        ),
        (
            "s3",
            {"config_kwargs": {"read_timeut": "hunter2"}},
            "no option `read_timeut` in `config_kwargs`: do you mean `read_timeout`",
        ),
        ("s3", {"endpoint_url": ""}, "The storage option `endpoint_url` is empty: give a URL such as http"),
        (
            "s3",
            {"client_kwargs": {"endpoint_url": ""}},
            "The storage option `endpoint_url` in `client_kwargs` is empty",
        ),
        ("gs", {"endpoint_url": ""}, "The storage option `endpoint_url` is empty"),
    ],
)
def test_what_a_client_would_pass_over_is_refused(protocol: str, given: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error) as raised:
        set_storage_options(protocol, **given)
    assert "hunter2" not in str(raised.value)
    assert options._options == {}


@pytest.mark.parametrize(
    ("url", "given", "error"),
    [
        ("s3://bucket/x", {"endpoint": "hunter2"}, "S3FileSystem has no option `endpoint`: do you mean `endpoint_url`"),
        ("gs://bucket/x", {"tokn": "hunter2"}, "has no option `tokn`: do you mean `token`"),
        ("az://bucket/x", {"acount_name": "hunter2"}, "has no option `acount_name`: do you mean `account_name`"),
        (
            "s3://bucket/x",
            {"endpoint_url": "user:hunter2@localhost:9000"},
            NO_SCHEME.format("storage option `endpoint_"),
        ),
        (
            "s3://bucket/x",
            {"client_kwargs": {"endpoint_url": "localhost:9000"}},
            NO_SCHEME.format("storage option `endpoint_url` in `cl"),
        ),
        ("gs://bucket/x", {"endpoint_url": "localhost:9000"}, NO_SCHEME.format("storage option `endpoint_url`")),
        ("s3://bucket/x", {"endpoint_url": ""}, "The storage option `endpoint_url` is empty"),
        (
            "s3://bucket/x",
            {"client_kwargs": {"region": "hunter2"}},
            "`region` in `client_kwargs`: do you mean `region_",
        ),
    ],
)
@pytest.mark.parametrize("source", ["argument", "configuration"])
def test_options_of_a_single_call_and_of_the_configuration_are_looked_at_as_well(
    url: str, given: dict[str, Any], error: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = given if source == "argument" else {}
    if source == "configuration":
        monkeypatch.setitem(conf, url.partition(":")[0], given)
    place = locate(url, options)
    for do in (
        partial(TorchCheckpointIO().save_checkpoint, {}, url, options),
        partial(load_file, url, options=options),
        partial(TorchCheckpointIO().remove_checkpoint, url, options),
        partial(names_in, place),
    ):
        with pytest.raises(ValueError, match=error) as raised:
            do()
        assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_an_endpoint_without_a_scheme_in_the_environment_is_refused(
    bucket: Bucket, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "localhost:9000")
    with pytest.raises(ValueError, match=NO_SCHEME.format(f"variable {variable}")):
        save_file({}, f"{bucket.url}/x.ckpt")
    save_file({}, f"{bucket.url}/x.ckpt", {"endpoint_url": bucket.server.endpoint})  # goes before it
    assert bucket.names() == ["x.ckpt"]


def test_options_that_are_in_no_signature_are_known(tmp_path: Path, bucket: Bucket, monkeypatch: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    keys = tmp_path / "credentials"
    keys.write_text(f"[other]\naws_access_key_id = test\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    set_storage_options("s3", profile="other")
    set_storage_options("gs", retry_timeout=5.0)
    save_file({}, f"{bucket.url}/x.ckpt")
    assert bucket.names() == ["x.ckpt"]


def test_a_client_that_is_not_installed_is_named_with_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "adlfs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "adlfs", None)
    monkeypatch.delitem(_registry, "az", raising=False)
    with pytest.raises(ImportError, match=r"az:// needs a package: .+ Install the extra `azure`"):
        set_storage_options("az", account_name="test")


def test_clients_that_take_any_option_are_given_it() -> None:
    set_storage_options("sftp", username="me", key_filename="id")
    assert conf["ssh"] == conf["sftp"] == {"username": "me", "key_filename": "id"}


@pytest.mark.parametrize("name", ["lightning.fabric", "lightning.pytorch"])
def test_spawned_ranks_have_the_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher hands to the other process, whose fsspec knows nothing of what was set here."""
    set_storage_options("s3", endpoint_url=NOWHERE)
    handed = []
    launchers = importlib.import_module(f"{name}.strategies.launchers.multiprocessing")

    class Launched(Exception):
        pass

    def start_processes(function: CarryingOptions, **_: Any) -> None:
        handed.append(function)
        raise Launched

    monkeypatch.setattr(launchers.mp, "start_processes", start_processes)
    monkeypatch.setattr(launchers, "_check_missing_main_guard", lambda: None)
    package = importlib.import_module(name)
    ranks: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_spawn"}
    if name == "lightning.fabric":
        launch = partial(package.Fabric(**ranks).launch, print)
    else:
        strategy = package.Trainer(**ranks, logger=False).strategy
        strategy._configure_launcher()
        launch = partial(strategy.launcher.launch, print)
    with pytest.raises(Launched):
        launch()
    (carrying,) = handed
    carrying._function = os.getcwd
    there = pickle.dumps(carrying)
    conf.pop("s3")
    monkeypatch.setattr(options, "_options", {})
    assert pickle.loads(there)() == os.getcwd()
    assert conf["s3"] == {"endpoint_url": NOWHERE}
    assert options._options["s3a"] == {"endpoint_url": NOWHERE}  # for what is launched from there
