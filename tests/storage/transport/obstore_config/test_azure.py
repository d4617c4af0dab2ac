import time
from collections.abc import Callable
from typing import Any

import adlfs
import obstore
import pytest
from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential
from fsspec.core import url_to_fs

from lightning.fabric.storage.transport.backends import obstore_config
from lightning.fabric.storage.transport.backends.obstore_config import common, native_store
from tests.storage.transport.obstore_config.exercise import documented_variables, exercise, poison, without_times
from tests.storage.transport.obstore_config.recorder import Recorder, recorder

ACCOUNT, KEY = "lab", "c2VjcmV0LWtleS1vZi10aGUtYWNjb3VudA=="
SIGNATURE = "sv=2024-01-01&sp=rcw&sig=a%2Bb%2Fc%3D"
#: adlfs takes "?" and "#" in one name for another name.
NAME = "run/epoch=1 [b]? *%+ü.ckpt"
Told = Callable[[], list[str]]


def opened(**options: Any) -> tuple[adlfs.AzureBlobFileSystem, str]:
    return url_to_fs(f"az://container/{NAME}", skip_instance_cache=True, **options)


def emulated(records: Recorder, secret: str = f"AccountKey={KEY}") -> str:
    return f"AccountName={ACCOUNT};{secret};BlobEndpoint={records.url}/{ACCOUNT}"


def hosted(records: Recorder) -> dict[str, str]:
    return {"account_name": ACCOUNT, "account_host": f"{records.url.partition('://')[2]}/{ACCOUNT}"}


def test_objects_go_to_an_emulator_and_come_back(records: Recorder) -> None:
    exercise(native_store(*opened(connection_string=emulated(records))))
    assert all(request.is_signed_with(ACCOUNT, KEY) for request in records.requests)
    assert {request.path for request in records.requests} == {
        f"{ACCOUNT}/container/{NAME}",
        f"{ACCOUNT}/container/{NAME}.parts",
    }


def test_a_hash_is_a_part_of_a_name(records: Recorder) -> None:
    fs, path = url_to_fs("az://container/a#b", connection_string=emulated(records))
    exercise(native_store(fs, path))
    assert f"{ACCOUNT}/container/a#b" in records.objects


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("options", [{"account_key": KEY}, {"credential": AzureNamedKeyCredential(ACCOUNT, KEY)}])
def test_the_key_of_the_account_is_used(tls_records: Recorder, options: dict[str, Any]) -> None:
    exercise(native_store(*opened(**hosted(tls_records), **options)))
    assert all(request.is_signed_with(ACCOUNT, KEY) for request in tls_records.requests)


def test_the_environment_is_used_as_the_client_found_it(records: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", emulated(records))
    exercise(native_store(*opened()))
    assert all(request.is_signed_with(ACCOUNT, KEY) for request in records.requests)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize(
    "options", [{"sas_token": SIGNATURE}, {"sas_token": f"?{SIGNATURE}"}, {"credential": AzureSasCredential(SIGNATURE)}]
)
def test_a_shared_access_signature_is_sent_as_it_is(tls_records: Recorder, options: dict[str, Any]) -> None:
    exercise(native_store(*opened(**hosted(tls_records), **options)))
    assert all(set(SIGNATURE.split("&")) <= set(sent(request)) for request in tls_records.requests)
    assert not any("authorization" in request.headers for request in tls_records.requests)


def sent(request: Any) -> list[str]:
    return request.target.partition("?")[2].split("&")


def test_a_shared_access_signature_of_a_connection_string_is_used(records: Recorder) -> None:
    secret = f"SharedAccessSignature={SIGNATURE}"
    exercise(native_store(*opened(connection_string=emulated(records, secret))))
    assert all(set(SIGNATURE.split("&")) <= set(sent(request)) for request in records.requests)


class Tokens:
    """Credentials of Microsoft Entra ID, in the form that adlfs takes."""

    count = 0

    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        assert scopes == ("https://storage.azure.com/.default",)
        self.count += 1
        return AccessToken(f"token-{self.count}", int(time.time()) + 3600)

    async def close(self) -> None:
        pass


@pytest.mark.usefixtures("trusted")
def test_tokens_come_from_the_credentials_of_the_client(tls_records: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_RECHECK", common.timedelta(0))
    fs, path = opened(**hosted(tls_records), credential=Tokens())
    native = native_store(fs, path)
    assert native is not None
    obstore.put(*native, b"1", use_multipart=False)
    time.sleep(0.15)  # obstore does not ask more often than every 0.1 s
    obstore.put(*native, b"1", use_multipart=False)
    assert [request.headers["authorization"] for request in tls_records.requests] == [
        "Bearer token-1",
        "Bearer token-2",
    ]


@pytest.mark.usefixtures("trusted")
def test_anonymous_requests_are_not_signed(tls_records: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, path = opened(**hosted(tls_records), anon=True)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    exercise(native_store(fs, path))
    assert not any("authorization" in request.headers for request in tls_records.requests)


@pytest.mark.parametrize("secret", [f"AccountKey={KEY}", f"SharedAccessSignature={SIGNATURE}"])
def test_variables_of_obstore_have_no_effect(
    records: Recorder, monkeypatch: pytest.MonkeyPatch, told: Told, secret: str
) -> None:
    fs, path = opened(connection_string=emulated(records, secret))
    exercise(native_store(fs, path))
    expected = without_times(records.requests)
    records.requests.clear()
    with recorder() as elsewhere:
        for name in [*documented_variables("azure"), "AZURE_PROXY_URL", "AZURE_USER_AGENT", "ALL_PROXY"]:
            if "ENCRYPTION" not in name:
                monkeypatch.setenv(name, poison(name, elsewhere.url))
        monkeypatch.setattr(obstore_config, "_stores", {})
        exercise(native_store(fs, path))
        assert without_times(records.requests) == expected
        assert elsewhere.requests == []
    assert told() == []


def test_a_variable_that_obstore_would_heed_keeps_it_out(
    records: Recorder, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ENCRYPTION_KEY", KEY)
    assert native_store(*opened(connection_string=emulated(records))) is None
    assert_told(told, "the environment variable AZURE_STORAGE_ENCRYPTION_KEY ")


def test_the_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, records: Recorder) -> None:
    with recorder() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        exercise(native_store(*opened(connection_string=emulated(records))))
        assert len(proxy.requests) > 3
    assert records.requests == []


class OldTokens:
    def get_token(self, *scopes: str) -> AccessToken:
        raise AssertionError("must not be asked")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"location_mode": "secondary", "account_key": KEY}, "`location_mode`"),
        ({"timeout": 3, "account_key": KEY}, "`timeout`"),
        ({"version_aware": True, "account_key": KEY}, "`version_aware`"),
        ({"some_option": KEY, "account_key": KEY}, "`some_option`"),
        ({"credential": OldTokens()}, "credentials of the kind OldTokens"),
    ],
)
def test_what_cannot_be_expressed_goes_through_fsspec(told: Told, options: dict[str, Any], reason: str) -> None:
    assert native_store(*opened(account_name=ACCOUNT, **options)) is None
    assert_told(told, reason)


def assert_told(told: Told, reason: str) -> None:
    (line,) = told()
    assert line.startswith("Transfers with AzureBlobFileSystem go through fsspec and not through obstore: ")
    assert reason in line
    assert KEY not in line
