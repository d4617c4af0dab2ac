"""The two ends of a commit: waiting for the files of all ranks before it, and what is left to do when it is there."""

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.fabric.storage.archives.save import save_file
from lightning.fabric.storage.paths.layout import STOCK_META
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.paths.remove import remove_file, remove_names
from lightning.fabric.storage.sharded.checksums import FileRecords
from lightning.fabric.storage.sharded.metadata_file import SHARD_SUFFIX
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.storage.transport.retry import retrying

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata  # not every build of PyTorch has it

log = logging.getLogger(__name__)

#: Seconds until a shared file system shows one node the files of another one. NFS clients cache a folder for up to a
#: minute.
LAG_S = 65.0
_LOOK_S = 0.5


def await_files(folder: Place, files: Mapping[str, FileRecords]) -> None:
    """Waits until this rank, which is going to commit, sees the files of all ranks in the folder.

    Each node may have a folder of that name on a disk of its own. In a store without folders, a file that was
    acknowledged is there for all.

    Raises:
        OSError: A file is not there, or has another size, also after :data:`LAG_S`.
    """
    if folder.shares_names():
        return
    wanted = {name: file.size for name, file in files.items()}
    end = time.monotonic() + LAG_S
    while True:
        try:
            sizes = folder.sizes_of_files()
        except PermissionError as error:  # some roles may write, but not list
            log.warning(f"Cannot look whether {folder} has the files of all ranks ({error})")
            return
        unseen = sorted(name for name, size in wanted.items() if name not in sizes or sizes[name] not in (size, None))
        if not unseen:
            return
        if time.monotonic() > end:
            more = f" and {len(unseen) - 1} more files" if len(unseen) > 1 else ""
            raise OSError(
                f"{folder / unseen[0]}{more} was written by another rank, and is not there for rank zero:"
                " the folder is not one that all nodes share, but each has one of that name. To save a sharded"
                " checkpoint, use a file system that all nodes share, or a URL"
            )
        time.sleep(min(_LOOK_S, LAG_S))


def write_stock_meta(place: Place, meta: Any) -> None:
    """Writes ``meta.pt``.

    Raises:
        OSError: The file could not be written. For this library's readers the checkpoint is complete all the same.
    """
    try:
        save_file(meta, place / STOCK_META)
    except OSError as error:
        raise OSError(
            f"The checkpoint {place} is saved, and loads here, but not with stock Lightning, for which"
            f" {STOCK_META} could not be written: {error}"
        ) from error


def clean_up(place: Place, metadata: "Metadata") -> None:
    """Removes the shards of the save that was replaced, and of those that did not end.

    The checkpoint is complete, so that a failure is only logged.
    """
    try:
        with questions_named(place, "remove"):
            retrying(f"The removal of what {place} has replaced", lambda: _remove_old(place, metadata))
    except Exception as error:
        reason = f"{type(error).__name__}: {redact(str(error))}"
        log.warning(f"Could not remove what earlier saves have left of {place} ({reason})")


def _remove_old(place: Place, metadata: "Metadata") -> None:
    ours = metadata.lightning  # type: ignore[attr-defined]
    found = place.sizes_of_files()
    old = [name for name in found if name.endswith(SHARD_SUFFIX) and name not in ours["files"]]
    if ours["meta"] is None and STOCK_META in found:
        old.append(STOCK_META)
    remove_names(place, old)
    if place.shares_names():  # a full file that the folder replaces; elsewhere it had to go before
        remove_file(place)
