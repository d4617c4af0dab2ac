import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gcsfs
import obstore
import pytest
from gcsfs.extended_gcsfs import BucketType, ExtendedGcsFileSystem
from google.auth.credentials import AnonymousCredentials
from google.oauth2.credentials import Credentials

from lightning.fabric.storage.transport.backends import obstore_config
from lightning.fabric.storage.transport.backends.obstore_config import common, native_store
from tests.storage.transport.obstore_config.exercise import NAME, documented_variables, exercise, poison, without_times
from tests.storage.transport.obstore_config.recorder import Recorder, recorder

TOKEN = "ya29.correct-horse-battery-staple"
STUBBORN = {"GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"}
Told = Callable[[], list[str]]

pytestmark = pytest.mark.usefixtures("trusted")


def opened(records: Recorder, **options: Any) -> tuple[gcsfs.GCSFileSystem, str]:
    given = {"token": Credentials(TOKEN), "endpoint_url": records.url, "skip_instance_cache": True, **options}
    # what gcsfs makes, unless its support for zonal buckets is turned off in the environment
    return ExtendedGcsFileSystem(**given), f"bucket/{NAME}"


def test_objects_go_to_a_server_and_come_back(tls_records: Recorder) -> None:
    exercise(native_store(*opened(tls_records)))
    assert {request.path for request in tls_records.requests} == {f"bucket/{NAME}", f"bucket/{NAME}.parts"}
    assert {request.headers["authorization"] for request in tls_records.requests} == {f"Bearer {TOKEN}"}
    assert not any("x-goog-user-project" in request.headers for request in tls_records.requests)


class Refreshed(Credentials):
    """A new token whenever one is asked for."""

    count = 0

    def refresh(self, request: Any) -> None:
        self.count += 1
        self.token = f"token {self.count}"
        self.expiry = datetime.datetime.utcnow() + datetime.timedelta(seconds=60)


def test_tokens_are_refreshed_by_the_credentials_of_the_client(
    tls_records: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "_RECHECK", datetime.timedelta(0))
    native = native_store(*opened(tls_records, token=Refreshed(None)))
    assert native is not None
    obstore.put(*native, b"1", use_multipart=False)
    time.sleep(0.15)  # obstore does not ask more often than every 0.1 s
    obstore.put(*native, b"1", use_multipart=False)
    sent = [request.headers["authorization"] for request in tls_records.requests]
    assert len(set(sent)) == 2


@pytest.mark.parametrize("token", ["anon", AnonymousCredentials()])
def test_without_credentials_objects_are_read_and_not_written(tls_records: Recorder, told: Told, token: Any) -> None:
    tls_records.objects[f"bucket/{NAME}"] = b"0123"
    fs, path = opened(tls_records, token=token)
    native = native_store(fs, path, reading=True)
    assert native is not None
    assert bytes(obstore.get_range(*native, start=1, end=3)) == b"12"
    assert "authorization" not in tls_records.requests[0].headers
    assert native_store(fs, path) is None
    assert_told(told, "cannot write to GCS without credentials")


@pytest.mark.parametrize(
    ("options", "project"),
    [
        ({"requester_pays": True, "project": "payer"}, "payer"),
        ({"requester_pays": "another"}, "another"),
        ({"token": Credentials(TOKEN, quota_project_id="quota")}, "quota"),
    ],
)
def test_the_project_that_pays_is_named(tls_records: Recorder, options: dict[str, Any], project: str) -> None:
    exercise(native_store(*opened(tls_records, **options)))
    assert {request.headers["x-goog-user-project"] for request in tls_records.requests} == {project}


def test_variables_of_obstore_have_no_effect(
    tls_records: Recorder, monkeypatch: pytest.MonkeyPatch, told: Told, tmp_path: Path
) -> None:
    fs, path = opened(tls_records)
    exercise(native_store(fs, path))
    expected = without_times(tls_records.requests)
    tls_records.requests.clear()
    with recorder() as elsewhere:
        proxies = ["HTTPS_PROXY", "ALL_PROXY"]  # which gcsfs does not heed
        for name in [*documented_variables("gcs"), "GOOGLE_PROXY_URL", "GOOGLE_USER_AGENT", *proxies]:
            if name not in STUBBORN:
                monkeypatch.setenv(name, poison(name, elsewhere.url))
        monkeypatch.setattr(obstore_config, "_stores", {})
        exercise(native_store(fs, path))
        assert without_times(tls_records.requests) == expected
        assert elsewhere.requests == []
    assert told() == []


@pytest.mark.parametrize("name", sorted(STUBBORN))
def test_a_variable_that_obstore_would_heed_keeps_it_out(
    tls_records: Recorder, monkeypatch: pytest.MonkeyPatch, told: Told, name: str
) -> None:
    monkeypatch.setenv(name, TOKEN)
    assert native_store(*opened(tls_records)) is None
    assert_told(told, f"the environment variable {name} ")


def test_an_emulator_goes_through_fsspec(records: Recorder, monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", records.url)
    assert native_store(*opened(records, endpoint_url=None)) is None
    assert native_store(*opened(records)) is None
    assert_told(told, "an emulator")


def test_zonal_buckets_go_through_gcsfs(tls_records: Recorder, told: Told) -> None:
    fs, path = opened(tls_records)
    fs._storage_layout_cache["bucket"] = BucketType.ZONAL_HIERARCHICAL  # as after the first transfer of gcsfs
    assert native_store(fs, path) is None
    assert_told(told, "zonal buckets")


@pytest.mark.parametrize(("endpoint", "asked"), [(None, ["bucket"]), ("https://gcs.example.org", [])])
def test_the_kind_of_a_bucket_is_asked_of_google_only(
    monkeypatch: pytest.MonkeyPatch, tls_records: Recorder, told: Told, endpoint: str | None, asked: list[str]
) -> None:
    questions = []

    async def answer(fs: Any, bucket: str) -> BucketType:
        questions.append(bucket)
        return BucketType.NON_HIERARCHICAL

    monkeypatch.setattr(ExtendedGcsFileSystem, "_get_bucket_type", answer)
    fs, path = opened(tls_records, endpoint_url=endpoint)
    assert native_store(fs, path) is not None
    assert native_store(fs, path, reading=True) is not None
    assert questions == asked


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"consistency": "md5"}, "`consistency`"),
        ({"version_aware": True}, "`version_aware`"),
        ({"requests_timeout": 3}, "`requests_timeout`"),
        ({"session_kwargs": {"headers": {"x": TOKEN}}}, "`headers`"),
        ({"asynchronous": True}, "`asynchronous`"),
        ({"some_option": TOKEN}, "`some_option`"),
    ],
)
def test_what_cannot_be_expressed_goes_through_fsspec(
    tls_records: Recorder, told: Told, options: dict[str, Any], reason: str
) -> None:
    assert native_store(*opened(tls_records, **options)) is None
    assert_told(told, reason)
    assert tls_records.requests == []


def assert_told(told: Told, reason: str) -> None:
    (line,) = told()
    assert line.startswith("Transfers with ExtendedGcsFileSystem go through fsspec and not through obstore: ")
    assert reason in line
    assert TOKEN not in line
