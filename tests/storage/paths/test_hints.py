"""Errors about a store say what to do: which package, which variable, which bucket."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
import s3fs
from fsspec.registry import _registry

from lightning.fabric.loggers.logs import has_entries, next_version
from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate, text_of_folder
from lightning.fabric.storage.tools.discover import names_in
from lightning.fabric.storage.tools.verify import verify
from lightning.fabric.storage.transport.text import is_there
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tests.servers import SECRET, Bucket
from tests.servers.gcs import PROJECT, GcsServer, gcs_server
from tests.servers.zonal import ZonalServer, lead_gcsfs_to, zonal_server

NOWHERE = "http://127.0.0.1:9"
AZURE = f"DefaultEndpointsProtocol=http;AccountName=test;AccountKey=c2VjcmV0;BlobEndpoint={NOWHERE}/test;"


@pytest.fixture(scope="module")
def gcs() -> Iterator[GcsServer]:
    with gcs_server() as running:
        yield running


@pytest.fixture(scope="module")
def zonal() -> Iterator[ZonalServer]:
    with zonal_server() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def save(url: str, options: dict[str, Any]) -> None:
    save_file({"x": 1}, url, options)


def load(url: str, options: dict[str, Any]) -> None:
    load_file(url, options=options)


both = pytest.mark.parametrize("do", [save, load])


@contextmanager
def said(*texts: str, kind: type[Exception] = OSError) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    for text in texts:
        assert text in str(caught.value)
    assert SECRET not in str(caught.value)


@both
@pytest.mark.parametrize("with_obstore", [True, False])
def test_a_bucket_of_s3_that_is_missing_is_named(
    bucket: Bucket, do: Callable[..., None], with_obstore: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_obstore:
        monkeypatch.setitem(sys.modules, "obstore", None)
    options = {"endpoint_url": bucket.server.endpoint, "key": "test", "secret": SECRET}
    with said("There is no bucket 'no-such-bucket': make it", kind=FileNotFoundError):
        do("s3://no-such-bucket/run/x.ckpt", options)
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt\. Correct the URL"):  # which is not for want of a bucket
        load(f"{bucket.url}/run/none.ckpt", options)


def test_a_bucket_that_nobody_may_ask_for_is_not_said_to_be_missing(bucket: Bucket) -> None:
    options = {"endpoint_url": bucket.server.endpoint, "key": "test", "secret": SECRET}

    def refuse(method: str, path: str) -> int:
        return 403 if path.partition("?")[0].rstrip("/") == f"/{bucket.name}" else 404

    with bucket.refusing(refuse), pytest.raises(FileNotFoundError) as raised:
        save(f"{bucket.url}/run/x.ckpt", options)
    assert "There is no bucket" not in str(raised.value)
    with bucket.refusing(refuse):
        assert not locate(f"{bucket.url}/run/x.ckpt", options).lacks_bucket()


def test_verifying_names_a_bucket_that_is_missing(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.server.environment.items():
        monkeypatch.setenv(name, value)
    with said("There is no bucket 'no-such-bucket'", kind=FileNotFoundError):
        verify(locate("s3://no-such-bucket/run/x.ckpt"))


@both
def test_a_bucket_of_google_that_is_missing_is_named(gcs: GcsServer, do: Callable[..., None]) -> None:
    options = {"endpoint_url": gcs.endpoint, "token": "anon", "project": PROJECT}
    with said("There is no bucket 'no-such-bucket': make it", kind=FileNotFoundError):
        do("gs://no-such-bucket/run/x.ckpt", options)


@both
def test_a_zonal_bucket_that_is_missing_is_named(
    zonal: ZonalServer, do: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    lead_gcsfs_to(zonal, monkeypatch)
    with said("There is no bucket 'no-such-bucket': make it", kind=FileNotFoundError):
        do("gs://no-such-bucket/run/x.ckpt", {"token": "anon"})


@both
def test_s3_without_credentials_says_which_variables_to_set(
    bucket: Bucket, do: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):  # which the fixture has set
        monkeypatch.delenv(name, raising=False)
    with said("Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"):
        do(f"{bucket.url}/run/x.ckpt", {"endpoint_url": bucket.server.endpoint})


@both
def test_azure_without_an_account_says_which_variables_to_set(do: Callable[..., None]) -> None:
    with said("Set AZURE_STORAGE_CONNECTION_STRING", "az://container/x.ckpt", kind=ValueError):
        do("az://container/x.ckpt", {})


@both
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("url", "options", "advice"),
    [
        ("s3://bucket/x.ckpt", {"endpoint_url": NOWHERE, "key": "a", "secret": SECRET}, "See AWS_ENDPOINT_URL"),
        (
            "az://container/x.ckpt",
            {"connection_string": AZURE},
            "See the name of the account",
        ),
        ("webhdfs://127.0.0.1:9/x.ckpt", {}, "See the host and the port in the URL"),
    ],
    ids=["s3", "azure", "webhdfs"],
)
def test_a_server_that_is_not_there_says_where_the_endpoint_comes_from(
    do: Callable[..., None], url: str, options: dict[str, Any], advice: str
) -> None:
    with said(f"Is the server the right one? {advice}"):
        do(url, options)


@both
@pytest.mark.parametrize(
    ("protocol", "module", "package"),
    [
        ("s3", "s3fs", "the extra `s3`, or: pip install s3fs obstore"),
        ("gs", "gcsfs", "the extra `gcs`, or: pip install gcsfs obstore"),
        ("abfs", "adlfs", "the extra `azure`, or: pip install adlfs obstore"),
        ("sftp", "paramiko", "pip install paramiko"),
        ("hdfs", "pyarrow", "pip install pyarrow"),
    ],
)
def test_a_missing_package_is_named_with_what_brings_it(
    do: Callable[..., None], protocol: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == module or name == "fsspec.implementations.sftp":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(_registry, protocol, raising=False)
    with said(f"{protocol}://host/x.ckpt needs a package", package, kind=ImportError):
        do(f"{protocol}://host/x.ckpt", {})
    assert protocol in fsspec.available_protocols()


def test_a_server_without_tls_is_asked_once_by_https(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    url = os.environ["AWS_ENDPOINT_URL"].replace("http:", "https:") + "/x.ckpt"
    with said(f"Could not read {url}: Cannot connect to host", "WRONG_VERSION_NUMBER", "Is the server the right one?"):
        load_file(url)
    assert "tried again" not in caplog.text


@both
def test_half_of_the_credentials_among_the_options_is_said_to_be_one(bucket: Bucket, do: Callable[..., None]) -> None:
    with said("missing: aws_secret_access_key.", "Give the storage options `key` and `secret` together, or neither"):
        do(f"{bucket.url}/x.ckpt", {"key": "mine"})


@both
def test_a_profile_that_is_missing_is_an_error_that_names_the_file(
    bucket: Bucket, do: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nope")
    s3fs.S3FileSystem.clear_instance_cache()
    with said(f"{bucket.url}/x.ckpt: ProfileNotFound: The config profile (nope) could not be found"):
        do(f"{bucket.url}/x.ckpt", {})


@pytest.mark.parametrize("url", ["s3://", "s3:///run", "gs:///run", "abfs:///run"])
@pytest.mark.parametrize("use", [locate, ModelCheckpoint, CSVLogger, text_of_folder])
def test_a_url_without_a_bucket_is_refused_as_soon_as_it_is_given(use: Callable[[str], Any], url: str) -> None:
    with pytest.raises(ValueError, match=f"There is no bucket in '{url}', as in .*://bucket/run: is a variable empty"):
        use(url)


@pytest.mark.parametrize("ask", [names_in, next_version, has_entries, is_there])
def test_a_question_that_a_store_does_not_answer_names_the_place_and_what_to_set(
    bucket: Bucket, ask: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"{bucket.url}/run"
    with bucket.refusing(lambda method, path: 403), said(f"Could not look at {folder}: ", kind=PermissionError):
        ask(folder)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    with said(f"Could not look at {folder}: NoCredentialsError", "Set AWS_ACCESS_KEY_ID"):
        ask(folder)
