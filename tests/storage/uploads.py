"""Uploads to nowhere, which show what a sink does."""

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from lightning.fabric.storage.transport.upload import Handover, UploadBackend, write_all


class Kept(UploadBackend):
    """Keeps the pieces as they are, as an upload does until they are sent."""

    handover = Handover.LASTING

    def __init__(self, part_size: int = 32 * 2**20) -> None:
        self.pieces: list[Any] = []
        self.calls: list[str] = []
        self.size: int | None = None
        self._part_size = part_size

    @property
    def content(self) -> bytes:
        return b"".join(self.pieces)

    @override
    def begin(self, size: int, idle: Callable[[], None]) -> int:
        self.size = size
        self.calls.append("begin")
        return self._part_size

    @override
    def write_part(self, part: memoryview | bytearray) -> None:
        self.pieces.append(part)

    @override
    def commit(self) -> None:
        self.calls.append("commit")

    @override
    def abort(self) -> None:
        self.calls.append("abort")


class InWholeParts(Kept):
    """Wants parts of one size."""

    handover = Handover.WHOLE_PARTS


class To(Kept):
    """Writes to a file, and keeps nothing."""

    handover = Handover.BORROWED

    def __init__(self, file: Any, part_size: int = 32 * 2**20) -> None:
        super().__init__(part_size)
        self._file = file

    @override
    def write_part(self, part: memoryview | bytearray) -> None:
        write_all(self._file, part)
