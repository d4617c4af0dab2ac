"""Credentials that something else renews while this process runs: in a file that a job rewrites, or in the environment.

The clients of stores read such credentials once. Where they ask themselves for them before a request, the place is read
anew here, so that each is sent with what is there then: reads and writes, listings and removals, of either engine. What
knows itself when to refresh (a role of the machine, a single sign-on) is left alone. No client is imported before it is
used.
"""

import functools
import logging
import os
from pathlib import Path
from typing import Any

from fsspec import AbstractFileSystem

from lightning.fabric.storage.paths.client_options import clients_of

log = logging.getLogger(__name__)

#: Providers of botocore that are read anew, and their settings with the name of the file.
_FILES_OF_S3 = {"shared-credentials-file": "credentials_file", "config-file": "config_file"}
_VARIABLES_OF_S3 = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN"
_VARIABLES_OF_AZURE = {
    "connection_string": "AZURE_STORAGE_CONNECTION_STRING",
    "account_key": "AZURE_STORAGE_ACCOUNT_KEY",
    "sas_token": "AZURE_STORAGE_SAS_TOKEN",
}


def keep_current(fs: AbstractFileSystem, connect: bool = False) -> None:
    """Has the client of ``fs`` use the credentials that are in their place at the time of each request.

    It is called often, since a client may connect anew, and costs next to nothing. Another client is left as it is.

    Args:
        fs: A file system.
        connect: Connect first a client that has not read its credentials yet.
    """
    clients = clients_of(fs)
    if "s3fs" in clients and hasattr(fs, "_s3"):  # old releases are refused elsewhere
        if connect and not fs.asynchronous:
            fs.connect()
        if fs._s3 is not None:
            _keep_current_on_s3(fs)
    elif "gcsfs" in clients and hasattr(fs, "credentials"):
        _keep_current_on_gcs(fs.credentials)
    elif "adlfs" in clients and hasattr(fs, "service_client"):
        _renew_on_azure(fs)


def refuse_missing(fs: AbstractFileSystem) -> None:
    """Refuses to write to Google's own servers without credentials: gcsfs goes on without any if it has found none."""
    client: Any = fs
    if "gcsfs" not in clients_of(fs) or not client.on_google:
        return
    if client.credentials.token is None and client.credentials.method == "anon":
        from google.auth import exceptions

        error: Any = exceptions.DefaultCredentialsError
        raise error("no credentials were found")


def is_kept_current(credentials: Any) -> bool:
    """Returns whether credentials of a client of S3 are read anew before each request."""
    return "get_frozen_credentials" in vars(credentials)


def place_of(fs: AbstractFileSystem) -> str:
    """Returns the origin of the credentials of ``fs``, for messages; empty where that is not known."""
    if (client := getattr(fs, "_s3", None)) is not None:
        return _place_on_s3(fs, client._request_signer._credentials)
    if hasattr(fs, "credentials"):
        file = _file_of_gcs(fs.credentials)
        return str(file) if file is not None else ""
    for option, variable in _VARIABLES_OF_AZURE.items():
        if getattr(fs, option, None) is not None:
            return f"the storage option `{option}`" if fs.storage_options.get(option) else f"the variable {variable}"
    return ""


def _keep_current_on_s3(fs: Any) -> None:
    from botocore.credentials import RefreshableCredentials

    credentials = fs._s3._request_signer._credentials
    method = getattr(credentials, "method", None)
    if method not in ("env", *_FILES_OF_S3) or isinstance(credentials, RefreshableCredentials):
        return
    if not is_kept_current(credentials):
        provider = fs.session.get_component("credential_provider").get_provider(method)
        ask = functools.partial(_read_anew, credentials, credentials.get_frozen_credentials, provider)
        credentials.get_frozen_credentials = ask


async def _read_anew(credentials: Any, get_frozen: Any, provider: Any) -> Any:
    """Returns what a client of S3 signs with. All clients of a session share ``credentials``."""
    from botocore.exceptions import BotoCoreError

    try:
        found = await provider.load()
    except BotoCoreError as error:  # the file is just being written
        log.debug(f"The credentials of S3 could not be read anew ({type(error).__name__}), and stay as they were")
        found = None
    if found is not None:
        new = await found.get_frozen_credentials()
        credentials.access_key, credentials.secret_key, credentials.token = new.access_key, new.secret_key, new.token
    return await get_frozen()


def _place_on_s3(fs: Any, credentials: Any) -> str:
    method = getattr(credentials, "method", "")
    if method in _FILES_OF_S3:
        file = os.path.expanduser(fs.session.get_config_variable(_FILES_OF_S3[method]))
        return f"{file} (profile {fs.session.profile or 'default'!r})"
    named = {"env": f"the variables {_VARIABLES_OF_S3}", "explicit": "the storage options `key`, `secret` and `token`"}
    return named.get(method, method)


def _keep_current_on_gcs(credentials: Any) -> None:
    if credentials is None or "maybe_refresh" in vars(credentials) or (file := _file_of_gcs(credentials)) is None:
        return
    from google.auth.exceptions import GoogleAuthError

    refresh, seen = credentials.maybe_refresh, [_state(file)]

    def read_anew_and_refresh(*arguments: Any, **options: Any) -> None:
        if (state := _state(file)) not in (None, seen[0]):
            try:
                credentials.connect(method=credentials.token or "google_default")
                seen[0] = state
            except (GoogleAuthError, ValueError, KeyError, OSError) as error:  # the file is just being written
                log.debug(f"{file} could not be read anew ({type(error).__name__}): the credentials stay as they were")
        refresh(*arguments, **options)

    credentials.maybe_refresh = read_anew_and_refresh


def _file_of_gcs(credentials: Any) -> Path | None:
    if isinstance(credentials.token, str) and os.path.isfile(credentials.token):
        return Path(credentials.token)
    if credentials.method != "google_default":
        return None
    from google.auth import _cloud_sdk

    default: str = _cloud_sdk.get_application_default_credentials_path()  # type: ignore[no-untyped-call]
    return Path(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or default)


def _state(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _renew_on_azure(fs: Any) -> None:
    for option, variable in _VARIABLES_OF_AZURE.items():
        value, old = os.environ.get(variable), getattr(fs, option)
        if not value or not old or fs.storage_options.get(option) or value.lstrip("?") == old.lstrip("?"):
            continue
        setattr(fs, option, value)
        fs.do_connect()
