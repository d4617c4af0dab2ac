"""A store that refuses valid credentials is told which permission to grant, and to whom; wrong ones, what to set."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adlfs import AzureBlobFileSystem
from gcsfs import GCSFileSystem

from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.tools.discover import names_in
from lightning.fabric.storage.tools.verify import verify
from tests.servers import SECRET, Bucket, Refusal
from tests.servers.proxy import Proxy, proxy_before

ROBOT = "robot@project.iam.gserviceaccount.com"
ARN = "arn:aws:iam::123456789012:user/trainer"


@pytest.fixture(autouse=True, params=["obstore", "fsspec"])
def _engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "fsspec":
        monkeypatch.setitem(sys.modules, "obstore", None)
    yield
    for kind in (GCSFileSystem, AzureBlobFileSystem):
        kind.clear_instance_cache()


@pytest.fixture
def nobody() -> Iterator[Proxy]:
    """A server that answers with nothing but refusals."""
    with proxy_before(("127.0.0.1", 9)) as proxy:
        yield proxy


def save(url: str) -> None:
    save_file({"x": 1}, url)


def look(url: str) -> None:
    names_in(url.rpartition("/")[0])


def message(do: Callable[[str], Any], url: str) -> str:
    with pytest.raises(PermissionError) as raised:
        do(url)
    assert url.rpartition("/")[0] in str(raised.value)
    assert SECRET not in str(raised.value)
    return str(raised.value)


DENIED = Refusal.of_s3(403, "AccessDenied", "Access Denied")
EXPLAINED = [
    (save, "PUT", "s3:PutObject"),
    (load_file, "GET", "s3:GetObject"),
    (look, "GET", "s3:ListBucket"),
    (TorchCheckpointIO().remove_checkpoint, "DELETE", "s3:DeleteObject"),
]
HEAD = (load_file, "HEAD", "s3:GetObject")  # whose answer has no body
of_each_action = pytest.mark.parametrize(("do", "method", "permission"), EXPLAINED)


@pytest.mark.parametrize(("do", "method", "permission"), [*EXPLAINED, HEAD])
def test_s3_names_the_permission(bucket: Bucket, do: Callable[[str], Any], method: str, permission: str) -> None:
    url = f"{bucket.url}/run/x.ckpt"
    save(url)
    with bucket.refusing(lambda asked, path: DENIED if asked == method else None):
        text = message(do, url)
    assert f"the permission `{permission}`" in text
    assert ("the credentials may be wrong, or lack" in text) == (method == "HEAD")
    assert ("Set AWS_ACCESS_KEY_ID" in text) == (method == "HEAD")


@of_each_action
def test_s3_names_who_lacks_the_permission(
    bucket: Bucket, do: Callable[[str], Any], method: str, permission: str
) -> None:
    url = f"{bucket.url}/run/x.ckpt"
    save(url)
    why = f'User: {ARN} is not authorized to perform: s3:Said on resource: "arn:aws:s3:::b/run/x.ckpt"'
    denied = Refusal.of_s3(403, "AccessDenied", why)
    with bucket.refusing(lambda asked, path: denied if asked == method else None):
        assert f"Grant {ARN} the permission `s3:Said`." in message(do, url)


@of_each_action
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("SignatureDoesNotMatch", "The request signature we calculated does not match the signature you provided."),
        ("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."),
    ],
)
def test_wrong_keys_of_s3_are_to_be_set(
    bucket: Bucket, do: Callable[[str], Any], method: str, permission: str, code: str, why: str
) -> None:
    url = f"{bucket.url}/run/x.ckpt"
    save(url)
    wrong = Refusal.of_s3(403, code, why)
    with bucket.refusing(lambda asked, path: wrong if asked == method else None):
        text = message(do, url)
    assert "AWS_ACCESS_KEY_ID" in text
    assert permission not in text


@pytest.mark.parametrize("folder", ["", "/run"])
def test_verifying_with_a_wrong_key_which_no_answer_names_says_what_to_set_and_to_grant(
    bucket: Bucket, folder: str
) -> None:
    wrong = Refusal.of_s3(403, "SignatureDoesNotMatch", "The request signature we calculated does not match.")
    with bucket.refusing(lambda asked, path: wrong), pytest.raises(PermissionError) as raised:
        verify(locate(f"{bucket.url}{folder}"))
    assert "the credentials may be wrong, or lack the permission `s3:GetObject`" in str(raised.value)
    assert "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in str(raised.value)


def test_an_upload_that_may_not_be_aborted_names_the_permission(bucket: Bucket, caplog: Any) -> None:
    def refuse(method: str, path: str) -> Refusal | None:
        return DENIED if method == "DELETE" or "partNumber=2" in path else None

    with bucket.refusing(refuse), caplog.at_level(logging.WARNING), pytest.raises(PermissionError):
        save_file({"x": torch.zeros(2**24)}, f"{bucket.url}/run/x.ckpt")
    (text,) = [record.getMessage() for record in caplog.records if "Could not abort" in record.getMessage()]
    assert "Grant the permission `s3:AbortMultipartUpload`" in text


@pytest.mark.parametrize(
    ("do", "permission"),
    [
        (save, "storage.objects.create"),
        (load_file, "storage.objects.get"),
        (look, "storage.objects.list"),
        (TorchCheckpointIO().remove_checkpoint, "storage.objects.get"),  # what is to be removed is looked at first
    ],
)
@pytest.mark.parametrize("tells", [True, False])
def test_google_names_the_permission(
    nobody: Proxy, do: Callable[[str], Any], permission: str, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{nobody.server_port}")
    why = f"{ROBOT} does not have {permission} access to the Google Cloud Storage object." if tells else "Forbidden"
    refusal = Refusal(403, json.dumps({"error": {"code": 403, "message": why}}))
    with nobody.following(lambda method, path: refusal):
        text = message(do, "gs://some/run/x.ckpt")
    assert "GOOGLE_APPLICATION_CREDENTIALS" not in text
    assert f"Grant {ROBOT} the permission `{permission}`." in text if tells else "the permission `storage." in text


def test_google_that_knows_nobody_is_to_be_given_credentials(nobody: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{nobody.server_port}")
    why = "Anonymous caller does not have storage.objects.create access to the Google Cloud Storage object."
    refusal = Refusal(401, json.dumps({"error": {"code": 401, "message": why}}))
    with nobody.following(lambda method, path: refusal):
        assert "GOOGLE_APPLICATION_CREDENTIALS" in message(save, "gs://some/run/x.ckpt")


@pytest.mark.parametrize(
    ("do", "role", "permission"),
    [
        (save, "Contributor", "create and write"),
        (load_file, "Reader", "read"),
        (look, "Reader", "list"),
    ],
)
def test_azure_names_the_role(
    nobody: Proxy, do: Callable[[str], Any], role: str, permission: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = f"AccountName=a;AccountKey=c2VjcmV0;BlobEndpoint=http://127.0.0.1:{nobody.server_port}/a;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{account}")
    why = "This request is not authorized to perform this operation using this permission."
    refusal = Refusal.of_s3(403, "AuthorizationPermissionMismatch", why)
    with nobody.following(lambda method, path: refusal):
        text = message(do, "az://some/run/x.ckpt")
    assert f"`Storage Blob Data {role}`" in text
    assert permission in text
    assert ("Set AZURE" in text) == ("does not say why" in text)


def test_wrong_keys_of_azure_are_to_be_set(nobody: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    account = f"AccountName=a;AccountKey=c2VjcmV0;BlobEndpoint=http://127.0.0.1:{nobody.server_port}/a;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"DefaultEndpointsProtocol=http;{account}")
    why = "Server failed to authenticate the request."
    refusal = Refusal.of_s3(403, "AuthenticationFailed", why)
    with nobody.following(lambda method, path: refusal):
        assert "Set AZURE_STORAGE_CONNECTION_STRING" in message(save, "az://some/run/x.ckpt")
