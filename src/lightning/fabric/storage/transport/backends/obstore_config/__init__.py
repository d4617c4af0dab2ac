"""A file system of fsspec as a store of obstore, which moves large files with less work and more requests at a time.

The configuration in force is the instance's: its options, and what its client has made of the environment and of
configuration files. obstore's own look at the environment decides nothing. What cannot be expressed goes through
fsspec, and the log says so. No client library is imported before there is an instance of it.
"""

import importlib
import logging
import os
import re
import sys
import weakref
from typing import TYPE_CHECKING, Any

from fsspec import AbstractFileSystem
from lightning_utilities.core.imports import RequirementCache

from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport.backends.obstore_config.common import NotNative

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

    ObjectStore = S3Store | GCSStore | AzureStore

log = logging.getLogger(__name__)

#: The modules of this package, by the class that they translate. Subclasses may transfer in another way.
_TRANSLATIONS = {
    "s3fs.core.S3FileSystem": "s3",
    "gcsfs.core.GCSFileSystem": "gcs",
    "gcsfs.extended_gcsfs.ExtendedGcsFileSystem": "gcs",
    "adlfs.spec.AzureBlobFileSystem": "azure",
}
#: The first release with all options that are needed.
_MINIMUM = "0.11"
_OBSTORE = RequirementCache(f"obstore>={_MINIMUM}")
#: Names that obstore refuses, or takes for others.
_UNFIT_NAME = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|[\x00-\x1f\x7f]|[\ud800-\udfff]")

#: Stores by the id of their file system, which may be equal to another one; then by bucket and use.
_stores: dict[int, dict[tuple[str, bool], tuple[Any, "ObjectStore | NotNative"]]] = {}
_logged: set[str] = set()
_forked = False


def native_store(fs: AbstractFileSystem, path: str, reading: bool = False) -> tuple["ObjectStore", str] | None:
    """Returns obstore's store for the bucket (container) of ``path``, and the object's name in it.

    Stores are kept as long as their file system, so that connections are used again.

    Args:
        fs: A file system. One for use in coroutines (``asynchronous=True``) has no store.
        path: A file's path in it.
        reading: The store is used to read only, and answers begin within seconds. By default a request may take as long
            as the upload of a part takes on a slow link: see :data:`~.common.UPLOAD_TIMEOUT_S`.

    Returns:
        None if the file goes through fsspec.
    """
    known = _TRANSLATIONS.get(_name(type(fs)))
    try:
        if known is None:
            _refuse_relatives(fs)
            return None
        _refuse_without_obstore(known)
        if fs.storage_args:
            raise NotNative("the options of the file system were given without their names")
        _, name, _ = fs.split_path(path)
        if _UNFIT_NAME.search(name):
            raise NotNative("obstore knows no names with empty, `.` or `..` segments or control characters")
        return _store(fs, known, path, reading), name
    except NotNative as reason:
        _log_once(fs, reason)
        return None


def leave_to_client(fs: AbstractFileSystem, path: str, reason: Exception, reading: bool = False) -> None:
    """Lets what comes for the bucket of ``path`` go through fsspec, for obstore could not do with it what it has to.

    Args:
        fs: The file system.
        path: A file's path in it.
        reason: The error of obstore.
        reading: The reads go through fsspec, and not the writes.
    """
    bucket = fs.split_path(path)[0]
    refusal = NotNative(f"what the store of {bucket!r} answers is not what obstore takes ({redact(str(reason))})")
    _stores_of(fs)[bucket, reading] = _translation(_TRANSLATIONS[_name(type(fs))]).connection(fs), refusal
    _log_once(fs, refusal)


def _store(fs: AbstractFileSystem, known: str, path: str, reading: bool) -> "ObjectStore":
    bucket, *_ = fs.split_path(path)
    translation, stores = _translation(known), _stores_of(fs)
    connection, store = stores.get((bucket, reading), (None, None))
    if store is None or connection != translation.connection(fs):
        store = translation.make_store(fs, path, reading)
        stores[bucket, reading] = translation.connection(fs), store
    if isinstance(store, NotNative):
        raise store
    return store


def _stores_of(fs: AbstractFileSystem) -> dict[tuple[str, bool], tuple[Any, "ObjectStore | NotNative"]]:
    if id(fs) not in _stores:
        weakref.finalize(fs, _stores.pop, id(fs), None).atexit = False
    return _stores.setdefault(id(fs), {})


def _translation(known: str) -> Any:
    return importlib.import_module(f"{__name__}.{known}")


def _refuse_relatives(fs: AbstractFileSystem) -> None:
    """Raises for a file system that uses or wraps one that is known."""
    if any(_name(base) in _TRANSLATIONS for base in type(fs).__mro__):
        raise NotNative("the class extends the one that is known, and may transfer in another way")
    if _name(type(getattr(fs, "fs", None))) in _TRANSLATIONS:
        raise NotNative("the class wraps another file system, and may do more than that")


def _refuse_without_obstore(extra: str) -> None:
    missing = NotNative(f"there is no obstore {_MINIMUM} or newer. To have faster ones, install the extra `{extra}`")
    try:
        import obstore  # noqa: F401  # which may be installed for another platform
    except ImportError:
        raise missing from None
    if not _OBSTORE:
        raise missing
    if _forked:
        raise NotNative("it was loaded before this process was forked, and would hang here and in the parent")


def _note_fork() -> None:
    """Remembers a fork: obstore's threads stay in the parent, whose connections a child that uses obstore wrecks."""
    global _forked
    _forked = _forked or "obstore" in sys.modules


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_note_fork)


def _log_once(fs: AbstractFileSystem, reason: NotNative) -> None:
    message = f"Transfers with {type(fs).__name__} go through fsspec and not through obstore: {reason}."
    if message not in _logged:
        _logged.add(message)
        log.info(message)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
