"""A file of a store, read in ranges of which many are in flight at a time."""

import errno
import io
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from lightning.fabric.storage.transport.threads import in_thread

#: The message of a source about a file that is no longer the one that was opened.
REPLACED = "it was replaced while it was read: load it again"
#: Bytes of the largest request. Larger ones take more memory, smaller ones wait more often for the first byte.
REQUEST = 8 * 2**20
#: The number of requests in flight, or answered and not taken yet.
REQUESTS_IN_FLIGHT = 16
#: Bytes that a small read asks for: what is near is read next, more often than not.
_SMALLEST_READ = 256 * 2**10

_Block = tuple[int, int]


class Source(Protocol):
    """A file whose ranges can be read."""

    size: int
    #: True if :meth:`read_into` can be called from many threads at a time.
    parallel: bool

    def read_into(self, start: int, view: memoryview) -> None:
        """Fills ``view`` with the bytes from ``start`` on, or raises an ``OSError``."""

    def check(self) -> None:
        """Raises an ``OSError`` if ranges may have been read that are not of the file that was opened."""

    def close(self) -> None:
        """Lets go of the file, of which no range is being read."""


class RangedFile(io.RawIOBase):
    """A binary file to read and seek in.

    What :meth:`expect` announces is fetched ahead, in memory of at most 128 MiB. Other large reads are split into
    ranges as well, which are fetched at the same time.

    Args:
        source: The file.
    """

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.size = source.size
        #: The first error of a read: torch shows one of its own.
        self.error: BaseException | None = None
        self._source = source
        self._position = 0
        self._kept: deque[tuple[int, memoryview]] = deque(maxlen=8)
        self._expected: Iterator[_Block] = iter(())
        self._ahead: deque[tuple[_Block, Future[memoryview]]] = deque()

    def expect(self, ranges: Iterable[_Block]) -> None:
        """Starts to fetch what is going to be read.

        Args:
            ranges: The first byte and the one after the last of each, in the order in which they will be read.
        """
        self._ahead.clear()
        self._expected = _blocks(ranges) if self._source.parallel else iter(())
        self._fetch_ahead()

    def check(self) -> None:
        """Raises an ``OSError`` if what was read may be of more than one version of the file."""
        self._source.check()

    def keep(self, start: int, stop: int) -> None:
        """Fetches a range at once, and keeps it, with the last few of such ranges."""
        if start < stop:
            self._kept.append((start, self._start(start, stop).result()))

    def keep_large(self, start: int, stop: int) -> None:
        """Keeps a range, unless it is kept already; many blocks of it are fetched at the same time."""
        if not any(at <= start and stop <= at + len(data) for at, data in self._kept):
            self.expect([(start, stop)])
            self._position = start
            data = np.empty(stop - start, np.uint8).data
            self._fill(data)
            self._kept.append((start, data))

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, f"Cannot seek to {base + offset}, before the first byte")
        self._position = base + offset
        return self._position

    @override
    def readinto(self, buffer: Any) -> int:
        try:
            with memoryview(buffer) as whole, whole.cast("B") as view:
                return self._fill(view[: max(0, self.size - self._position)])
        except BaseException as error:
            self.error = self.error or error
            raise

    def _fill(self, view: memoryview) -> int:
        done = 0
        while done < len(view):
            rest = view[done:]
            count = self._read_ahead(rest) or self._read_kept(rest) or self._read_unexpected(rest)
            self._position += count
            done += count
        return done

    def _read_ahead(self, view: memoryview) -> int:
        """Reads from what has been fetched ahead, as much as one block has of it."""
        found = next((i for i, (block, _) in enumerate(self._ahead) if block[0] <= self._position < block[1]), None)
        if found is None:
            return 0
        for _ in range(found):  # what was passed over is not going to be read
            self._ahead.popleft()
        self._fetch_ahead()
        (start, stop), fetched = self._ahead[0]
        data = fetched.result()[self._position - start :]
        count = min(len(view), len(data))
        _copy(view[:count], data[:count])
        if self._position + count == stop:
            self._ahead.popleft()
            self._fetch_ahead()
        return count

    def _fetch_ahead(self) -> None:
        while len(self._ahead) < REQUESTS_IN_FLIGHT and (block := next(self._expected, None)) is not None:
            self._ahead.append((block, self._start(*block)))

    def _read_kept(self, view: memoryview) -> int:
        for start, data in self._kept:
            if start <= self._position < start + len(data):
                data = data[self._position - start :]
                count = min(len(view), len(data))
                view[:count] = data[:count]
                return count
        return 0

    def _read_unexpected(self, view: memoryview) -> int:
        if len(view) < _SMALLEST_READ:
            self.keep(self._position, min(self._position + _SMALLEST_READ, self.size))
            return self._read_kept(view)
        if not self._source.parallel:
            self._source.read_into(self._position, view)
            return len(view)
        self.expect([(self._position, self._position + len(view))])
        return self._read_ahead(view)

    def _fetch(self, start: int, stop: int) -> memoryview:
        data = np.empty(stop - start, np.uint8).data
        self._source.read_into(start, data)
        return data

    def _start(self, start: int, stop: int) -> Future[memoryview]:
        if self._source.parallel:
            return in_thread("checkpoint-read", self._fetch, start, stop)
        done: Future[memoryview] = Future()
        done.set_result(self._fetch(start, stop))
        return done

    def __del__(self) -> None:
        """Does not close the file, unlike that of other files.

        The collector may call this in the midst of a client's own work, whose lock closing would wait for.
        """

    @override
    def close(self) -> None:
        self._ahead.clear()
        self._kept.clear()
        self._source.close()
        super().close()


def _blocks(ranges: Iterable[_Block]) -> Iterator[_Block]:
    """Coalesces ranges where one follows on the other, and cuts them into pieces of at most :data:`REQUEST` bytes."""
    start = stop = 0
    for first, end in ranges:
        if first != stop:
            if start < stop:
                yield start, stop
            start = first
        stop = end
        while stop - start >= REQUEST:
            yield start, start + REQUEST
            start += REQUEST
    if start < stop:
        yield start, stop


def _copy(target: memoryview, source: memoryview) -> None:
    """Copies without holding the GIL."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
