"""Looks at the folder of a run's checkpoints before its first step, to see then that a store cannot be used."""

import os
from concurrent.futures import wait

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from lightning.fabric.storage.paths.filesystem import has_folders, names_inside
from lightning.fabric.storage.paths.hints import about_bucket
from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.storage.transport.refusals import lacks_permission
from lightning.fabric.storage.transport.retry import chain, have_expired, is_transient, status_of
from lightning.fabric.storage.transport.threads import in_thread
from lightning.fabric.utilities.rank_zero import rank_zero_warn

#: The environment variable that is 0 where no store is to be looked at. Ranks that are spawned inherit it.
SWITCH = "LIGHTNING_LOOK_AT_STORES"
#: Seconds to wait for a store. A client without any answer may try for many minutes.
LIMIT_S = 30.0


def has_checkpoints(folder: AnyPath) -> bool:
    """Returns whether a folder for checkpoints has anything in it, after one request, which fails if the store does.

    A store that refuses only the listing, or is too busy now, may be written to later: it gets a warning, and False.

    Raises:
        FileNotFoundError: There is no such bucket.
        OSError: The store is not there, or refuses the credentials.
    """
    place = locate(folder)
    if place.is_local:
        return place.kind() == "directory" and bool(place.list_names())
    fs, path = place.resolve()
    if os.environ.get(SWITCH) == "0" and not isinstance(fs, MemoryFileSystem):
        return False
    try:
        with questions_named(place):
            listing = in_thread("checkpoint-look", _has_entries, fs, path)
            if not wait([listing], LIMIT_S).done:
                raise TimeoutError(f"no answer in {LIMIT_S:.0f} s")
            return listing.result()
    except (FileNotFoundError, NotADirectoryError) as error:
        is_named = any("NoSuchBucket" in str(cause) for cause in chain(error))
        # other clients give the same answer for an empty folder and for a bucket that is not there
        if is_named or (not has_folders(fs) and not hasattr(fs, "_s3") and place.lacks_bucket()):
            raise FileNotFoundError(f"Checkpoints cannot be saved to {place}. {about_bucket(place.raw)}.") from None
        return False
    except OSError as error:
        is_busy = is_transient(error) and any(status_of(cause) for cause in chain(error)) and not have_expired(error)
        if not lacks_permission(error) and not is_busy:
            raise
        rank_zero_warn(f"{error} The run goes on: whether checkpoints can be saved there shows when one is.")
        return False


def _has_entries(fs: AbstractFileSystem, path: str) -> bool:
    if not hasattr(fs, "call_s3"):
        return bool(names_inside(fs, path))
    # s3fs would list the folder around an empty one as well, which may be forbidden
    bucket, key, _ = fs.split_path(path)
    prefix = f"{key.rstrip('/')}/" if key else ""
    return bool(fs.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=1, **fs.req_kw).get("Contents"))
