"""Options of stores that are given once for a run: endpoint, credentials and so on."""

from collections.abc import Callable
from typing import Any

from fsspec import available_protocols, get_filesystem_class
from fsspec.config import conf

from lightning.fabric.storage.paths.client_options import check_options, protocols_of
from lightning.fabric.storage.paths.hints import about_package, about_protocol
from lightning.fabric.storage.paths.location import LOCAL_PROTOCOLS

#: The options that have been set, by protocol.
_options: dict[str, dict[str, Any]] = {}


def set_storage_options(protocol: str, **options: Any) -> None:
    """Sets options of the store behind a protocol for the rest of this process, and the ranks that it launches.

    They hold for everything that reaches the store through fsspec by itself: checkpoints, loggers, profilers, and other
    libraries too. They go before the environment and fsspec's configuration files; the ``storage_options`` of a single
    call go before them. Call it before the Trainer, Fabric, callbacks and loggers are made: a file system that somebody
    has already keeps its options.

    Args:
        protocol: The protocol of URLs, such as ``"s3"``, ``"gs"`` or ``"az"``.
        options: The options of fsspec's file system for it, such as ``endpoint_url``, ``key`` and ``secret`` for S3.
            Those set by an earlier call stay; None is a value like any other.

    Raises:
        ValueError: The protocol is not known, or that of local paths; its client has no such option, or the endpoint
            has no scheme.
        ImportError: The client of the store is not installed.
    """
    name = protocol.removesuffix("://")
    if name in LOCAL_PROTOCOLS:
        raise ValueError("Local paths have no storage options")
    if name not in available_protocols():
        if name.partition("://")[0] in available_protocols():
            raise ValueError(f"Options are those of a protocol, and not of a place: give {name.partition('://')[0]!r}")
        raise ValueError(about_protocol(name))
    try:
        kind = get_filesystem_class(name)
    except ImportError as error:
        raise ImportError(
            f"{name}:// needs a package: {error}.{about_package(f'{name}://')}", name=error.name
        ) from error
    check_options(name, options)
    for one in protocols_of(
        kind
    ):  # fsspec takes the options of all its names, and those of the last one before the others
        _options[one] = {**_options.get(one, {}), **options}
    _apply()


def _apply() -> None:
    for protocol, given in _options.items():
        conf[protocol] = {**conf.get(protocol, {}), **given}


class CarryingOptions:
    """A function that is called in another process with the options that were set in this one.

    A process that is spawned imports the script, but does not run it again.

    Args:
        function: The function, which can be pickled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._options = {protocol: dict(given) for protocol, given in _options.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Sets the options, and calls the function."""
        _options.update(self._options)
        _apply()
        return self._function(*args, **kwargs)
