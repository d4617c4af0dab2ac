"""Archives that are written step by step are those that torch reads."""

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from lightning.fabric.storage.archives.archive_writer import Archive, TensorStub

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.uint8, torch.uint16, torch.bool),
]
TENSORS = {str(dtype): torch.arange(15).reshape(5, 3).to(dtype) for dtype in DTYPES}
TENSORS.update({"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "cube": torch.rand(2, 3, 4)})


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def archived(tensors: dict[str, torch.Tensor]) -> bytes:
    archive = Archive()
    stubs = {name: TensorStub(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    content = archive.start({"tensors": stubs, "epoch": 3})
    for tensor in tensors.values():
        data = raw(tensor)
        content += archive.tensor_starts() + data + archive.tensor_ends(zlib.crc32(data))
    return content + archive.end()


@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_loads_what_was_archived(weights_only: bool) -> None:
    loaded = torch.load(io.BytesIO(archived(TENSORS)), weights_only=weights_only)
    assert loaded["epoch"] == 3
    for name, tensor in TENSORS.items():
        found = loaded["tensors"][name]
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert raw(found) == raw(tensor), name


def test_an_archive_is_a_sound_zip_file_whose_tensors_can_be_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(archived(TENSORS))
    with zipfile.ZipFile(path) as opened:
        assert opened.testzip() is None
    loaded = torch.load(path, mmap=True)
    assert torch.equal(loaded["tensors"]["cube"], TENSORS["cube"])
    assert loaded["tensors"]["cube"].data_ptr() % 64 == 0


def test_tensors_and_archives_above_4_gib_are_found(tmp_path: Path) -> None:
    path, size = tmp_path / "x.pt", 5 * 2**30
    archive = Archive()
    stubs = [TensorStub(torch.uint8, (size,)), TensorStub(torch.float32, (3,))]
    last = torch.tensor([1.0, 2.0, 3.0])
    with open(path, "wb") as file:
        file.write(archive.start(stubs) + archive.tensor_starts())
        file.seek(size - 1, io.SEEK_CUR)  # a hole, which takes no space
        file.write(b"\7" + archive.tensor_ends(0) + archive.tensor_starts() + raw(last))
        file.write(archive.tensor_ends(zlib.crc32(raw(last))) + archive.end())
    large, small = torch.load(path, mmap=True)
    assert large.shape == (size,)
    assert large[-1] == 7
    assert torch.equal(small, last)
    with zipfile.ZipFile(path) as opened:
        assert [info.file_size for info in opened.infolist()][-2:] == [size, 12]
        assert opened.read("archive/data/1") == raw(last)
