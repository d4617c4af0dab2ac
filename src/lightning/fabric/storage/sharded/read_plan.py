"""Reads what a load plan needs of a sharded checkpoint: many ranges at a time, each of which is verified.

What is needed is sorted by file and place, and joined where it is near each other. Requests are fetched and verified in
threads. All that the planner is asked or told happens in the thread that called.
"""

import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.sharded.byte_ranges import GAP, REQUEST
from lightning.fabric.storage.sharded.checksums import Record, records_of
from lightning.fabric.storage.sharded.read_requests import Damaged, ReadRequest, ReadRequests, RecordPlace, Unloadable
from lightning.fabric.storage.transport.open import open_source
from lightning.fabric.storage.transport.ranged_file import REQUESTS_IN_FLIGHT, Source
from lightning.fabric.storage.transport.threads import TaskPool, in_thread

_THREADS = "checkpoint-read"
#: Bytes of requests in flight, besides what goes straight into the tensors; a larger record is read alone.
_MEMORY = REQUESTS_IN_FLIGHT * REQUEST
#: A record that is read as a whole is taken to be as long as it is said to be up to so many bytes.
_TRUSTED = REQUEST
_ADVICE = "Load another checkpoint: this one was changed after it was saved, or its storage cannot be relied on"


def read_plan(place: Place, metadata: Metadata, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Does what :meth:`torch.distributed.checkpoint.StorageReader.read_data` does.

    Of a tensor whose record has checksums only the blocks are read in which the plan's part of it is. When an error
    leaves, no request is on its way any more that could write into a target; but what the planner has given may be
    partly overwritten, also with bytes that turned out to be damaged.

    Args:
        place: The checkpoint's folder.
        metadata: What it says of itself. Without an attribute ``lightning`` there are no checksums to verify.
        plan: What to read.
        planner: Gives the memory, is told when a tensor is complete, and takes the bytes of what is no tensor.

    Raises:
        FileNotFoundError: A file is missing.
        OSError: A file is damaged or shorter than it should be, the store did not answer, or refused.
        ValueError: A target has another size than what is to be loaded into it.
    """
    reader = _PlanReader(place, metadata, planner)
    for item in plan.items:
        reader.add(item)
    reader.read()


class _File:
    """A file of the checkpoint, which is opened when something is read from it.

    Args:
        place: Where it is.
        described: What the metadata say of it, if they do.
    """

    def __init__(self, place: Place, described: dict[str, Any] | None) -> None:
        self.place = place
        #: Items of each record.
        self.items: dict[RecordPlace, list[ReadItem]] = {}
        self.requests = 0
        self._size = described["size"] if described is not None else None
        self._records: dict[int, Record] | None = None
        if described is not None:
            try:
                self._records = {record.offset: record for record in records_of(described)}
            except Exception as error:  # what is damaged may be of any type
                raise self.damage(f".metadata do not tell where its records are ({error})") from error
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._failure: OSError | None = None

    def add(self, item: ReadItem, info: Any) -> None:
        record = None
        if self._records is not None:
            record = self._records.get(info.offset)
            if record is None or record.length != info.length:
                raise self.damage(f"no checksum of {item.storage_index.fqn!r} was stored")
        place = RecordPlace(info.offset, info.length, tuple(getattr(info, "transform_descriptors", None) or ()), record)
        self.items.setdefault(place, []).append(item)

    def source(self, name: str) -> Source:
        """The file, opened; ``name`` is what it is opened for."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._source is None:
                try:
                    self._source = self._open(name)
                except OSError as error:
                    self._failure = error
                    raise
            return self._source

    def _open(self, name: str) -> Source:
        try:
            source = open_source(self.place)
        except FileNotFoundError as error:
            raise self._missing(name) from error
        if self._size not in (None, source.size):
            source.close()
            raise self.damage(f"it has {source.size} bytes, and was saved with {self._size}; it holds {name!r}")
        return source

    def check_end(self, stop: int, name: str) -> Source:
        """The file, opened, which has all bytes up to ``stop``."""
        source = self.source(name)
        if stop > source.size:
            raise self.damage(f"it ends after {source.size} bytes, and {name!r} goes on to {stop}")
        return source

    def read_into(self, start: int, view: memoryview, name: str) -> None:
        source = self.check_end(start + len(view), name)
        try:
            source.read_into(start, view)
        except FileNotFoundError as error:
            raise self._missing(name) from error

    def _missing(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(
            f"{self.place} is missing, which holds {name!r}: the checkpoint is incomplete, or was replaced"
            " while it was loaded. Load it again, or load another one"
        )

    def damage(self, what: str) -> OSError:
        return OSError(f"{self.place} is damaged: {what}. {_ADVICE}")

    def check(self) -> None:
        if self._source is not None:
            self._source.check()

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


class _PlanReader:
    """Reads the items that were added."""

    def __init__(self, place: Place, metadata: Metadata, planner: LoadPlanner) -> None:
        self._place = place
        self._metadata = metadata
        self._described = getattr(metadata, "lightning", None)
        self._needs = ReadRequests(metadata, planner)
        self._files: dict[str, _File] = {}
        #: Those of which all has been read.
        self._read: list[_File] = []

    def add(self, item: ReadItem) -> None:
        info = self._metadata.storage_data[item.storage_index]
        name = info.relative_path
        if name not in self._files:
            described = None if self._described is None else self._described["files"].get(name)
            if self._described is not None and described is None:
                raise OSError(f"{self._place} is damaged: its .metadata do not describe {name}. {_ADVICE}")
            self._files[name] = _File(self._place / name, described)
        self._files[name].add(item, info)

    def read(self) -> None:
        if not self._files:
            return
        first = self._files[min(self._files)]
        name = next(iter(first.items.values()))[0].storage_index.fqn
        opened = in_thread(_THREADS, first.source, name)
        wait([opened])  # in which the waiting thread can be interrupted
        crew = TaskPool(_THREADS, REQUESTS_IN_FLIGHT if opened.result().parallel else 1, _MEMORY)
        try:
            crew.run(self._requests())
            crew.run(self._ends())
        finally:
            if crew.is_idle:
                for file in self._files.values():
                    file.close()

    def _requests(self) -> Iterator["_Request | _End"]:
        for name in sorted(self._files):
            file = self._files[name]
            file.requests = 1  # until there are no more
            for needs in _batches(self._needs_of(file)):
                yield from self._ends()
                file.requests += 1
                yield _Request(file, needs, self._finished)
            self._finished(file)

    def _needs_of(self, file: _File) -> Iterator[ReadRequest]:
        for place in sorted(file.items, key=lambda place: place.offset):
            items = file.items[place]
            try:
                if place.length > _TRUSTED and (place.record is None or not place.record.is_tensor):
                    file.check_end(
                        place.offset + place.length, items[0].storage_index.fqn
                    )  # before there is memory for it
                yield from self._needs.of(place, items)
            except Damaged as error:
                raise file.damage(str(error)) from error

    def _finished(self, file: _File) -> None:
        file.requests -= 1
        if not file.requests:
            self._read.append(file)

    def _ends(self) -> Iterator["_End"]:
        while self._read:
            yield _End(self._read.pop())


def _batches(needs: Iterator[ReadRequest]) -> Iterator[list[ReadRequest]]:
    """What to read with one request each."""
    batch: list[ReadRequest] = []
    stop = 0
    for need in needs:
        if batch and (
            need.into is not None or need.start - stop > GAP or max(stop, need.stop) - batch[0].start > REQUEST
        ):
            yield batch
            batch, stop = [], 0
        if need.into is not None:
            yield [need]
        else:
            batch.append(need)
            stop = max(stop, need.stop)
    if batch:
        yield batch


class _Request:
    """Some bytes of a file, to read and to verify."""

    def __init__(self, file: _File, needs: list[ReadRequest], finished: Any) -> None:
        self._file = file
        self._needs = needs
        self._finished = finished
        self._start = needs[0].start
        self._stop = max(need.stop for need in needs)
        self._data: Tensor | None = None
        self.cost = self._stop - self._start if needs[0].into is None else needs[0].cost

    def run(self) -> None:
        view = self._needs[0].into
        if view is None:
            self._data = torch.empty(self._stop - self._start, dtype=torch.uint8)
            view = self._data.numpy().data
        self._file.read_into(self._start, view, self._needs[0].name)
        verified: set[int] = set()  # neighbours may share a block
        for need in self._needs:
            for start, stop, before, crc in need.checks:
                if start in verified:
                    continue
                if crc is not None and zlib.crc32(view[start - self._start : stop - self._start], before) != crc:
                    raise self._file.damage(
                        f"bytes {start} to {stop}, which belong to {need.name!r}, are not those that were saved"
                    )
                verified.add(start)

    def finish(self) -> int:
        freed = 0 if self._data is None else self.cost
        for need in self._needs:
            data = None if self._data is None else self._data[need.start - self._start : need.stop - self._start]
            try:
                freed += need.done(data)
            except Unloadable as error:
                where = f"bytes {need.start} to {need.stop} of {self._file.place}"
                raise OSError(f"There is no tensor that can be loaded in {where}: {error}") from error
        self._finished(self._file)
        return freed


class _End:
    """Sees whether a file of which all has been read is still the one that was opened, and closes it."""

    cost = 0

    def __init__(self, file: _File) -> None:
        self._file = file

    def run(self) -> None:
        self._file.check()
        self._file.close()

    def finish(self) -> int:
        return 0
