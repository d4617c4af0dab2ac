import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest
import s3fs
from fsspec.core import url_to_fs
from fsspec.implementations.dirfs import DirFileSystem

from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.transport.backends import obstore_config
from lightning.fabric.storage.transport.backends.obstore_config import common, native_store
from tests.servers import Bucket
from tests.storage.transport.obstore_config.exercise import NAME, documented_variables, exercise, poison, without_times
from tests.storage.transport.obstore_config.recorder import Answer, Certificates, Recorder, Request, recorder

SECRET = "correct-horse-battery-staple"
KEYS = {"key": "AKIAOPTION", "secret": SECRET}
#: obstore has no value for them that means nothing.
STUBBORN = {
    *("AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID", "AWS_SSE_BUCKET_KEY_ENABLED", "AWS_SSE_CUSTOMER_KEY_BASE64"),
    "AWS_CHECKSUM_ALGORITHM",
}
Told = Callable[[], list[str]]


def native(records: Recorder, **options: Any) -> tuple[Any, str] | None:
    fs, path = url_to_fs(f"s3://bucket/{NAME}", skip_instance_cache=True, **{"endpoint_url": records.url, **options})
    return native_store(fs, path)


def put(native: tuple[Any, str] | None) -> None:
    assert native is not None
    obstore.put(*native, b"0123456789", use_multipart=False)


def test_objects_go_to_a_server_and_come_back(bucket: Bucket) -> None:
    exercise(native_store(*locate(f"{bucket.url}/{NAME}").resolve()))
    assert bucket.names() == [NAME, f"{NAME}.parts"]
    assert bucket.get(NAME) == b"0123456789"


def test_options_are_used(records: Recorder) -> None:
    exercise(native(records, **KEYS, token="TOKEN", client_kwargs={"region_name": "eu-north-1"}))
    assert {request.signer for request in records.requests} == {"AKIAOPTION in eu-north-1"}
    assert {request.headers["x-amz-security-token"] for request in records.requests} == {"TOKEN"}
    assert {request.path for request in records.requests} == {f"bucket/{NAME}", f"bucket/{NAME}.parts"}


