"""Which kind a bucket of Google's is of. gcsfs asks the store, and remembers the answer."""

from typing import Any

from fsspec import AbstractFileSystem
from fsspec.asyn import sync


def is_zonal(fs: AbstractFileSystem, path: str) -> bool:
    """Whether ``path`` is in a zonal bucket, whose objects are written and read over gRPC."""
    return _is_bucket(fs, path, "_is_zonal_bucket")


def is_hierarchical(fs: AbstractFileSystem, path: str) -> bool:
    """Whether ``path`` is in a bucket of Google's with folders, which stay when all that was in them is removed.

    Files and folders there can have the same name all the same.
    """
    return _is_bucket(fs, path, "_is_bucket_hns_enabled")


def _is_bucket(fs: Any, path: str, question: str) -> bool:
    asked = getattr(fs, question, None)
    return asked is not None and not fs.asynchronous and bool(sync(fs.loop, asked, fs.split_path(path)[0]))
