"""Functions that the translations for the three stores share."""

import os
import ssl
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from lightning.fabric.storage.transport import retry

CONNECT_TIMEOUT_S = 20
#: Seconds that a store may take to begin its answer, or to go on with it.
READ_TIMEOUT_S = 60
#: The same for a store to write to, where the time until the answer begins includes that of the upload. It is meant for
#: a server that never answers: one that takes no more bytes is noticed by the system after half a minute (obstore sets
#: TCP_USER_TIMEOUT). Parts of 32 MiB on sixteen connections need 5 Mbit/s, one of 5 GiB on its own 48 Mbit/s.
UPLOAD_TIMEOUT_S = 900
#: Seconds to wait for the client's event loop to come up with credentials.
CREDENTIALS_TIMEOUT_S = 60

#: obstore asks for new credentials five minutes before the old ones expire. With this time it asks every minute, since
#: the client knows when to refresh them.
_RECHECK = timedelta(minutes=6)
#: obstore has no way to turn its limit of 30 seconds off.
_NO_LIMIT = timedelta(days=1)
#: The deadline decides.
_NO_LIMIT_OF_ATTEMPTS = 1_000_000
#: Options of every fsspec file system that make no difference to transfers.
_OPTIONS_OF_FSSPEC = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "loop"}


class NotNative(Exception):
    """obstore cannot be used as the instance would be. The text is the reason, without values of options."""


def check_options(given: Mapping[str, Any], harmless: Collection[str], only_unset: Collection[str] = ()) -> None:
    """Raises :class:`NotNative` for an option that is not known.

    Args:
        given: Options and their values.
        harmless: Options that a translation deals with, or that make no difference to transfers.
        only_unset: Options that make none as long as their value is false.
    """
    for name, value in given.items():
        if name not in _OPTIONS_OF_FSSPEC and name not in harmless and (value or name not in only_unset):
            raise NotNative(f"obstore has no equivalent of the option `{name}`")


def build(
    kind: str,
    config: dict[str, Any],
    client_options: dict[str, Any],
    credentials: Callable[[], Any] | None,
    variables: Mapping[str, str],
) -> Any:
    """Makes a store that finds nothing by itself.

    Args:
        kind: The name of the class in ``obstore.store``.
        config: Its configuration.
        client_options: See :func:`client_options`.
        credentials: A provider of credentials. None with ``skip_signature`` in ``config``.
        variables: Variables of the environment that obstore heeds, and the client does not, with the keys of ``config``
            that override them.

    Raises:
        NotNative: obstore does not take these values, or what it has found in the environment.
    """
    from obstore import store
    from obstore.exceptions import BaseError

    for name in os.environ:
        if variables.get(name.upper(), "") not in {"", *config}:
            raise NotNative(f"the environment variable {name} would change what obstore sends")
    backoff = {
        "init_backoff": timedelta(seconds=retry.FIRST_PAUSE_S),
        "max_backoff": timedelta(seconds=retry.LONGEST_PAUSE_S),
    }
    deadline = timedelta(seconds=retry.DEADLINE_S)
    retries = {"backoff": backoff, "max_retries": _NO_LIMIT_OF_ATTEMPTS, "retry_timeout": deadline}
    try:
        return getattr(store, kind)(
            config=config,
            client_options=client_options,
            retry_config=retries,
            credential_provider=credentials or _no_credentials,
        )
    except (BaseError, ValueError) as error:  # its text may hold values
        raise NotNative(f"obstore does not accept the configuration ({type(error).__name__})") from None


def _no_credentials() -> None:
    """Keeps a store that does not sign from looking for credentials by itself."""
    raise RuntimeError("This store was made to be used without credentials")


def client_options(
    url: str,
    reading: bool,
    proxy: str | None,
    certificates: str | None,
    connect_s: float | None = CONNECT_TIMEOUT_S,
    read_s: float | None = READ_TIMEOUT_S,
) -> dict[str, Any]:
    """Returns the options of a store that connects to ``url``.

    Args:
        url: The store's endpoint.
        reading: The store is used to read only.
        proxy: The URL of a proxy.
        certificates: The path of a file with certificates that are trusted beside the system's; in a container or in
            conda, the system may have none.
        connect_s: See :data:`CONNECT_TIMEOUT_S`. None is no limit.
        read_s: See :data:`READ_TIMEOUT_S`.
    """
    options: dict[str, Any] = {"allow_http": urlsplit(url).scheme == "http", "timeout": _NO_LIMIT}
    if connect_s is not None:
        options["connect_timeout"] = timedelta(seconds=connect_s)
    if read_s is not None:
        options["read_timeout"] = timedelta(seconds=read_s if reading else max(read_s, UPLOAD_TIMEOUT_S))
    if certificates is not None and not options["allow_http"]:
        options["root_certificate"] = Path(certificates).read_bytes()
    if proxy is None:  # else obstore would look for one in the environment
        options |= {"proxy_url": "http://unused.invalid", "proxy_excludes": "*,0.0.0.0/0,::/0"}
    else:
        options["proxy_url"] = proxy
    return options


def environment_proxy(url: str) -> str | None:
    """Returns the proxy that the environment has for ``url``."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


def python_certificates() -> str | None:
    """Returns the file with the certificates that Python trusts."""
    return ssl.get_default_verify_paths().cafile


def recheck_time() -> datetime:
    """Returns the time from which on obstore asks again for credentials that the client may refresh, in a minute."""
    return now() + _RECHECK


def now() -> datetime:
    """Returns the time of expiry for credentials that are read anew all the time; obstore asks at most every 0.1 s."""
    return datetime.now(timezone.utc)
