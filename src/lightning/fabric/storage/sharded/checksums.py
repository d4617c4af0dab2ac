"""Checksums of the records in a shard, with which any part of a record can be checked by itself.

A record holds one item of torch.distributed.checkpoint: an archive with one tensor, or other bytes. It consists of a
head, the data and a tail; head and tail are empty unless the data are the bytes of an archive's tensor. The data are
cut into blocks. Each block has the CRC-32 of all the data up to its end, so that the last one is the archive's own, and
a block is checked by going on from the one before it.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning.fabric.storage.sharded.packing import narrow

#: Bytes of data with one checksum. A part of a record is read in whole blocks.
BLOCK = 2**20


class Record(NamedTuple):
    """A record's place in its file, and its checksums.

    Attributes:
        offset: The offset of the first byte in the file.
        length: Bytes of the record.
        data: The offset of the first byte of the data in the file. It is beyond ``offset`` if the record is an archive
            whose tensor's bytes, contiguous and in native byte order, are the data.
        nbytes: Bytes of the data.
        crcs: The checksums, of four bytes each, little-endian: of the head unless it is empty, of the blocks, of the
            tail unless it is empty. Empty if none were stored.
    """

    offset: int
    length: int
    data: int
    nbytes: int
    crcs: bytes

    @property
    def end(self) -> int:
        """Returns the offset of the first byte after the record."""
        return self.offset + self.length

    @property
    def is_tensor(self) -> bool:
        """Returns whether the data are a tensor's bytes."""
        return self.data > self.offset

    def blocks(self) -> list[tuple[int, int, int, int | None]]:
        """Returns the pieces that have a checksum: start and end in the file, the CRC to go on from, and that to reach.

        The latter is None if no checksums were stored.
        """
        crcs: Sequence[int | None] = struct.unpack(f"<{len(self.crcs) // 4}I", self.crcs)
        if not crcs:
            crcs = [None] * (2 + -(-self.nbytes // BLOCK))
        end = self.data + self.nbytes
        pieces = []
        if self.is_tensor:
            pieces.append((self.offset, self.data, 0, crcs[0]))
        first = len(pieces)
        for number, start in enumerate(range(self.data, end, BLOCK), first):
            before = crcs[number - 1] or 0 if number > first else 0
            pieces.append((start, min(start + BLOCK, end), before, crcs[number]))
        if end < self.end:
            pieces.append((end, self.end, 0, crcs[len(pieces)]))
        return pieces


class FileRecords(NamedTuple):
    """The records of a file, in a few objects. In a checkpoint's metadata it is a dictionary of the same.

    Attributes:
        size: Bytes of the file.
        records: The code of a type in :mod:`struct`, and numbers of that type, little-endian: all fields of a
            :class:`Record` but the checksums, one record after another.
        crcs: The checksums of all records, one after another.
    """

    size: int
    records: tuple[str, bytes]
    crcs: bytes

    @classmethod
    def of(cls, records: Sequence[Record]) -> "FileRecords":
        """Packs the records of a file, in the order in which they were written, with all their checksums."""
        numbers = np.array([record[:-1] for record in records], np.int64)
        return cls(records[-1].end if records else 0, narrow(numbers), b"".join(record.crcs for record in records))

    @property
    def places(self) -> NDArray[np.int64]:
        """Returns the offset and the length of each record."""
        code, data = self.records
        return np.frombuffer(data, f"<{code}").reshape(-1, 4)[:, :2].astype(np.int64)


def records_of(described: Mapping[str, Any]) -> list[Record]:
    """Returns the records of a file, from a checkpoint's metadata of this release or an earlier one.

    Raises:
        ValueError: A file of that size cannot have such records.
    """
    if isinstance(described["records"], list):
        records = [Record(*entry) for entry in described["records"]]
    else:
        (code, data), crcs, at = described["records"], described["crcs"], 0
        records = []
        for offset, length, start, nbytes in struct.iter_unpack(f"<4{code}", data):
            end = at + 4 * _count_of_blocks(offset, length, start, nbytes)
            records.append(Record(offset, length, start, nbytes, crcs[at:end]))
            at = end
    size = described["size"]
    for record in records:
        if not _is_plausible(record, size):
            raise ValueError(f"it has no {record.length} bytes at {record.offset} with such checksums")
    return records


def _count_of_blocks(offset: int, length: int, data: int, nbytes: int) -> int:
    return (data > offset) + -(-nbytes // BLOCK) + (data + nbytes < offset + length)


def _is_plausible(record: Record, size: int) -> bool:
    offset, length, data, nbytes, crcs = record
    return (
        0 <= offset <= data <= data + nbytes <= offset + length <= size
        and nbytes >= 0
        and len(crcs) in (0, 4 * _count_of_blocks(offset, length, data, nbytes))
    )


class Checksums:
    """Collects the checksums of a record's data as they are written, in pieces of any size."""

    def __init__(self) -> None:
        self.nbytes = 0
        #: The CRC-32 of all data so far.
        self.crc = 0
        self._crcs: list[int] = []

    def update(self, data: memoryview) -> None:
        """Goes on with bytes that follow on the earlier ones."""
        at = 0
        while piece := data[at : at + BLOCK - self.nbytes % BLOCK]:
            self.crc = zlib.crc32(piece, self.crc)
            self.nbytes += len(piece)
            at += len(piece)
            if self.nbytes % BLOCK == 0:
                self._crcs.append(self.crc)

    def record(self, offset: int, head: bytes = b"", tail: bytes = b"") -> Record:
        """Returns the record that starts at ``offset`` and has all the data so far."""
        crcs = [*self._crcs, self.crc] if self.nbytes % BLOCK else self._crcs
        crcs = [*([zlib.crc32(head)] if head else []), *crcs, *([zlib.crc32(tail)] if tail else [])]
        length = len(head) + self.nbytes + len(tail)
        return Record(offset, length, offset + len(head), self.nbytes, struct.pack(f"<{len(crcs)}I", *crcs))
