"""S3FileSystem of s3fs."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from aiobotocore.httpsession import AIOHTTPSession
from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError, ClientError
from botocore.httpsession import get_cert_path
from fsspec.asyn import sync
from s3fs import S3FileSystem

from lightning.fabric.storage.paths.credentials import is_kept_current
from lightning.fabric.storage.transport.backends.obstore_config import common
from lightning.fabric.storage.transport.backends.obstore_config.common import NotNative, check_options

if TYPE_CHECKING:
    from obstore.store import S3Store

#: An option that is set where checksums are wanted, or required, as by a bucket with Object Lock; the client's default
#: is the same, but no such wish.
_CHECKSUMS = "request_checksum_calculation"
#: Connections that botocore keeps by default. A lower number is meant as a limit, which obstore has not.
_CONNECTIONS = 10
#: The client is asked below for its view of these; the others make no difference to transfers without s3fs.
_OPTIONS = {
    *("anon", "endpoint_url", "key", "secret", "token", "username", "password", "use_ssl", "profile", "cache_regions"),
    *("client_kwargs", "config_kwargs", "s3_additional_kwargs", "requester_pays"),
    *("default_block_size", "default_fill_cache", "default_cache_type", "max_concurrency", "fixed_upload_size"),
}
_OPTIONS_IF_UNSET = {"asynchronous", "session", "version_aware", "local_expiry_check", "batch_size"}
_CLIENT_OPTIONS = {
    *("region_name", "endpoint_url", "aws_access_key_id", "aws_secret_access_key", "aws_session_token"),
    *("use_ssl", "verify"),
}
_CONFIG_OPTIONS = {
    *("region_name", "signature_version", "s3", "proxies", "connect_timeout", "read_timeout"),
    *("use_dualstack_endpoint", "use_fips_endpoint", "ignore_configured_endpoint_urls"),
    *("retries", "max_pool_connections", "tcp_keepalive", "parameter_validation"),
    *(_CHECKSUMS, "response_checksum_validation"),
}
_CONFIG_OPTIONS_IF_UNSET = {"client_cert", "proxies_config", "connector_args"}
_S3_CONFIG_OPTIONS = {
    *("addressing_style", "payload_signing_enabled", "us_east_1_regional_endpoint"),
    *("use_accelerate_endpoint", "use_dualstack_endpoint", "use_arn_region"),
}
#: s3fs's name of an option of requests, and obstore's.
_ENCRYPTION = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}
_KINDS_OF_ENCRYPTION = {"AES256", "aws:kms", "aws:kms:dsse"}
#: Variables that only a value of the store's own can override, and the key of that.
_VARIABLES = {
    "AWS_SERVER_SIDE_ENCRYPTION": "server_side_encryption",
    "AWS_SSE_KMS_KEY_ID": "sse_kms_key_id",
    "AWS_SSE_BUCKET_KEY_ENABLED": "sse_bucket_key_enabled",
    "AWS_SSE_CUSTOMER_KEY_BASE64": "sse_customer_key_base64",
    "AWS_CHECKSUM_ALGORITHM": "checksum_algorithm",
}


class _Target(NamedTuple):
    """The address to which the client would send a request, and the way it would sign."""

    client: Any
    url: str
    region: str
    signed: bool


def connection(fs: S3FileSystem) -> Any:
    """Returns the client and the credentials that stores are made from: with others, new ones are needed."""
    credentials = getattr(getattr(fs._s3, "_request_signer", None), "_credentials", None)
    if credentials is None or not is_kept_current(credentials):
        return fs._s3
    return fs._s3, sync(fs.loop, credentials.get_frozen_credentials)


def make_store(fs: S3FileSystem, path: str, reading: bool) -> "S3Store":
    """Makes the store of the bucket of ``path``.

    Raises:
        NotNative: obstore cannot express how ``fs`` is set.
    """
    check_options(fs.storage_options, _OPTIONS, _OPTIONS_IF_UNSET)
    check_options(fs.client_kwargs, _CLIENT_OPTIONS)
    check_options(fs.config_kwargs, _CONFIG_OPTIONS, _CONFIG_OPTIONS_IF_UNSET)
    check_options(fs.config_kwargs.get("s3") or {}, _S3_CONFIG_OPTIONS)
    check_options(fs.s3_additional_kwargs, {*_ENCRYPTION, "RequestPayer"})
    if "when_supported" in (fs.config_kwargs.get(_CHECKSUMS), os.environ.get(f"AWS_{_CHECKSUMS.upper()}")):
        raise NotNative(f"obstore sends no checksums of bodies, which the option `{_CHECKSUMS}` asks for")
    if (fs.config_kwargs.get("max_pool_connections") or _CONNECTIONS) < _CONNECTIONS:
        raise NotNative("obstore has no limit as the option `max_pool_connections`")
    try:
        bucket, name, _ = fs.split_path(path)
        target = sync(fs.loop, _resolve, fs, bucket, name)
        config = _config(fs, bucket, target)
        client_options = _client_options(fs, target, reading)
        credentials = _credentials(target.client, fs.loop) if target.signed else None
    except AttributeError as error:  # there is no public way to ask
        raise NotNative(f"the release of aiobotocore is not known ({error})") from error
    store: S3Store = common.build("S3Store", config, client_options, credentials, _VARIABLES)
    return store


async def _resolve(fs: S3FileSystem, bucket: str, name: str) -> _Target:
    """Asks the client itself, whose answer holds all that is in options, environment and files."""
    await fs.set_session()
    client = await fs.get_s3(bucket)
    context: dict[str, Any] = {"client_region": client.meta.region_name, "client_config": client.meta.config}
    operation = client.meta.service_model.operation_model("PutObject")
    try:
        if (urlsplit(client.meta.endpoint_url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn")):
            await _learn_region(client, bucket, name)
        url, headers, _ = await client._resolve_endpoint_ruleset(operation, {"Bucket": bucket, "Key": "x"}, context)
    except BotoCoreError as error:
        raise NotNative(f"the client does not reach the bucket ({type(error).__name__})") from error
    signature = context.get("auth_type")
    if headers or signature not in ("v4", "s3v4", "none"):
        raise NotNative(f"obstore does not sign requests as the client does ({signature})")
    region = context.get("signing", {}).get("region", client.meta.region_name)
    return _Target(client, url, region, signature != "none")


async def _learn_region(client: Any, bucket: str, name: str) -> None:
    """Lets the client find out if the bucket is in another region than the client, which obstore could not follow.

    It asks for the object that is to be read or written, since rights on the bucket itself are not needed else.
    """
    with suppress(ClientError):  # a redirection comes before the answer that there is none, or that it is forbidden
        await client.head_object(Bucket=bucket, Key=name)


def _config(fs: S3FileSystem, bucket: str, target: _Target) -> dict[str, Any]:
    in_path = target.url.endswith(f"/{bucket}")
    endpoint = target.url[: -len(bucket) - 1] if in_path else target.url
    sign_payload = (target.client.meta.config.s3 or {}).get("payload_signing_enabled")
    requests = {**fs.s3_additional_kwargs, **fs.req_kw}
    encryption = {_ENCRYPTION[name]: value for name, value in requests.items() if name in _ENCRYPTION}
    if encryption and encryption.get("server_side_encryption") not in _KINDS_OF_ENCRYPTION:
        raise NotNative("obstore has no equivalent of that `ServerSideEncryption`")
    return {
        "bucket": bucket,
        "endpoint": endpoint,
        "aws_endpoint_url_s3": endpoint,
        "region": target.region,
        "virtual_hosted_style_request": not in_path,
        "skip_signature": not target.signed,
        "unsigned_payload": endpoint.startswith("https:") if sign_payload is None else not sign_payload,
        "request_payer": requests.get("RequestPayer") == "requester",
        "s3_express": False,
        "conditional_put": "etag",
        **encryption,
    }


def _client_options(fs: S3FileSystem, target: _Target, reading: bool) -> dict[str, Any]:
    session = target.client._endpoint.http_session
    if not isinstance(session, AIOHTTPSession):
        raise NotNative("obstore has no equivalent of the option `http_session_cls`")

    def seconds(option: str, at_least: float) -> float | None:
        value: float | None = getattr(target.client.meta.config, option)
        return value if value is None or option in fs.config_kwargs else max(value, at_least)

    options = common.client_options(
        target.url,
        reading,
        proxy=session._proxy_config.proxy_url_for(target.url),
        certificates=get_cert_path(session._verify) if session._verify else None,
        connect_s=seconds("connect_timeout", common.CONNECT_TIMEOUT_S),
        read_s=seconds("read_timeout", common.READ_TIMEOUT_S),
    )
    return options if session._verify else {**options, "allow_invalid_certificates": True}


def _credentials(client: Any, loop: asyncio.AbstractEventLoop) -> Callable[[], Any]:
    """Returns a provider that asks the client's own credentials, which know when to refresh themselves."""
    credentials = client._request_signer._credentials
    if credentials is None:
        raise NotNative("the client has found no credentials")

    def next_question(token: str | None) -> datetime | None:
        if isinstance(credentials, RefreshableCredentials):
            return common.recheck_time()
        if not is_kept_current(credentials):
            return None
        return common.now() if token else common.recheck_time()  # keys without a token do not expire by themselves

    def provide() -> dict[str, Any]:
        frozen = sync(loop, credentials.get_frozen_credentials, timeout=common.CREDENTIALS_TIMEOUT_S)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": next_question(frozen.token),
        }

    return provide
