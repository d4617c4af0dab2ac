"""GCSFileSystem of gcsfs, and ExtendedGcsFileSystem, which is what it is called with zonal buckets in view."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsspec.asyn import sync
from gcsfs.core import GCSFileSystem
from google.auth.credentials import AnonymousCredentials

from lightning.fabric.storage.transport.backends.obstore_config import common
from lightning.fabric.storage.transport.backends.obstore_config.common import NotNative, check_options

if TYPE_CHECKING:
    from obstore.store import GCSStore

#: The instance is asked below for its view of these; the others make no difference to transfers without gcsfs.
_OPTIONS = {
    *("project", "access", "token", "endpoint_url", "requester_pays", "session_kwargs", "consistency"),
    *("block_size", "cache_timeout", "secure_serialize", "check_connection", "default_location"),
    *("finalize_on_close", "mrd_pool_cache_size", "max_mrd_pool_cache_queue_size", "memmove_max_workers"),
    *("retry_timeout", "retry_initial", "retry_maximum", "retry_multiplier"),
}
_OPTIONS_IF_UNSET = {"asynchronous", "version_aware", "timeout", "requests_timeout", "batch_size"}
#: Variables that only a value of the store's own can override, and the key of that.
_VARIABLES = {
    "GOOGLE_SERVICE_ACCOUNT": "service_account",
    "GOOGLE_SERVICE_ACCOUNT_PATH": "service_account",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "service_account_key",
}


def connection(fs: GCSFileSystem) -> Any:
    """Returns the credentials and the address that stores are made from: with others, new ones are needed."""
    return fs.credentials.credentials, fs._location


def make_store(fs: GCSFileSystem, path: str, reading: bool) -> "GCSStore":
    """Makes the store of the bucket of ``path``.

    Raises:
        NotNative: obstore cannot express how ``fs`` is set, or the bucket is one that gcsfs has a faster way to.
    """
    bucket, *_ = fs.split_path(path)
    check_options(fs.storage_options, _OPTIONS, _OPTIONS_IF_UNSET)
    check_options(fs.session_kwargs, {"trust_env"})
    if fs.consistency not in (None, "none"):
        raise NotNative("obstore has no equivalent of the option `consistency`")
    if getattr(fs, "_use_client_cert", False):
        raise NotNative("obstore has no equivalent of a client certificate")
    url = fs._location
    if not url.startswith("https:"):
        raise NotNative("the endpoint is plain http: an emulator, which may not know the XML API that obstore speaks")
    if _is_zonal(fs, bucket):
        raise NotNative("gcsfs has a protocol of its own for zonal buckets")
    signed = not isinstance(fs.credentials.credentials, (type(None), AnonymousCredentials))
    if not signed and not reading:
        raise NotNative("obstore cannot write to GCS without credentials")
    config = {"bucket": bucket, "base_url": url, "skip_signature": not signed}
    client_options = common.client_options(
        url,
        reading,
        proxy=common.environment_proxy(url) if fs.session_kwargs.get("trust_env") else None,
        certificates=common.python_certificates(),
    )
    if (project := _billed_project(fs)) is not None:
        client_options["default_headers"] = {"x-goog-user-project": project}
    credentials = _credentials(fs.credentials) if signed else None
    store: GCSStore = common.build("GCSStore", config, client_options, credentials, _VARIABLES)
    return store


def _is_zonal(fs: GCSFileSystem, bucket: str) -> bool:
    """Asks what gcsfs would ask before any transfer, but Google's own servers only: it waits for others in vain."""
    if not hasattr(fs, "_is_zonal_bucket"):
        return False
    known = getattr(fs._storage_layout_cache.get(bucket), "value", None)
    if known is None and fs.on_google:
        return bool(sync(fs.loop, fs._is_zonal_bucket, bucket))
    return known == "ZONAL_HIERARCHICAL"


def _billed_project(fs: GCSFileSystem) -> str | None:
    if fs.requester_pays:
        return fs.requester_pays if isinstance(fs.requester_pays, str) else fs.project
    return getattr(fs.credentials.credentials, "quota_project_id", None)


def _credentials(credentials: Any) -> Callable[[], Any]:
    """Returns a provider that asks gcsfs's own credentials, which know when to refresh themselves."""

    def provide() -> dict[str, Any]:
        credentials.maybe_refresh()
        return {"token": credentials.credentials.token, "expires_at": common.recheck_time()}

    return provide
