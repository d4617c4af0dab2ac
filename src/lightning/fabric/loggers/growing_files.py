"""Uploads of files that grow: all of a file, or segments of it."""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

#: At most that many times the size of a file is uploaded ...
_TIMES = 8
#: ... and this many bytes for each second, so that one that grows slowly does not lag far behind.
_SPARE_BYTES_PER_S = 4 * 2**10
#: Sizes between which a segment ends when it has been sent so often, and at which it ends in any case.
_SMALLEST_SEGMENT = 64 * 2**10
_LARGEST_SEGMENT = 8 * 2**20
#: Bytes around the content of a record of events: its length, the checksum of that, and the checksum of the content.
_LENGTH, _AROUND = 8, 16


def holds_events(name: str) -> bool:
    """Returns whether a file of that name holds events, as TensorBoard sees it."""
    return "tfevents" in name.rpartition("/")[2]


class WholeFile:
    """A file that goes as a whole."""

    def __init__(self, path: Path, changing: AbstractContextManager[object]) -> None:
        self._path = path
        self._changing = changing
        self._since = time.monotonic()
        self._sent = 0
        self._state: tuple[int, int] | None = None

    def uploads(self, everything: bool) -> Iterator[tuple[str, bytes]]:
        """Yields what is to be sent now, with the suffix of its name. Asking for the next one means that it is sent."""
        with self._changing:
            found = self._path.stat()
            state = (found.st_mtime_ns, found.st_size)
            allowed = (_TIMES - 1) * found.st_size + _SPARE_BYTES_PER_S * (time.monotonic() - self._since)
            if state == self._state or (self._sent > allowed and not everything):
                return
            content = self._path.read_bytes()
        yield "", content
        self._sent += len(content)
        self._state = state


class Events:
    """A file of events, which only grows. Each segment begins with the record of the format's version."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head = b""
        self._number = 0
        self._start = self._end = 0  # of the part of the file that the current segment has
        self._sent = 0

    def uploads(self, everything: bool) -> Iterator[tuple[str, bytes]]:
        """Yields all that is new, in segments, in the form of :class:`WholeFile`."""
        with open(self._path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while (end := self._next_end(file, size)) > self._end:
                file.seek(self._start)
                content = file.read(end - self._start)
                yield (f".{self._number:06}", self._head + content) if self._number else ("", content)
                self._head = self._head or content[: _end_of_record(file, 0)]
                self._end = end
                self._sent += len(content)
                if len(content) >= (_SMALLEST_SEGMENT if self._sent >= _TIMES * len(content) else _LARGEST_SEGMENT):
                    self._number, self._start, self._sent = self._number + 1, end, 0

    def _next_end(self, file: IO[bytes], size: int) -> int:
        """Returns where the last whole record ends, or one before that if the segment is large enough by then."""
        end = self._end
        while end + _LENGTH <= size and end - self._start < _LARGEST_SEGMENT:
            following = _end_of_record(file, end)
            if following > size:  # it is being written
                break
            end = following
        return end


def _end_of_record(file: IO[bytes], start: int) -> int:
    file.seek(start)
    return start + int.from_bytes(file.read(_LENGTH), "little") + _AROUND
