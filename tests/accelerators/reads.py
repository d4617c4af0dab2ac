"""The promises of files that are written from a device's memory, and read into it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.storage.archives import tensor_bytes
from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.archives.tensor_bytes import HostPieces
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.sharded.read_plan import read_plan
from lightning.fabric.storage.sharded.record_writer import RecordWriter
from lightning.fabric.storage.transport import open as transport
from tests.accelerators.device import Device
from tests.servers import Bucket
from tests.storage.shards import Targets, along, make, slices

KIB = 2**10


class FilesContract:
    @pytest.fixture(params=["s3", "local"])
    def url(self, request: pytest.FixtureRequest, tmp_path: Path) -> str:
        if request.param == "local":
            return str(tmp_path / "x.ckpt")
        bucket: Bucket = request.getfixturevalue("bucket")
        return f"{bucket.url}/x.ckpt"

    def state(self, device: Device) -> dict[str, Any]:
        weight = torch.arange(2_500_001, dtype=torch.float32).to(device.device)
        return {
            "large": weight,
            "tied": weight[1:],
            "small": torch.tensor([1.5]).to(device.device),
            "transposed": torch.arange(12.0).view(3, 4).to(device.device).t(),
            "half": torch.arange(33).bfloat16().to(device.device),
            "eighth": torch.arange(7.0).to(torch.float8_e4m3fn).to(device.device),
            "empty": torch.empty(0, device=device.device),
            "others": [torch.full((3,), of.index, device=of) for of in device.devices],
        }

    @pytest.mark.parametrize("lean", [False, True])
    def test_tensors_on_the_device_come_back_bit_for_bit(self, lean: bool, url: str, device: Device) -> None:
        state = self.state(device)
        with transport.open_writer(locate(url), lean=lean) as file:
            torch.save(state, file)
        self.check(load_file(locate(url)), state, None)

    @pytest.mark.parametrize("place", ["cpu", "device", "first", "mapping"])
    def test_a_checkpoint_goes_where_its_reader_says(self, place: str, url: str, device: Device) -> None:
        state, io = self.state(device), TorchCheckpointIO()
        io.save_checkpoint(state, url)
        first = device.devices[0]
        targets = {"cpu": torch.device("cpu"), "device": device.device, "first": first}
        if place == "mapping":
            self.check(io.load_checkpoint(url, {str(of): str(first) for of in device.devices}), state, first)
        else:
            self.check(io.load_checkpoint(url, targets[place]), state, targets[place])

    def test_a_state_on_the_host_goes_to_the_device_when_it_is_loaded(self, url: str, device: Device) -> None:
        io, values = TorchCheckpointIO(), torch.arange(2_500_001)
        io.save_checkpoint({"values": values}, url)
        loaded = io.load_checkpoint(url, device.device)
        assert loaded["values"].device == device.device
        assert loaded["values"].cpu().equal(values)

    def check(self, loaded: Any, state: Any, where: torch.device | None) -> None:
        if isinstance(state, torch.Tensor):
            assert loaded.device == (where or state.device)
            assert loaded.stride() == state.stride()
            bits = torch.uint8 if state.dtype == torch.float8_e4m3fn else state.dtype
            assert loaded.cpu().view(bits).equal(state.cpu().view(bits))
            return
        for key in state if isinstance(state, dict) else range(len(state)):
            self.check(loaded[key], state[key], where)


class ShardsContract:
    @pytest.mark.parametrize("checksums", [True, False], ids=["ours", "stock"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_any_part_reaches_a_device_bit_for_bit(
        self, dtype: torch.dtype, checksums: bool, tmp_path: Path, device: Device
    ) -> None:
        state = {"large": torch.randn(5001, 1003), "small": torch.randn(7), "scalar": torch.tensor(3.0)}
        metadata = make(tmp_path, state, along(0, 2), checksums=checksums)
        for cut in (along(0, 3), along(1, 3)):
            planned = Targets(metadata)
            for name, tensor in state.items():
                for chunk in cut(tensor.size()):
                    planned.add(name, torch.zeros(chunk.sizes, dtype=dtype, device=device.device), chunk)
            read_plan(locate(tmp_path), metadata, planned.plan, planned)
            assert len(planned.committed) == len(planned.plan.items)
            for index, target in planned.tensors.items():
                saved = next(chunk for chunk in cut(state[index.fqn].size()) if chunk.offsets == index.offset)
                assert torch.equal(target.cpu(), state[index.fqn][slices(saved)].to(dtype))

    @pytest.mark.parametrize("cut", [False, True], ids=["whole", "columns"])
    def test_shards_are_written_from_the_device_bit_for_bit(
        self, cut: bool, tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensor_bytes, "_PIECE", 256 * KIB)  # many pieces, in the same memory again and again
        state = {
            "large": torch.randn(1001, 1003),
            "odd": torch.arange(7 * 256 * KIB + 3, dtype=torch.uint8),
            "half": torch.randn(5, 7).bfloat16(),
            "scalar": torch.tensor(3.0),
            "empty": torch.empty(0, 3),
        }
        on_device = {name: tensor.to(device.device) for name, tensor in state.items()}
        on_device["transposed"], state["transposed"] = on_device["large"].t(), state["large"].t()
        with ThreadPoolExecutor(1) as thread:  # which is new to devices
            metadata = thread.submit(make, tmp_path, on_device, along(int(cut), 3)).result()
        planned = Targets(metadata)
        for name, tensor in state.items():
            planned.add(name, torch.zeros(tensor.size(), dtype=tensor.dtype))
        read_plan(locate(tmp_path), metadata, planned.plan, planned)
        for index, target in planned.tensors.items():
            assert torch.equal(target, state[index.fqn]), index.fqn

    def test_a_piece_stays_as_it_is_while_the_next_one_arrives(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensor_bytes, "_PIECE", 256 * KIB)
        tensor = torch.arange(300_001)
        pieces = []
        for piece in HostPieces().of(tensor.to(device.device)):
            device.settle()
            pieces.append(bytes(piece))
        assert len(pieces) == 10
        assert b"".join(pieces) == tensor.numpy().tobytes()

    def test_shards_are_uploaded_from_the_device_bit_for_bit(
        self, bucket: Bucket, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # of which some are collected for a part of an upload, without a copy where that is possible
        monkeypatch.setattr(tensor_bytes, "_PIECE", 2048 * KIB)
        tensor, urls = torch.arange(1_500_001), [f"{bucket.url}/{name}" for name in ("device", "host")]
        records, contents = [], []
        for url, source in zip(urls, (tensor.to(device.device), tensor), strict=True):
            with transport.open_writer(locate(url)) as file:
                records.append(RecordWriter(file).write(source))
            with fsspec.open(url) as opened:
                contents.append(opened.read())
        assert records[0] == records[1]
        assert contents[0] == contents[1]
