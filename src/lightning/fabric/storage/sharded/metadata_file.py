"""The file ``.metadata``, which commits a sharded checkpoint: it is written last and in one piece.

It is torch's ``Metadata``, pickled, with one more attribute of built-in types, which torch itself ignores::

    lightning = {
        "format": 2,
        "meta": "__0123456789ab_meta.distcp",  # what meta.pt holds; or None
        "files": {name: FileRecords._asdict(), ...},
    }

In format 1 the records of a file were a list of tuples with the fields of :class:`Record`.

The pickle is followed by its own checksum. All files that are read are named there, so that an overwrite in place is
seen as a whole: weights, optimizer and loop state are of one save. ``meta.pt`` is for stock Lightning only.

Folders that stock Lightning or torch saved have none of that. They are complete if they have ``.metadata``, the files
that it names, and ``meta.pt``.
"""

import logging
import pickle
import re
import secrets
import types
import zlib
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np

from lightning.fabric.storage.gc_pause import collection_paused
from lightning.fabric.storage.paths.layout import METADATA, STOCK_META
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.sharded.checksums import FileRecords, records_of
from lightning.fabric.storage.transport.errors import ask
from lightning.fabric.storage.transport.open import open_source, open_writer

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata  # not every build of PyTorch has it

log = logging.getLogger(__name__)

SHARD_SUFFIX = ".distcp"
_FORMAT = 2
_TRAILER = re.compile(rb"\nlightning-crc32:([0-9a-f]{8})\Z")


def new_save() -> str:
    """Returns a random name for one save, which is a part of its files' names."""
    return secrets.token_hex(6)


def meta_name(save: str) -> str:
    """Returns the name of the file with the objects that are neither model nor optimizer."""
    return f"__{save}_meta{SHARD_SUFFIX}"


def shard_name(save: str, rank: int) -> str:
    """Returns the name of the file with a rank's shard of model and optimizer."""
    return f"__{save}_{rank}_0{SHARD_SUFFIX}"


def describe(metadata: "Metadata", meta: str | None, files: Mapping[str, FileRecords]) -> None:
    """Adds the attribute ``lightning`` to torch's metadata.

    Args:
        metadata: The metadata of a checkpoint that is about to be committed.
        meta: The file of :func:`meta_name`, if there is one.
        files: All files, by name.
    """
    described = {name: file._asdict() for name, file in files.items()}
    metadata.lightning = {"format": _FORMAT, "meta": meta, "files": described}  # type: ignore[attr-defined]


def write_metadata(place: Place, metadata: "Metadata") -> None:
    """Commits the checkpoint at ``place``: from now on it consists of the files that the metadata name."""
    with open_writer(place / METADATA) as file, collection_paused():
        crc = 0

        def write(data: bytes) -> None:
            nonlocal crc
            crc = zlib.crc32(data, crc)
            file.write(data)

        # other threads can run after each 64 KiB that the pickler writes, and not at all in pickle.dumps
        pickle.Pickler(types.SimpleNamespace(write=write)).dump(metadata)
        file.write(b"\nlightning-crc32:%08x" % crc)


def read_metadata(place: Place) -> "tuple[Metadata, bytes]":
    """Reads ``.metadata``, and checks that the files that it names are there.

    Returns:
        The metadata, and the content of the file, an argument of :func:`parse_metadata`.

    Raises:
        FileNotFoundError: There is no complete checkpoint. The message names the missing files.
        OSError: The store did not answer, or ``.metadata`` is damaged.
    """
    content = None
    while True:
        before = content
        try:
            content = _content(place / METADATA)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(_why_missing(place)) from error
        metadata = parse_metadata(content, place)
        try:
            _check_files(place, metadata)
        except FileNotFoundError:
            if content == before:
                raise
            # a save may have replaced the checkpoint between the two requests
        else:
            return metadata, content


