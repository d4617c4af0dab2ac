"""Writes the records of a shard, with their checksums, in host memory that does not grow with them."""

import io
from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning.fabric.storage.archives.archive_writer import Archive, TensorStub
from lightning.fabric.storage.archives.save import write_object
from lightning.fabric.storage.archives.tensor_bytes import HostPieces, is_plain
from lightning.fabric.storage.sharded.checksums import Checksums, Record
from lightning.fabric.storage.transport.sink import Sink


class RecordWriter:
    """Appends records to a file, whose ``idle`` is called at least for every 16 MiB.

    Args:
        file: A file of :func:`~lightning.fabric.storage.transport.open.open_writer`.
    """

    def __init__(self, file: Sink) -> None:
        self._file = file
        self._pieces = HostPieces()

    def write(self, data: Tensor | io.BytesIO) -> Record:
        """Appends an item that torch.distributed.checkpoint's planner has resolved.

        A tensor's memory must not change before the file is complete.
        """
        if isinstance(data, io.BytesIO):
            return self._append(lambda checked: checked.write(data.getbuffer()))
        if is_plain(data):
            return self._write_tensor(data.detach())
        return self.write_object(data.detach().cpu())

    def write_object(self, obj: Any) -> Record:
        """Appends a file of ``torch.save``."""
        return self._append(lambda checked: write_object(obj, checked))

    def _append(self, write: "Callable[[_Checked], object]") -> Record:
        offset, checked = self._file.tell(), _Checked(self._file)
        write(checked)
        return checked.checksums.record(offset)

    def _write_tensor(self, tensor: Tensor) -> Record:
        """Appends an archive of the tensor, as ``torch.save`` would write one."""
        offset, checksums, archive = self._file.tell(), Checksums(), Archive()
        head = archive.start(TensorStub(tensor.dtype, tuple(tensor.shape))) + archive.tensor_starts()
        self._file.write(head)
        send = self._file.give if tensor.device.type == "cpu" else self._file.write
        for piece in self._pieces.of(tensor):
            checksums.update(piece)
            send(piece)
            self._file.idle()
        tail = archive.tensor_ends(checksums.crc) + archive.end()
        self._file.write(tail)
        return checksums.record(offset, head, tail)


class _Checked(io.RawIOBase):
    """Writes to another file, and computes checksums."""

    def __init__(self, file: Sink) -> None:
        super().__init__()
        self.checksums = Checksums()
        self._file = file
        self.announce = file.announce

    @override
    def write(self, data: Any) -> int:
        self.checksums.update(memoryview(data).cast("B"))
        self._file.idle()
        return self._file.write(data)
