"""Checks of one file of a checkpoint: that it is there, and every byte against checksums."""

import dataclasses
import io
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning.fabric.storage.archives.archive_reader import Wrong, Zipped
from lightning.fabric.storage.paths.layout import METADATA
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.sharded.checksums import Record, records_of
from lightning.fabric.storage.transport.coalesce import coalesce
from lightning.fabric.storage.transport.open import open_source
from lightning.fabric.storage.transport.ranged_file import REQUEST, REQUESTS_IN_FLIGHT, RangedFile, Source
from lightning.fabric.storage.transport.threads import TaskPool

_DAMAGED = "are damaged: their checksum is wrong"
#: Errors of the store, from which nothing follows for the checkpoint.
CANNOT_TELL = (PermissionError, ConnectionError, TimeoutError)


@dataclasses.dataclass
class Result:
    """The result of a verification.

    Attributes:
        problems: A line of text for each problem.
        files: The number of checked files.
        nbytes: Bytes of these files.
        verdict: The end of the report, about the checksums, if there are no problems.
    """

    problems: list[str] = dataclasses.field(default_factory=list)
    files: int = 0
    nbytes: int = 0
    verdict: str = "all checksums right"

    def __str__(self) -> str:
        checked = f"{_count(self.files, 'file')}, {self.nbytes} bytes"
        if self.problems:
            return f"{_count(len(self.problems), 'problem')}, {checked}: load another checkpoint"
        return f"complete, {checked}, {self.verdict}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def check_file(place: Place, result: Result, check: Callable[[Source], Iterable[Wrong]]) -> None:
    """Opens a file, and adds to the result the problems that ``check`` finds."""
    try:
        with closing(open_source(place)) as source:
            result.files += 1
            result.nbytes += source.size
            for start, stop, name, reason in _merged(check(source)):
                whose = f" of {name!r}" if name else ""
                result.problems.append(f"{place}: bytes {start} to {stop}{whose} {reason}")
            source.check()
    except CANNOT_TELL:
        raise
    except OSError as error:  # the file is missing, was replaced meanwhile, or the disk is damaged
        result.problems.append(str(error))


def _merged(found: Iterable[Wrong]) -> list[Wrong]:
    """Joins those that follow on each other and differ in nothing else."""
    merged: list[Wrong] = []
    for wrong in sorted(found):
        if merged and (merged[-1].stop, *merged[-1][2:]) == (wrong.start, *wrong[2:]):
            merged[-1] = merged[-1]._replace(stop=wrong.stop)
        else:
            merged.append(wrong)
    return merged


def check_archive(source: Source, result: Result) -> list[Wrong]:
    """Checks a file of ``torch.save``."""
    return _wrong_in(0, "", None, result, RangedFile(_Part(source, 0, source.size)))


def check_blocks(described: dict[str, Any], infos: dict[int, tuple[str, Any]], source: Source) -> list[Wrong]:
    """Checks a file whose records have checksums."""
    size = described["size"]
    if source.size != size:
        first, last = sorted((source.size, size))
        return [Wrong(first, last, "", f"are {'missing' if source.size < size else 'too many'}")]
    try:
        records = records_of(described)
    except Exception as error:  # what is damaged may be of any type
        return [Wrong(0, size, "", f"are not described by {METADATA}: {error}")]
    wrong: list[Wrong] = []
    checks: list[_Check] = []
    position = 0
    for record in [*records, Record(size, 0, size, 0, b"")]:
        if record.offset < position:
            return [Wrong(record.offset, position, "", f"belong to two records, as {METADATA} have it")]
        if record.offset > position:
            wrong.append(Wrong(position, record.offset, infos.get(position, ("",))[0], "have no checksum"))
        name = infos.get(record.offset, ("what is neither model nor optimizer",))[0]
        for start, stop, before, crc in record.blocks():
            if crc is None:
                wrong.append(Wrong(start, stop, name, "have no checksum"))
            else:
                checks.append(_Check(start, stop, partial(_wrong_block, start, stop, name, before, crc)))
        position = record.end
    known = {(record.offset, record.length) for record in records}
    reported = {one.start for one in wrong}
    for offset, (name, info) in infos.items():
        if (offset, info.length) not in known and offset not in reported:
            wrong.append(Wrong(offset, offset + info.length, name, "have no checksum"))
    return wrong + _run(source, checks)


