"""Refuses options of stores' clients that these would pass over, or understand only once something is sent."""

import difflib
import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from fsspec import AbstractFileSystem, available_protocols, get_filesystem_class
from fsspec.config import conf

#: Clients that take any option, and do nothing with one that they do not know.
_FORGIVING = ("s3fs", "gcsfs", "adlfs")
#: Options of every fsspec file system, which are in no signature.
_COMMON = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache"}
#: Options that the clients take out of their `**kwargs`. s3fs makes its session with the rest, unless it is given one.
_UNNAMED = {
    "s3fs": {"profile", "session_vars", "event_hooks", "include_builtin_handlers"},
    "gcsfs": {"memmove_max_workers", "retry_timeout", "retry_initial", "retry_maximum", "retry_multiplier"},
}
_NO_OPTIONS = {"self", "args", "kwargs", "storage_options"}
#: Variables of the endpoint, in the order in which botocore reads them if there is no option.
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def check_options(protocol: str, options: Mapping[str, Any]) -> None:
    """Looks at what a client is about to be made with: the options given, fsspec's configuration, the environment.

    Args:
        protocol: The protocol of URLs. One that is unknown, or whose client is not installed, is not checked.
        options: The options given, which go before the others.

    Raises:
        ValueError: The client has no such option, or the endpoint is empty or has no scheme.
    """
    if protocol not in available_protocols():
        return
    try:
        kind = get_filesystem_class(protocol)
    except ImportError:
        return
    client = kind.__module__.partition(".")[0]
    if client not in _FORGIVING:
        return
    in_force = {name: value for one in protocols_of(kind) for name, value in conf.get(one, {}).items()} | dict(options)
    if "session" not in in_force:
        _refuse_unknown(kind, in_force, _known(kind))
        if client == "s3fs":
            for option, known in _known_within().items():
                _refuse_unknown(kind, in_force.get(option) or {}, known, f" in `{option}`")
    if client != "adlfs":
        _check_endpoint(client, in_force)


def protocols_of(fs: Any) -> tuple[str, ...]:
    """Returns the protocols of a file system, or of a class of these."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def clients_of(fs: AbstractFileSystem) -> set[str]:
    """Returns the packages that the file system's class and its bases come from."""
    return {base.__module__.partition(".")[0] for base in type(fs).__mro__}


def _refuse_unknown(kind: Any, options: Mapping[str, Any], known: set[str], within: str = "") -> None:
    for name in options.keys() - known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f": do you mean `{near[0]}`?" if near else f". It has: {', '.join(sorted(known))}"
        raise ValueError(f"{kind.__name__} has no option `{name}`{within}{hint}")


@functools.cache
def _known(kind: Any) -> set[str]:
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    named: set[str] = set().union(*(inspect.signature(one).parameters for one in constructors))
    return (named | _COMMON | _UNNAMED.get(kind.__module__.partition(".")[0], set())) - _NO_OPTIONS


@functools.cache
def _known_within() -> dict[str, set[str]]:
    """Returns the names that s3fs passes on to the constructors of its client, by its option that holds them."""
    from aiobotocore.config import AioConfig
    from botocore.session import Session

    return {
        "client_kwargs": set(inspect.signature(Session.create_client).parameters) - {"self", "service_name", "config"},
        "config_kwargs": (set(inspect.signature(AioConfig).parameters) | set(AioConfig.OPTION_DEFAULTS)) - _NO_OPTIONS,
    }


def _check_endpoint(client: str, options: Mapping[str, Any]) -> None:
    places = {"the storage option `endpoint_url`": options.get("endpoint_url")}
    if client == "s3fs":
        places["the storage option `endpoint_url` in `client_kwargs`"] = (options.get("client_kwargs") or {}).get(
            "endpoint_url"
        )
    for place, value in places.items():
        if value == "":  # taken for none, which leads to the store's own service
            raise ValueError(f"{place[0].upper()}{place[1:]} is empty: give a URL such as http://127.0.0.1:9000")
    if client == "s3fs" and os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true":
        places |= {f"the variable {name}": os.environ.get(name) for name in _ENDPOINT_VARIABLES}
    place, endpoint = next(((place, value) for place, value in places.items() if value), ("", ""))
    if isinstance(endpoint, str) and endpoint and not endpoint.lower().startswith(("http://", "https://")):
        host = endpoint.rpartition("://")[2].rpartition("@")[2]
        raise ValueError(
            f"{place[0].upper()}{place[1:]} is no URL of a server: it begins with http:// or https://, as in"
            f" http://{host}"
        )
