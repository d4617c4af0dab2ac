"""Opens checkpoint files, checks what their archives say of sizes, and explains what is wrong with them."""

import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from lightning.fabric.storage.archives.archive_reader import ARCHIVE, BrokenArchive, Zipped
from lightning.fabric.storage.archives.magic_bytes import START, why_no_checkpoint
from lightning.fabric.storage.paths.layout import STOCK_META
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.transport.errors import context_kept
from lightning.fabric.storage.transport.open import open_reader
from lightning.fabric.storage.transport.ranged_file import RangedFile
from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_6

#: Bytes at the end of an archive, in which its directory is, and the small records after the tensors. A small file is
#: read as a whole.
TAIL = 2**20
SMALL_FILE = 8 * 2**20
#: Names in torch's errors about archives.
_TORCH_READERS = ("PytorchStreamReader", "inline_container")


def open_checkpoint(place: Place) -> IO[bytes]:
    """Opens a file with :func:`~lightning.fabric.storage.transport.open.open_reader`; errors say what to do instead.

    Raises:
        FileNotFoundError: There is nothing at ``place``.
        IsADirectoryError: There is a folder, such as a sharded checkpoint.
    """
    with context_kept():  # the store's own error says no more
        try:
            return open_reader(place)
        except FileNotFoundError:
            raise not_found(place) from None
        except IsADirectoryError:
            what = "a folder, not a checkpoint file"
            if (place / STOCK_META).is_file():
                what = (
                    "a sharded checkpoint: load it with FSDP or ModelParallel, or make one file of it with `fabric"
                    " consolidate` (or `python -m lightning.fabric.utilities.consolidate_checkpoint`)"
                )
            raise IsADirectoryError(f"{place} is {what}") from None


def not_found(place: Place) -> FileNotFoundError:
    """Returns the error of every load from a place where nothing is."""
    return FileNotFoundError(f"Checkpoint file not found: {place}. {place.advice_if_missing()}.")


@contextmanager
def damage_explained(place: Place, file: IO[bytes]) -> Iterator[None]:
    """Names the file in torch's errors, and corrects their advice about files of another kind."""
    with context_kept():
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            file.seek(0)
            if (why := why_no_checkpoint(file.read(START))) is not None:
                raise RuntimeError(f"{place} is no checkpoint: {why}.") from None
            if isinstance(error, pickle.UnpicklingError):
                raise pickle.UnpicklingError(f"Could not load {place}: {error}") from None
            if (
                isinstance(error, (EOFError, IndexError, zipfile.BadZipFile))
                or isinstance(error.__cause__, (zipfile.BadZipFile, BrokenArchive))
                or any(name in str(error) for name in _TORCH_READERS)
            ):
                reason = str(error) or "it ends too early"
                raise RuntimeError(f"{place} is truncated, or is no checkpoint: {reason}") from error
            raise


def check_sizes(file: IO[bytes] | RangedFile, weights_only: bool | None) -> bool:
    """Checks the sizes in an archive, all of which torch believes.

    Returns:
        True if the file is an archive and was checked.

    Raises:
        RuntimeError: The archive is damaged, or takes more memory than it may.
    """
    if _is_trusted(weights_only):  # the user decides what the author may do
        return False
    is_archive = True
    try:
        Zipped(file).check_before_load()
    except BrokenArchive as error:
        file.seek(0)
        if file.read(len(ARCHIVE)) == ARCHIVE:  # else it is in torch's format of before 1.6
            raise RuntimeError(str(error)) from error
        is_archive = False
    file.seek(0)
    return is_archive


def _is_trusted(weights_only: bool | None) -> bool:
    """Returns whether :func:`torch.load` runs whatever code is in a file."""
    if weights_only is None:
        is_forced = os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower() in ("1", "y", "yes", "true")
        return is_forced or not _TORCH_GREATER_EQUAL_2_6
    return not weights_only


def records_of(file: IO[bytes] | RangedFile) -> list[tuple[str, tuple[int, int]]]:
    """Returns the names of an archive's records, each with the bytes from its header to the next one, in order."""
    with zipfile.ZipFile(file) as opened:
        infos = sorted(opened.infolist(), key=lambda info: info.header_offset)
        ends = [info.header_offset for info in infos[1:]] + [opened.start_dir]
    return [(info.filename, (info.header_offset, end)) for info, end in zip(infos, ends, strict=True)]


def tensors_of(records: list[tuple[str, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    """Returns the spans of tensors by their numbers."""
    return {int(found[1]): span for name, span in records if (found := re.search("/data/([0-9]+)$", name))}
