"""The records of shards, as torch reads them, and their checksums."""

import io
import itertools
import zlib
from typing import Any

import pytest
import torch

from lightning.fabric.storage.archives import tensor_bytes
from lightning.fabric.storage.sharded.checksums import BLOCK, Checksums, Record
from lightning.fabric.storage.sharded.record_writer import RecordWriter
from lightning.fabric.storage.transport.sink import Sink
from tests.storage.uploads import Kept, To


def written(*data: Any) -> tuple[bytes, list[Record], Kept]:
    kept = Kept()
    sink = Sink(kept)
    writer = RecordWriter(sink)
    found = [writer.write(item) for item in data]
    sink.commit()
    return kept.content, found, kept


def assert_sound(content: bytes, record: Record) -> None:
    blocks = record.blocks()
    assert [start for start, *_ in blocks[1:]] == [end for _, end, *_ in blocks[:-1]]
    assert (blocks[0][0], blocks[-1][1]) == (record.offset, record.end)
    for start, end, before, crc in blocks:
        assert zlib.crc32(content[start:end], before) == crc


ROWS = torch.arange(3 * 2**20, dtype=torch.int64).reshape(3, -1)
TENSORS = {
    "contiguous": ROWS,
    "a part of a storage": ROWS[1:, 5:1000],
    "transposed": ROWS.t(),
    "channels last": torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "expanded": torch.tensor([1.5]).expand(1000),
    "parameter": torch.nn.Parameter(torch.rand(7)),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "sparse": torch.eye(4).to_sparse(),
    "quantized": torch.quantize_per_tensor(torch.rand(5), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("name", TENSORS)
def test_torch_reads_each_record_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_bytes, "_PIECE", 2**20)
    tensor = TENSORS[name]
    content, found, _ = written(torch.tensor([1, 2]), tensor, io.BytesIO(b"more"))
    assert sum(record.length for record in found) == len(content)
    for record in found:
        assert_sound(content, record)
    loaded = torch.load(io.BytesIO(content[found[1].offset : found[1].end]), weights_only=True)
    assert loaded.dtype == tensor.dtype
    if tensor.is_quantized or tensor.is_sparse:
        loaded, tensor = torch.dequantize(loaded.to_dense()), torch.dequantize(tensor.to_dense())
    assert torch.equal(loaded, tensor.detach())
    assert content[found[2].offset :] == b"more"
    assert not found[2].is_tensor


def test_the_data_of_a_plain_tensor_are_its_bytes_row_by_row() -> None:
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3).t()
    content, (record,), _ = written(tensor)
    assert record.is_tensor
    assert content[record.data :][: record.nbytes] == tensor.contiguous().numpy().tobytes()


def test_large_tensors_of_host_memory_are_sent_as_they_are() -> None:
    _, _, kept = written(ROWS)
    large = [piece for piece in kept.pieces if len(piece) >= 2**20]
    assert sum(map(len, large)) == ROWS.nbytes
    address = torch.frombuffer(large[0], dtype=torch.uint8).data_ptr()
    assert address == ROWS.data_ptr()


def test_memory_of_a_piece_is_enough_for_what_is_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_bytes, "_PIECE", 2**20)
    sizes = [len(piece) for tensor in (ROWS, ROWS.t(), ROWS[:, ::2], ROWS.reshape(1, 3, -1).transpose(1, 2))
             for piece in tensor_bytes.HostPieces().of(tensor)]  # fmt: skip
    assert max(sizes) <= 2**20
    assert len(sizes) < 150  # and not one a row


def test_a_piece_from_a_device_is_not_overwritten_before_the_next_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory stand for those of a device, and its copies arrive at once."""
    numbers, waited = itertools.count(1), []

    class Copies:
        def __init__(self, device: torch.device, sources: list[torch.Tensor]) -> None:
            assert all(source.nbytes <= 256 for source in sources)

        def begin(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            ((target, source),) = pairs
            assert (target.dtype, target.shape) == (source.dtype, source.shape)
            target.fill_(next(numbers))

        def wait(self) -> None:
            waited.append(None)

    monkeypatch.setattr(tensor_bytes, "_PIECE", 256)
    monkeypatch.setattr(tensor_bytes, "DeviceCopies", Copies)
    pieces, addresses = tensor_bytes.HostPieces(), set()
    for count, first in ((150, 1), (64, 4), (1, 5)):
        for number, piece in enumerate(pieces.of(torch.empty(count, dtype=torch.int32, device="meta")), first):
            values = torch.frombuffer(piece, dtype=torch.int32)
            assert (values == number).all()
            assert len(waited) == number, "and has arrived"
            addresses.add(values.data_ptr())
    assert len(addresses) == 2


def test_a_save_is_ended_between_the_pieces_of_one_tensor() -> None:
    calls: list[None] = []

    def fail_the_second_time() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise KeyError("enough")

    sink = Sink(To(io.BytesIO()), fail_the_second_time)
    with pytest.raises(KeyError, match="enough"):
        RecordWriter(sink).write(torch.empty(40 * 2**20, dtype=torch.uint8))


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])
@pytest.mark.parametrize("piece", [1000_003, 2**22])
def test_checksums_do_not_depend_on_the_pieces(size: int, piece: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    checksums = Checksums()
    for at in range(0, size, piece):
        checksums.update(memoryview(data)[at : min(size, at + piece)])
    record = checksums.record(10, b"head", b"tail")
    content = b"." * 10 + b"head" + data[:size] + b"tail"
    assert record.end == len(content)
    assert_sound(content, record)
    assert checksums.crc == zlib.crc32(data[:size])