def test_the_configuration_of_fsspec_is_used(records: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(s3fs.core.fsspec.config.conf, "s3", {"endpoint_url": records.url, **KEYS})
    put(native_store(*locate(f"s3://bucket/{NAME}").resolve()))
    assert records.requests[0].signer == "AKIAOPTION in us-east-1"


def test_the_environment_is_used_as_the_client_found_it(records: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        **{"AWS_ACCESS_KEY_ID": "AKIAENV", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": "TOKEN"},
        **{"AWS_DEFAULT_REGION": "eu-west-1", "AWS_ENDPOINT_URL_S3": records.url},
    }.items():
        monkeypatch.setenv(name, value)
    put(native(records, endpoint_url=None))
    assert records.requests[0].signer == "AKIAENV in eu-west-1"
    assert records.requests[0].headers["x-amz-security-token"] == "TOKEN"


def test_a_profile_is_used(records: Recorder) -> None:
    Path(os.environ["AWS_CONFIG_FILE"]).write_text(
        f"[profile lab]\nregion = eu-south-1\nendpoint_url = {records.url}\ns3 =\n  max_concurrent_requests = 3\n"
    )
    Path(os.environ["AWS_SHARED_CREDENTIALS_FILE"]).write_text(
        f"[lab]\naws_access_key_id = AKIALAB\naws_secret_access_key = {SECRET}\n"
    )
    put(native(records, endpoint_url=None, profile="lab"))
    assert records.requests[0].signer == "AKIALAB in eu-south-1"


def test_credentials_are_asked_for_anew_when_they_run_out(
    records: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # with less than ten minutes left, the client runs the program again before each use
    program = tmp_path / "credentials"
    answer = {"Version": 1, "AccessKeyId": "AKIA$n", "SecretAccessKey": SECRET, "Expiration": "$expiration"}
    program.write_text(
        f"#!/bin/sh\nn=$(cat {tmp_path}/n || echo 0)\necho $((n + 1)) > {tmp_path}/n\n"
        f"expiration=$(date -u -d '+5 minutes' +%Y-%m-%dT%H:%M:%SZ)\ncat <<END\n{json.dumps(answer)}\nEND\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    Path(os.environ["AWS_CONFIG_FILE"]).write_text(f"[default]\ncredential_process = {program}\n")
    monkeypatch.setattr(common, "_RECHECK", common.timedelta(0))
    asked = native(records)
    put(asked)
    time.sleep(0.15)  # obstore does not ask more often than every 0.1 s
    put(asked)
    first, second = (int(request.signer.removeprefix("AKIA").split()[0]) for request in records.requests)
    assert second > first


def test_anonymous_requests_are_not_signed(records: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "OTHER")
    exercise(native(records, anon=True))
    assert not any("authorization" in request.headers for request in records.requests)


@pytest.mark.parametrize(
    ("style", "url"), [("path", "http://s3.test/base/bucket/"), ("virtual", "http://bucket.s3.test/base/")]
)
def test_the_bucket_is_where_the_client_has_it_and_its_proxy_is_used(records: Recorder, style: str, url: str) -> None:
    config = {"s3": {"addressing_style": style}, "proxies": {"http": records.url}}
    put(native(records, **KEYS, endpoint_url="http://s3.test/base", config_kwargs=config))
    assert records.requests[0].url.startswith(f"{url}run/")


def test_a_proxy_of_the_environment_is_used_unless_it_is_bypassed(
    records: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorder() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        put(native(records, **KEYS))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        put(native(records, **KEYS))
        assert [request.url for request in proxy.requests] == [records.requests[0].url]


def test_a_bucket_in_another_region_is_found_as_the_client_finds_it(records: Recorder) -> None:
    def redirect(request: Request) -> Answer | None:
        if request.method != "HEAD":
            return None
        return (200 if "eu-central-1" in request.url else 301), {"x-amz-bucket-region": "eu-central-1"}

    records.rule = redirect
    put(native(records, **KEYS, endpoint_url=None, use_ssl=False, config_kwargs={"proxies": {"http": records.url}}))
    assert records.requests[-1].url.startswith("http://bucket.s3.eu-central-1.amazonaws.com/run/")
    assert records.requests[-1].signer == "AKIAOPTION in eu-central-1"
    assert {request.path for request in records.requests} == {NAME}  # and not the bucket, which a policy may not allow


def test_encryption_and_payment_are_asked_for(records: Recorder) -> None:
    wanted = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "arn:key", "BucketKeyEnabled": True}
    exercise(native(records, **KEYS, s3_additional_kwargs=wanted, requester_pays=True))
    assert {request.headers["x-amz-request-payer"] for request in records.requests} == {"requester"}
    created = [request for request in records.requests if request.method == "POST" or not request.query]
    for request in (
        request for request in created if request.method in ("PUT", "POST") and "uploadId" not in request.query
    ):
        assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
        assert request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "arn:key"
        assert request.headers["x-amz-server-side-encryption-bucket-key-enabled"] == "true"


@pytest.mark.parametrize("signed", [True, False])
def test_payloads_are_signed_unless_the_client_does_not(records: Recorder, signed: bool) -> None:
    put(native(records, **KEYS, config_kwargs={"s3": {"payload_signing_enabled": signed}}))
    assert (records.requests[0].headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD") is signed


def test_only_certificates_that_the_client_trusts_are_trusted(
    tls_records: Recorder, certificates: Certificates
) -> None:
    put(native(tls_records, **KEYS, client_kwargs={"verify": str(certificates.authority)}))
    put(native(tls_records, **KEYS, client_kwargs={"verify": False}))
    assert {request.headers["x-amz-content-sha256"] for request in tls_records.requests} == {"UNSIGNED-PAYLOAD"}
    with pytest.raises(obstore.exceptions.GenericError, match=r"(?i)certificate"):
        put(native(tls_records, **KEYS))


def test_variables_of_obstore_have_no_effect(records: Recorder, monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    fs, path = url_to_fs(f"s3://bucket/{NAME}", skip_instance_cache=True, endpoint_url=records.url, **KEYS)
    exercise(native_store(fs, path))
    expected = without_times(records.requests)
    records.requests.clear()
    with recorder() as elsewhere:
        others = ["AWS_PROXY_URL", "AWS_USER_AGENT", "AWS_DEFAULT_CONTENT_TYPE"]
        for name in [*documented_variables("aws"), *others]:
            if name not in STUBBORN:
                monkeypatch.setenv(name, poison(name, elsewhere.url))
        monkeypatch.setenv("AWS_TIMEOUT", "1ms")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "false")
        monkeypatch.setattr(obstore_config, "_stores", {})
        exercise(native_store(fs, path))
        assert without_times(records.requests) == expected
        assert elsewhere.requests == []
    assert told() == []


@pytest.mark.parametrize("name", sorted(STUBBORN))
def test_a_variable_that_obstore_would_heed_keeps_it_out(
    records: Recorder, monkeypatch: pytest.MonkeyPatch, told: Told, name: str
) -> None:
    monkeypatch.setenv(name, SECRET)
    assert native(records, **KEYS) is None
    assert_told(told, f"the environment variable {name} ")


def test_a_variable_that_an_option_overrides_does_not(records: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    put(native(records, **KEYS, s3_additional_kwargs={"ServerSideEncryption": "AES256"}))
    assert records.requests[0].headers["x-amz-server-side-encryption"] == "AES256"


class OtherFileSystem(s3fs.S3FileSystem):
    protocol = "other"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"s3_additional_kwargs": {"StorageClass": SECRET}}, "`StorageClass`"),
        ({"s3_additional_kwargs": {"SSECustomerKey": SECRET}}, "`SSECustomerKey`"),
        ({"s3_additional_kwargs": {"ServerSideEncryption": SECRET}}, "`ServerSideEncryption`"),
        ({"s3_additional_kwargs": {"SSEKMSKeyId": SECRET}}, "`ServerSideEncryption`"),
        ({"config_kwargs": {"user_agent_extra": SECRET}}, "`user_agent_extra`"),
        ({"config_kwargs": {"client_cert": SECRET}}, "`client_cert`"),
        ({"config_kwargs": {"request_checksum_calculation": "when_supported"}}, "`request_checksum_calculation`"),
        ({"config_kwargs": {"s3": {"some_style": SECRET}}}, "`some_style`"),
        ({"config_kwargs": {"signature_version": "s3"}}, "does not sign requests as the client does"),
        ({"client_kwargs": {"aws_account_id": SECRET}}, "`aws_account_id`"),
        ({"session": s3fs.core.aiobotocore.session.AioSession()}, "`session`"),
        ({"session_vars": {"x": SECRET}}, "`session_vars`"),
        ({"version_aware": True}, "`version_aware`"),
        ({"local_expiry_check": True}, "`local_expiry_check`"),
        ({"config_kwargs": {"max_pool_connections": 2}}, "`max_pool_connections`"),
        ({"asynchronous": True}, "`asynchronous`"),
        ({"key": None, "secret": None}, "no credentials"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_goes_through_fsspec(
    records: Recorder, told: Told, options: dict[str, Any], reason: str
) -> None:
    assert native(records, **{**KEYS, **options}) is None
    assert native(records, **{**KEYS, **options}) is None
    assert_told(told, reason)
    assert records.requests == []


@pytest.mark.parametrize("name", ["a//b", "a/", "./a", "a/../b", "a\nb", "", "a\x7f"])
def test_a_name_that_obstore_would_change_goes_through_fsspec(records: Recorder, told: Told, name: str) -> None:
    fs, _ = url_to_fs("s3://bucket/x", endpoint_url=records.url, **KEYS)
    assert native_store(fs, f"bucket/{name}") is None
    assert_told(told, "names with empty, `.` or `..` segments or control characters")


def test_a_class_that_extends_the_known_one_goes_through_fsspec(records: Recorder, told: Told) -> None:
    assert native_store(OtherFileSystem(endpoint_url=records.url, **KEYS), "bucket/x") is None
    assert_told(told, "the class extends", "OtherFileSystem")


def test_a_wrapper_goes_through_fsspec(records: Recorder, told: Told) -> None:
    fs, _ = url_to_fs("s3://bucket/x", endpoint_url=records.url, **KEYS)
    assert native_store(DirFileSystem("bucket", fs), "x") is None
    assert_told(told, "the class wraps another file system", "DirFileSystem")


def assert_told(told: Told, reason: str, kind: str = "S3FileSystem") -> None:
    (line,) = told()
    assert line.startswith(f"Transfers with {kind} go through fsspec and not through obstore: ")
    assert reason in line
    assert SECRET not in line
