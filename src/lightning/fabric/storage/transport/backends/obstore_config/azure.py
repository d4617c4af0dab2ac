"""AzureBlobFileSystem of adlfs."""

import asyncio
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from adlfs import AzureBlobFileSystem
from azure.core.credentials import AzureSasCredential
from fsspec.asyn import sync

from lightning.fabric.storage.transport.backends.obstore_config import common
from lightning.fabric.storage.transport.backends.obstore_config.common import NotNative, check_options

if TYPE_CHECKING:
    from obstore.store import AzureStore

#: The client is asked below for its view of these; the others make no difference to transfers without adlfs.
_OPTIONS = {
    *("account_name", "account_key", "connection_string", "credential", "sas_token", "anon", "account_host"),
    *("client_id", "client_secret", "tenant_id", "location_mode", "connection_timeout", "read_timeout"),
    *("blocksize", "default_fill_cache", "default_cache_type", "assume_container_exists", "max_concurrency"),
    "socket_timeout",
}
_OPTIONS_IF_UNSET = {"asynchronous", "version_aware", "request_session", "timeout", "batch_size"}
#: Variables that only a value of the store's own can override, and the key of that.
_VARIABLES = {"AZURE_STORAGE_ENCRYPTION_KEY": "encryption_key", "AZURE_ENCRYPTION_KEY": "encryption_key"}
_SCOPE = "https://storage.azure.com/.default"


def connection(fs: AzureBlobFileSystem) -> Any:
    """Returns the client that stores are made from. A file system that connects again needs new ones."""
    return fs.service_client


def make_store(fs: AzureBlobFileSystem, path: str, reading: bool) -> "AzureStore":
    """Makes the store of the container of ``path``.

    Raises:
        NotNative: obstore cannot express how ``fs`` is set.
    """
    container, *_ = fs.split_path(path)
    check_options(fs.storage_options, _OPTIONS, _OPTIONS_IF_UNSET)
    client = fs.service_client
    if client.location_mode != "primary":
        raise NotNative("obstore has no equivalent of the option `location_mode`")
    address = urlsplit(client.url)
    account = getattr(client.credential, "account_name", client.account_name)
    if not account:
        raise NotNative("the account's name does not follow from its host")
    credentials = _credentials(client.credential, address.query, fs.loop)
    url = f"{address.scheme}://{address.netloc}{address.path}".rstrip("/")
    config = {
        "container_name": container,
        "account_name": account,
        "endpoint": url,
        "skip_signature": credentials is None,
        "use_emulator": False,  # it stands for an address, which we have
    }
    client_options = common.client_options(
        url,
        reading,
        proxy=common.environment_proxy(url),  # as the client does
        certificates=common.python_certificates(),
        connect_s=fs.storage_options.get("connection_timeout") or common.CONNECT_TIMEOUT_S,
        read_s=fs.storage_options.get("read_timeout") or common.READ_TIMEOUT_S,
    )
    store: AzureStore = common.build("AzureStore", config, client_options, credentials, _VARIABLES)
    return store


def _credentials(credential: Any, query: str, loop: asyncio.AbstractEventLoop) -> Callable[[], Any] | None:
    """Returns a provider that asks the client's own credentials, or None without any.

    Args:
        credential: The client's credentials.
        query: The query of the client's URL, in which it keeps a shared access signature.
        loop: The client's event loop.
    """
    if credential is None:
        return (lambda: {"sas_token": query, "expires_at": None}) if query else None
    if hasattr(credential, "account_key"):
        return lambda: {"access_key": credential.account_key, "expires_at": None}
    if isinstance(credential, AzureSasCredential):  # whose owner may update it
        return lambda: {"sas_token": credential.signature.lstrip("?"), "expires_at": common.recheck_time()}
    if not inspect.iscoroutinefunction(getattr(credential, "get_token", None)):
        raise NotNative(f"obstore cannot ask credentials of the kind {type(credential).__name__}")

    def provide() -> dict[str, Any]:
        token = sync(loop, credential.get_token, _SCOPE, timeout=common.CREDENTIALS_TIMEOUT_S)
        return {"token": token.token, "expires_at": common.recheck_time()}

    return provide