def _check_files(place: Place, metadata: "Metadata") -> None:
    try:
        sizes = ask(place, place.sizes_of_files)
    except PermissionError as error:  # some roles may read, but not list
        log.warning(f"Cannot look whether {place} is complete, which would show when it is read ({error})")
        return
    ours = getattr(metadata, "lightning", None)
    if ours is not None:
        wanted = {name: int(file["size"]) for name, file in ours["files"].items()}
    else:
        wanted = dict.fromkeys((info.relative_path for info in metadata.storage_data.values()), 0)
        wanted[STOCK_META] = 0
    missing = sorted(name for name in wanted if name not in sizes)
    short = sorted(
        f"{name} ({sizes[name]} of {size} bytes)"
        for name, size in wanted.items()
        if ours is not None and sizes.get(name, size) not in (size, None)
    )
    if missing or short:
        lack = [f"{' and '.join(missing[:3])} {'is' if len(missing) == 1 else 'are'} missing"] if missing else []
        lack += [f"of another size than saved: {', '.join(short[:3])}"] if short else []
        more = " (and more)" if max(len(missing), len(short)) > 3 else ""
        why = "its files were removed, or lost in a copy"
        if ours is None:
            why += f", or {METADATA} is damaged, which has no checksum"
        raise FileNotFoundError(
            f"The sharded checkpoint {place} is incomplete: {'; '.join(lack)}{more}. Load another one: {why}."
        )


def _why_missing(place: Place) -> str:
    if not is_begun(place):
        return f"There is no sharded checkpoint at {place}: {METADATA} is missing"
    return (
        f"The sharded checkpoint {place} is incomplete: {METADATA} is missing, which a save writes last."
        " The save was interrupted, or goes on: load another checkpoint. What is left here goes with the next save to"
        " that path."
    )


def parse_metadata(content: bytes, place: Place) -> "Metadata":
    """Returns the metadata of the checkpoint at ``place`` from the content of ``.metadata``.

    Raises:
        OSError: The content is damaged, or of a newer release.
        ImportError: This PyTorch was built without its distributed package.
    """
    try:
        from torch.distributed.checkpoint import Metadata

        from lightning.fabric.storage.sharded.metadata_check import check_metadata
        from lightning.fabric.storage.sharded.metadata_unpickler import unpickle
    except ImportError as error:
        raise ImportError(
            f"{place} is a sharded checkpoint, which takes torch.distributed to read, and this build of"
            " PyTorch has none: install one that has, or consolidate the checkpoint where there is one"
        ) from error
    trailer = _TRAILER.search(content, max(0, len(content) - 64))
    pickled = content[: trailer.start()] if trailer else content
    if trailer and int(trailer[1], 16) != zlib.crc32(pickled):
        raise OSError(f"{place / METADATA} is damaged: its checksum is wrong. Load another checkpoint.")
    try:
        metadata = unpickle(pickled)
        if not isinstance(metadata, Metadata):
            raise OSError(f"{place / METADATA} holds no metadata of torch.distributed.checkpoint")
        ours = getattr(metadata, "lightning", None)
        if ours is not None and ours["format"] > _FORMAT:
            raise OSError(
                f"{place} was saved in format {ours['format']}, and this release reads formats up to"
                f" {_FORMAT}: load it with a newer one"
            )
        if ours is not None and trailer is None:
            raise ValueError("its checksum is missing")
        check_metadata(metadata)
    except OSError:
        raise
    except Exception as error:  # damaged pickles raise anything
        raise OSError(f"{place / METADATA} is damaged, or no metadata of a checkpoint: {error}") from error
    return metadata


def is_begun(place: Place) -> bool:
    """Returns whether there is a part of a sharded checkpoint, be it complete or not."""
    names = ask(place, place.sizes_of_files)
    return any(name in (METADATA, STOCK_META) or name.endswith(SHARD_SUFFIX) for name in names)


def read_meta(place: Place, metadata: "Metadata") -> bytes | None:
    """Reads the file of ``torch.save`` with the objects beside model and optimizer, if the checkpoint has one.

    Raises:
        OSError: The file could not be read, or is damaged.
    """
    ours = getattr(metadata, "lightning", None)
    if ours is None:
        return _content(place / STOCK_META)
    if ours["meta"] is None:
        return None
    file = place / ours["meta"]
    try:
        content = _content(file)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{file} is missing: the checkpoint is incomplete, or was replaced while it was loaded. Load it again, or"
            " load another one"
        ) from error
    try:
        records = records_of(ours["files"][ours["meta"]])
    except Exception as error:  # what is damaged may be of any type
        raise OSError(f"{place / METADATA} is damaged: {error}") from error
    for record in records:
        for start, end, before, crc in record.blocks():
            if zlib.crc32(memoryview(content)[start:end], before) != crc:
                wrong = f"{file} is damaged between bytes {start} and {end}: its checksum is wrong"
                raise OSError(f"{wrong}. Load another checkpoint.")
    return content


def _content(place: Place) -> bytes:
    with closing(open_source(place)) as source:
        content = np.empty(source.size, np.uint8)
        if source.size:
            source.read_into(0, content.data)
        return content.tobytes()
