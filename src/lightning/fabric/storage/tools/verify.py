"""Verifies a checkpoint without loading it: its files, and every byte against checksums."""

import logging
import os
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from lightning.fabric.storage.archives.archive_reader import Wrong
from lightning.fabric.storage.archives.magic_bytes import START, why_no_checkpoint
from lightning.fabric.storage.paths.layout import METADATA, STOCK_META
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.sharded.metadata_check import contradictions
from lightning.fabric.storage.strategies.checkpoint_place import find_checkpoint
from lightning.fabric.storage.tools.discover import why_incomplete
from lightning.fabric.storage.tools.file_checks import (
    CANNOT_TELL,
    Result,
    check_archive,
    check_blocks,
    check_file,
    check_records,
)
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.storage.transport.ranged_file import Source

log = logging.getLogger(__name__)

#: The most reported contradictions of the metadata, of which a file of any size can have many.
_MOST = 20


class NoCheckpoint(FileNotFoundError):
    """A folder is no checkpoint itself."""


def verify(place: Place) -> Result:
    """Checks a checkpoint: a folder of shards, or a file.

    Args:
        place: The place of the folder or the file.

    Raises:
        NoCheckpoint: The folder is no checkpoint, not even a part of one.
        FileNotFoundError: There is nothing at the place.
        OSError: The store did not answer, or refused. Its client may raise errors of its own.
    """
    log.info(f"Verifying {place}")
    if _is_nothing(place):
        if place.is_broken_link():
            return Result([f"{place} is a link to {os.readlink(place.raw)}, where there is nothing"])
        raise FileNotFoundError(f"There is nothing at {place}. {place.advice_if_missing()}.")
    try:
        found = find_checkpoint(place)
    except CANNOT_TELL:
        raise
    except OSError as error:  # the checkpoint is incomplete, or .metadata is damaged
        return Result([str(error)])
    result = Result()
    if found.metadata is not None:
        _check_folder(place, found.metadata, result)
    elif found.is_full:
        check_file(place, result, partial(_check_full, place, result))
    else:
        raise NoCheckpoint(f"There is no checkpoint in the folder {place}")
    return result


def verify_one_of_many(place: Place) -> Result:
    """Verifies a checkpoint of :func:`~lightning.fabric.storage.tools.discover.checkpoints_below`."""
    try:
        return verify(place)
    except NoCheckpoint:
        why = why_incomplete(place)
        if why is None:
            raise
        return Result([why])


def _is_nothing(place: Place) -> bool:
    try:
        with questions_named(place):
            return place.kind() == "nothing"
    except PermissionError:  # some roles may read, but not list
        return False


def _check_folder(place: Place, metadata: Metadata, result: Result) -> None:
    check_file(place / METADATA, result, lambda source: [])  # its content was checked when it was read
    result.problems += [f"{place / METADATA} {wrong}" for wrong in islice(contradictions(metadata), _MOST)]
    infos: dict[str, dict[int, tuple[str, Any]]] = {}  # of each file, with names, by offset
    for index, info in metadata.storage_data.items():
        infos.setdefault(info.relative_path, {})[info.offset] = (index.fqn, info)
    ours = getattr(metadata, "lightning", None)
    if ours is None:
        result.verdict = "saved without checksums; those of the archives in it (CRC-32) are right"
        expected = _tensors(metadata)
        for name, of_file in sorted(infos.items()):
            check_file(place / name, result, partial(check_records, of_file, expected, result))
        check_file(place / STOCK_META, result, lambda source: check_archive(source, result))
        return
    for name, described in sorted(ours["files"].items()):
        check_file(place / name, result, partial(check_blocks, described, infos.get(name, {})))
    if ours["meta"] is not None:
        _check_stock_meta(place / STOCK_META, ours["files"][ours["meta"]], result)


def _check_stock_meta(place: Place, described: dict[str, Any], result: Result) -> None:
    """Checks ``meta.pt``, a copy of another file for stock Lightning."""
    before = len(result.problems)
    check_file(place, result, partial(check_blocks, described, {}))
    for number, problem in enumerate(result.problems[before:], before):
        result.problems[number] = f"{problem} (stock Lightning reads this file, this library does not)"


def _tensors(metadata: Metadata) -> dict[tuple[str, int], tuple[torch.dtype, tuple[int, ...]]]:
    """Returns the type and the shape of each part of a tensor, by file and offset."""
    tensors = {}
    for name, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            for chunk in described.chunks:
                info = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
                if info is not None:
                    tensors[info.relative_path, info.offset] = described.properties.dtype, tuple(chunk.sizes)
    return tensors


def _check_full(place: Place, result: Result, source: Source) -> list[Wrong]:
    start = bytearray(min(START, source.size))
    if start:
        source.read_into(0, memoryview(start))
    why = why_no_checkpoint(bytes(start))
    if why is None:
        return check_archive(source, result)
    result.problems.append(f"{place} is no checkpoint: {why}")
    return []
