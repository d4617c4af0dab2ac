"""Credentials that expire and are renewed beside a run, as a job does that rewrites `~/.aws/credentials`."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gcsfs
import pytest
import torch
from adlfs import AzureBlobFileSystem
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from google.oauth2 import service_account

from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.credentials import keep_current
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.remove import remove
from lightning.fabric.storage.transport import multipart, retry
from lightning.fabric.storage.transport.open import open_writer
from lightning.fabric.storage.transport.server_side_copy import copy_file
from lightning.fabric.storage.transport.text import is_there
from tests.servers import SECRET, Bucket

MIB = 2**20
OLD, NEW = "ASIAOLD", "ASIANEW"
TOKEN = "session-token-of-the-test"
STATE = {"w": torch.ones(3)}


@pytest.fixture(autouse=True, params=["obstore", "s3fs"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)


@pytest.fixture
def renew(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Has the file hold the new key, and the old one expire, with which a file has been saved."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    write_keys(tmp_path, OLD)
    save_file(STATE, f"{bucket.url}/run/x")

    def expire() -> None:
        write_keys(tmp_path, NEW)
        bucket.server.proxy.expired.add(OLD)

    yield expire
    bucket.server.proxy.expired.clear()


def write_keys(folder: Path, key: str) -> None:
    secrets = f"aws_secret_access_key = {SECRET}\naws_session_token = {TOKEN}\n"
    (folder / "credentials").write_text(f"[default]\naws_access_key_id = {key}\n{secrets}")


def upload(root: str) -> None:
    with open_writer(locate(f"{root}/y"), lean=True) as file:
        file.write(bytes(6 * MIB))


REQUESTS: list[Callable[[str], Any]] = [
    lambda root: save_file(STATE, f"{root}/x"),
    upload,
    lambda root: load_file(f"{root}/x"),
    lambda root: locate(f"{root}/x").is_file(),
    lambda root: locate(root).list_names(),
    lambda root: copy_file(locate(f"{root}/x"), locate(f"{root}/z")),
    lambda root: remove(locate(f"{root}/x")),
]


@pytest.mark.parametrize("ask", REQUESTS, ids=["save", "parts", "load", "question", "list", "copy", "remove"])
def test_what_was_renewed_in_its_file_is_used(
    bucket: Bucket, renew: Callable[[], None], monkeypatch: pytest.MonkeyPatch, ask: Callable[[str], Any]
) -> None:
    monkeypatch.setattr(multipart, "SMALLEST_LEAN_PART", 5 * MIB)
    renew()
    assert ask(f"{bucket.url}/run") in (None, True, ["x"]) or ask is REQUESTS[2]


def test_what_was_renewed_in_the_environment_is_used(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OLD)
    save_file(STATE, f"{bucket.url}/x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", NEW)
    monkeypatch.setattr(bucket.server.proxy, "expired", {OLD})
    save_file(STATE, f"{bucket.url}/x")
    load_file(f"{bucket.url}/x")


def test_an_upload_on_its_way_goes_on_with_what_was_renewed(
    bucket: Bucket, renew: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "SMALLEST_LEAN_PART", 5 * MIB)

    def renew_in_the_midst(method: str, path: str) -> None:
        if "partNumber=1&" in path:
            write_keys(tmp_path, NEW)
            time.sleep(0.15)  # obstore does not ask more often than every 0.1 s
        if "partNumber=2&" in path:
            bucket.server.proxy.expired.add(OLD)

    with (
        bucket.refusing(renew_in_the_midst),
        open_writer(locate(f"{bucket.url}/y", {"max_concurrency": 1}), lean=True) as file,
    ):
        for _ in range(16):
            file.write(bytes(MIB))
    assert len(bucket.get("y")) == 16 * MIB


def test_a_read_that_was_too_early_is_made_once_more(bucket: Bucket, renew: Callable[[], None]) -> None:
    def renew_too_late(method: str, path: str) -> None:
        if method == "GET":
            renew()

    with bucket.refusing(renew_too_late):
        load_file(f"{bucket.url}/run/x")


@pytest.mark.parametrize("content", ["", "[default]\naws_access_key_id = ASIAOLD\n", "[defau"])
def test_a_file_that_is_just_being_written_changes_nothing(
    bucket: Bucket, renew: Callable[[], None], tmp_path: Path, content: str
) -> None:
    (tmp_path / "credentials").write_text(content)
    save_file(STATE, f"{bucket.url}/run/x")
    load_file(f"{bucket.url}/run/x")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("ask", [REQUESTS[0], REQUESTS[1], REQUESTS[2], is_there], ids=["save", "parts", "load", "ask"])
def test_what_has_expired_and_was_not_renewed_is_said_with_its_place(
    bucket: Bucket, renew: Callable[[], None], tmp_path: Path, ask: Callable[[str], Any]
) -> None:
    bucket.server.proxy.expired.add(OLD)
    with pytest.raises(PermissionError, match=r"The credentials have expired, or are not valid") as caught:
        ask(f"{bucket.url}/run")
    assert f"They were looked for in {tmp_path}/credentials (profile 'default'): renew them there." in str(caught.value)
    assert not any(secret in str(caught.value) for secret in (SECRET, TOKEN, OLD))


def test_options_that_have_expired_are_named(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket.server.proxy, "expired", {OLD})
    options = {"key": OLD, "secret": SECRET, "token": TOKEN}
    with pytest.raises(
        PermissionError, match=r"looked for in the storage options `key`, `secret` and `token`"
    ) as caught:
        save_file(STATE, f"{bucket.url}/x", options)
    assert not any(secret in str(caught.value) for secret in (SECRET, TOKEN, OLD))


def service_account_file(path: Path, email: str) -> None:
    key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    info = {"type": "service_account", "client_email": email, "private_key": key.decode()}
    path.write_text(json.dumps({**info, "token_uri": "https://oauth2.test/token"}))


@pytest.mark.parametrize("by_variable", [True, False])
def test_a_file_of_google_that_was_rewritten_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    def refresh(self: Any, request: Any) -> None:
        self.token = f"token of {self.service_account_email}"

    monkeypatch.setattr(service_account.Credentials, "refresh", refresh)
    file = tmp_path / "key.json"
    service_account_file(file, "old@test")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    fs = gcsfs.GCSFileSystem(project="", token="google_default" if by_variable else str(file), skip_instance_cache=True)
    sent = []
    for email in ("old@test", "new@test"):
        service_account_file(file, email)
        keep_current(fs)
        headers: dict[str, str] = {}
        fs.credentials.apply(headers)
        file.write_text("{")  # it is just being written
        fs.credentials.apply(headers)
        sent.append(headers["authorization"])
    assert sent == ["Bearer token of old@test", "Bearer token of new@test"]


@pytest.fixture
def _new_clients_of_azure() -> Iterator[None]:
    AzureBlobFileSystem.clear_instance_cache()
    yield
    AzureBlobFileSystem.clear_instance_cache()


@pytest.mark.usefixtures("_new_clients_of_azure")
def test_a_signature_of_azure_that_was_renewed_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "lab")
    for signature in ("sv=2024-01-01&sig=old", "sv=2024-01-01&sig=new"):
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", signature)
        fs, _ = locate("az://container/x").resolve()
        assert fs.service_client.url.endswith(f"?{signature}")
        connected = fs.service_client
        assert locate("az://container/x").resolve()[0].service_client is connected


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_a_save_to_google_without_any_credentials_says_at_once_what_to_set(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "fsspec":
        monkeypatch.setitem(sys.modules, "obstore", None)
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setattr(retry, "DEADLINE_S", 1.0)
    gcsfs.GCSFileSystem.clear_instance_cache()
    with pytest.raises(OSError, match=r"no credentials were found.* GOOGLE_APPLICATION_CREDENTIALS"):
        save_file({}, locate("gs://bucket/run/x.ckpt"))
