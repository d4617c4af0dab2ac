"""Reads the byte ranges of a load plan from a sharded checkpoint: many at a time, each of which is verified.

Read requests are sorted by file and offset, and coalesced. They are fetched and verified in threads. All calls of the
planner are in the thread that called.
"""

import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import wait
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.sharded.byte_ranges import GAP, REQUEST
from lightning.fabric.storage.sharded.checksums import Record, records_of
from lightning.fabric.storage.sharded.read_requests import Damaged, ReadRequest, ReadRequests, RecordPlace, Unloadable
from lightning.fabric.storage.transport.coalesce import coalesce
from lightning.fabric.storage.transport.open import open_source
from lightning.fabric.storage.transport.ranged_file import REQUESTS_IN_FLIGHT, Source
from lightning.fabric.storage.transport.threads import TaskPool, in_thread

_THREADS = "checkpoint-read"
#: Bytes of requests in flight, besides those read straight into the tensors; a larger record is read alone.
_MEMORY = REQUESTS_IN_FLIGHT * REQUEST
#: The most bytes of a record that is read as a whole, for which memory is allocated before the file is looked at.
_TRUSTED = REQUEST
_ADVICE = "Load another checkpoint: this one was changed after it was saved, or its storage cannot be relied on"


def read_plan(place: Place, metadata: Metadata, plan: LoadPlan, planner: LoadPlanner) -> None:
    """Reads a plan, as :meth:`torch.distributed.checkpoint.StorageReader.read_data` does.

    Of a tensor whose record has checksums, only the blocks with the plan's part of it are read. After an error no
    request is in flight any more that could write into a target; but targets may be partly overwritten, also with bytes
    that turned out to be damaged.

    Args:
        place: The checkpoint's folder.
        metadata: The checkpoint's metadata. Without an attribute ``lightning`` there are no checksums to verify.
        plan: The items to read.
        planner: Gives the memory of tensors, is called when one is complete, and takes the bytes of other objects.

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
        place: The place of the file.
        described: The file in the metadata, if they describe files.
    """

    def __init__(self, place: Place, described: dict[str, Any] | None) -> None:
        self.place = place
        #: The items of each record.
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
        """Returns the file, opened; ``name`` is the tensor or object for which it is opened."""
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
        """Returns the file, opened, after a check that it has all bytes up to ``stop``."""
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
    """Reads the items of a plan, file by file."""

    def __init__(self, place: Place, metadata: Metadata, planner: LoadPlanner) -> None:
        self._place = place
        self._metadata = metadata
        self._described = getattr(metadata, "lightning", None)
        self._read_requests = ReadRequests(metadata, planner)
        self._files: dict[str, _File] = {}
        #: Files of which all has been read.
        self._done: list[_File] = []

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
        pool = TaskPool(_THREADS, REQUESTS_IN_FLIGHT if opened.result().parallel else 1, _MEMORY)
        try:
            pool.run(self._requests())
            pool.run(self._closings())
        finally:
            if pool.is_idle:
                for file in self._files.values():
                    file.close()

    def _requests(self) -> Iterator["_Fetch | _Close"]:
        for name in sorted(self._files):
            file = self._files[name]
            file.requests = 1  # until there are no more
            for requests in _coalesced(self._read_requests_of(file)):
                yield from self._closings()
                file.requests += 1
                yield _Fetch(file, requests, self._finished)
            self._finished(file)

    def _read_requests_of(self, file: _File) -> Iterator[ReadRequest]:
        for place in sorted(file.items, key=lambda place: place.offset):
            items = file.items[place]
            try:
                if place.length > _TRUSTED and (place.record is None or not place.record.is_tensor):
                    # before memory is allocated for it
                    file.check_end(place.offset + place.length, items[0].storage_index.fqn)
                yield from self._read_requests.of(place, items)
            except Damaged as error:
                raise file.damage(str(error)) from error

    def _finished(self, file: _File) -> None:
        file.requests -= 1
        if not file.requests:
            self._done.append(file)

    def _closings(self) -> Iterator["_Close"]:
        while self._done:
            yield _Close(self._done.pop())


def _coalesced(requests: Iterator[ReadRequest]) -> Iterator[list[ReadRequest]]:
    """Yields the requests that are read together; one with memory of its own is read alone."""
    for is_direct, run in groupby(requests, lambda request: request.into is not None):
        yield from coalesce(run, GAP, 0 if is_direct else REQUEST)


class _Fetch:
    """Reads and verifies the bytes of coalesced requests."""

    def __init__(self, file: _File, requests: list[ReadRequest], finished: Any) -> None:
        self._file = file
        self._requests = requests
        self._finished = finished
        self._start = requests[0].start
        self._stop = max(request.stop for request in requests)
        self._data: Tensor | None = None
        self.cost = self._stop - self._start if requests[0].into is None else requests[0].cost

    def run(self) -> None:
        view = self._requests[0].into
        if view is None:
            self._data = torch.empty(self._stop - self._start, dtype=torch.uint8, device="cpu")
            view = self._data.numpy().data
        self._file.read_into(self._start, view, self._requests[0].name)
        verified: set[int] = set()  # neighbours may share a block
        for request in self._requests:
            for start, stop, before, crc in request.checks:
                if start in verified:
                    continue
                if crc is not None and zlib.crc32(view[start - self._start : stop - self._start], before) != crc:
                    raise self._file.damage(
                        f"bytes {start} to {stop}, which belong to {request.name!r}, are not those that were saved"
                    )
                verified.add(start)

    def finish(self) -> int:
        freed = 0 if self._data is None else self.cost
        for request in self._requests:
            data = None if self._data is None else self._data[request.start - self._start : request.stop - self._start]
            try:
                freed += request.done(data)
            except Unloadable as error:
                where = f"bytes {request.start} to {request.stop} of {self._file.place}"
                raise OSError(f"There is no tensor that can be loaded in {where}: {error}") from error
        self._finished(self._file)
        return freed


class _Close:
    """Checks that a file of which all has been read is still the one that was opened, and closes it."""

    cost = 0

    def __init__(self, file: _File) -> None:
        self._file = file

    def run(self) -> None:
        self._file.check()
        self._file.close()

    def finish(self) -> int:
        return 0
