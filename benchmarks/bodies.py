"""What goes over the wire and into memory: the bodies of requests, and the parts of objects that they become."""

import io
import os
import time
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree


class Piece:
    """A part of an object: an anonymous file in memory, or only the size of what was discarded."""

    def __init__(self, keep: bool) -> None:
        self.size = 0
        self.file = os.memfd_create("piece") if keep else None

    def append(self, data: memoryview) -> None:
        self.size += len(data)
        while self.file is not None and data:
            data = data[os.write(self.file, data) :]

    def read(self) -> bytes:
        return b"" if self.file is None else os.pread(self.file, self.size, 0)

    def __del__(self) -> None:
        if self.file is not None:
            os.close(self.file)


@dataclass
class Object:
    """A complete object."""

    pieces: list[Piece]
    tag: str
    modified: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def texts(document: Piece, name: str) -> list[str]:
    """What the elements of that name hold in an XML document."""
    return [element.text or "" for element in ElementTree.fromstring(document.read()).findall(f".//{{*}}{name}")]


class Chunked(io.RawIOBase):
    """Decodes HTTP's chunked coding, and S3's own inside it (aws-chunked), which has the same frames."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._left = 0
        self._ended = False

    def readinto(self, buffer: Any) -> int:
        if not self._left and not self._ended:
            self._left = int(self._source.readline().split(b";")[0], 16)
            if not self._left:
                self._ended = True
                while self._source.readline().strip():  # trailers
                    pass
        return self._read(buffer)

    def readable(self) -> bool:
        return True

    def _read(self, buffer: Any) -> int:
        if not self._left:
            return 0
        count: int = self._source.readinto(memoryview(buffer)[: self._left])
        if not count:
            raise ConnectionError("the client has left in the middle of a body")
        self._left -= count
        if not self._left:
            self._source.readline()
        return count


class Sized(io.RawIOBase):
    """The next ``size`` bytes of a stream."""

    def __init__(self, source: Any, size: int) -> None:
        self._source = source
        self._left = size

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            return 0
        count: int = self._source.readinto(memoryview(buffer)[: self._left])
        if not count:
            raise ConnectionError("the client has left in the middle of a body")
        self._left -= count
        return count

    def readable(self) -> bool:
        return True