def _wrong_block(start: int, stop: int, name: str, before: int, crc: int, data: memoryview) -> list[Wrong]:
    return [] if zlib.crc32(data, before) == crc else [Wrong(start, stop, name, _DAMAGED)]


_Expected = tuple[torch.dtype, tuple[int, ...]] | None


def check_records(
    infos: dict[int, tuple[str, Any]],
    expected: dict[tuple[str, int], tuple[torch.dtype, tuple[int, ...]]],
    result: Result,
    source: Source,
) -> list[Wrong]:
    """Checks a file without checksums of its records, from their places and from the tensors that should be in them."""
    wrong: list[Wrong] = []
    checks: list[_Check] = []
    large: list[_Check] = []
    position = 0
    for start, (name, info) in sorted(infos.items()):
        stop = start + info.length
        if start < position:
            return [Wrong(start, position, name, f"belong to two records, as {METADATA} have it")]
        position = stop
        if stop > source.size:
            wrong.append(Wrong(max(start, source.size), stop, name, "are missing"))
        elif getattr(info, "transform_descriptors", None):
            wrong.append(Wrong(start, stop, name, "cannot be verified: an extension of torch has transformed them"))
        else:
            check = partial(_wrong_in, start, name, expected.get((info.relative_path, start)), result)
            (large if info.length > REQUEST else checks).append(_Check(start, stop, check))
    wrong += _run(source, checks)
    for one in large:
        wrong += one.check(RangedFile(_Part(source, one.start, one.stop - one.start)))
    return wrong


def _wrong_in(offset: int, name: str, what: _Expected, result: Result, file: RangedFile | memoryview) -> list[Wrong]:
    """Checks the archive at an offset of a file, and returns the places in that file."""
    zipped = Zipped(io.BytesIO(file) if isinstance(file, memoryview) else file)
    found = zipped.check()
    if not found and not zipped.has_checksums:
        result.verdict = "saved without checksums"
    if not found and None not in (what, zipped.tensor) and what != zipped.tensor:
        found = [Wrong(0, zipped.size, "", f"hold another tensor than {METADATA} have it")]
    return [Wrong(offset + wrong.start, offset + wrong.stop, name or wrong.name, wrong.reason) for wrong in found]


class _Check(NamedTuple):
    """Bytes of a file, and a function that takes them and returns those that are wrong."""

    start: int
    stop: int
    check: Callable[[Any], list[Wrong]]


def _run(source: Source, checks: list[_Check]) -> list[Wrong]:
    wrong: list[Wrong] = []
    pool = TaskPool("checkpoint-verify", REQUESTS_IN_FLIGHT if source.parallel else 1, REQUESTS_IN_FLIGHT * REQUEST)
    pool.run(_Request(source, group, wrong) for group in coalesce(checks, 0, REQUEST))
    return wrong


class _Request:
    """Reads bytes of a file, and runs the checks of them."""

    def __init__(self, source: Source, checks: list[_Check], wrong: list[Wrong]) -> None:
        self._source = source
        self._checks = checks
        self._wrong = wrong
        self._found: list[Wrong] = []
        self._start = checks[0].start
        self.cost = checks[-1].stop - self._start

    def run(self) -> None:
        data = np.empty(self.cost, np.uint8).data
        self._source.read_into(self._start, data)
        for one in self._checks:
            self._found += one.check(data[one.start - self._start : one.stop - self._start])

    def finish(self) -> int:
        self._wrong += self._found
        return self.cost


class _Part:
    """A part of a source, whose end does not close the source."""

    def __init__(self, source: Source, start: int, size: int) -> None:
        self._source = source
        self._start = start
        self.size = size
        self.parallel = source.parallel

    def read_into(self, start: int, view: memoryview) -> None:
        self._source.read_into(self._start + start, view)

    def check(self) -> None:
        self._source.check()

    def close(self) -> None:
        pass
