"""What ``torch.save`` writes into."""

import io
from typing import Any

from typing_extensions import override

#: No single write is larger: HDFS refuses one above 2 GB, and its client dies of one above 1 GB.
_LARGEST_WRITE = 16 * 2**20


class Sink(io.RawIOBase):
    """Passes on all that it is given, in pieces of bounded size, and remembers why it could not.

    ``torch.save`` does not notice when a write takes less than it was given, and shows any ``OSError`` of a write as a
    ``RuntimeError`` about a position.

    Args:
        file: An object with ``write``, which may take less than it is given and say so.
        copies: Give ``file`` pieces of its own rather than views of the writer's memory. What keeps a piece beyond the
            call needs that, since the writer uses the memory again.
    """

    def __init__(self, file: Any, copies: bool = False) -> None:
        super().__init__()
        self.error: Exception | None = None
        self._file = file
        self._copies = copies
        self._position = 0

    @override
    def writable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def write(self, data: Any) -> int:
        with memoryview(data) as view, view.cast("B") as rest:
            at = 0
            try:
                while at < len(rest):
                    piece = rest[at : at + _LARGEST_WRITE]
                    written = self._file.write(bytes(piece) if self._copies else piece)
                    at += len(piece) if written is None else written
            except Exception as error:
                self.error = self.error or error
                raise
            finally:
                self._position += at
            return at
