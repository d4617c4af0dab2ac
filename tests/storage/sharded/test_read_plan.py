import errno
import io
import itertools
import os
import random
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning.fabric.storage.paths.location import AnyPath, locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.sharded import byte_ranges
from lightning.fabric.storage.sharded import read_plan as read_plan_module
from lightning.fabric.storage.sharded.byte_ranges import ByteRange
from lightning.fabric.storage.sharded.checksums import BLOCK, Record, records_of
from lightning.fabric.storage.sharded.read_plan import read_plan
from lightning.fabric.storage.transport.open import open_source
from lightning.fabric.storage.transport.ranged_file import Source
from tests.servers import Bucket
from tests.storage.shards import Cut, Targets, along, make, slices, targets, whole
from tests.storage.states import assert_same
from tests.storage.tree import TreeFileSystem

LARGE = {"large": torch.arange(3_000_000, dtype=torch.float32).reshape(3000, 1000)}


class Watched:
    """A source that tells what is read from it."""

    def __init__(self, source: Source, log: "Log") -> None:
        self.source, self.log = source, log
        self.size, self.parallel = source.size, source.parallel

    def read_into(self, start: int, view: memoryview) -> None:
        self.log.begin(start, view)
        try:
            self.log.between(start)
            self.source.read_into(start, view)
        finally:
            self.log.end()

    def check(self) -> None:
        self.log.checks += 1
        self.source.check()

    def close(self) -> None:
        self.log.closed += 1
        self.source.close()


class Log:
    """What is read of all files."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ranges: list[tuple[int, int]] = []
        self.addresses: list[tuple[int, int]] = []
        self.running = self.highest = 0
        self.opened = self.checks = self.closed = 0
        self.between: Callable[[int], None] = lambda start: None

    def begin(self, start: int, view: memoryview) -> None:
        with self.lock:
            self.running += 1
            self.highest = max(self.highest, self.running)
            self.ranges.append((start, start + len(view)))
            self.addresses.append((np.frombuffer(view, np.uint8).__array_interface__["data"][0], len(view)))

    def end(self) -> None:
        with self.lock:
            self.running -= 1

    def open(self, place: Place) -> Watched:
        self.opened += 1
        return Watched(open_source(place), self)

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


class Counting(TreeFileSystem):
    """Reads as file systems of stores do by default: what is asked for, and the 5 MiB after it."""

    protocol = "counting"
    fetches: ClassVar[list[tuple[int, int]]] = []

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _CountingFile(self, path, mode) if mode == "rb" else super()._open(path, mode, **options)


class _CountingFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        Counting.fetches.append((start, end))
        with open(self.path, "rb") as file:
            return os.pread(file.fileno(), end - start, start)


fsspec.register_implementation("counting", Counting, clobber=True)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(read_plan_module, "open_source", log.open)
    return log


def load(folder: AnyPath, planned: Targets) -> None:
    read_plan(locate(folder), planned.metadata, planned.plan, planned)
    items = sorted(map(repr, planned.plan.items))
    assert sorted(map(repr, planned.committed)) == items  # each of them once


def put_together(planned: Targets, name: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
    result = torch.zeros(size, dtype=dtype)
    for index, target in planned.tensors.items():
        if index.fqn == name:
            assert index.offset is not None
            result[slices(ChunkStorageMetadata(index.offset, target.size()))] = target
    return result


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# Byte ranges


def test_a_part_is_cut_into_boxes_that_hold_each_of_its_bytes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "BLOCK", 16)
    monkeypatch.setattr(byte_ranges, "REQUEST", 128)
    monkeypatch.setattr(byte_ranges, "GAP", 24)
    dice = random.Random(0)
    for _ in range(500):
        shape = [dice.choice([1, 2, 3, 7, 20]) for _ in range(dice.randrange(4))]
        offsets = [dice.randrange(size) for size in shape]
        lengths = [dice.randint(1, size - offset) for size, offset in zip(shape, offsets, strict=True)]
        numbers = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
        wanted = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        for unlimited in (True, False):
            part = ByteRange(shape, offsets, lengths, 4)
            found, last = np.full(lengths, -1), -1
            for box in part.boxes(unlimited):
                assert box.start >= last  # by the first byte
                last = box.start
                if box.stop - box.start != 4 * int(np.prod(box.lengths)) or not unlimited:
                    assert -(-box.stop // 16) * 16 - box.start // 16 * 16 <= 128
                run = numbers.reshape(-1)[box.start // 4 : box.stop // 4]
                strides = [4 * stride for stride in part.strides]
                values = np.lib.stride_tricks.as_strided(run, box.lengths, strides)
                assert run[-1] == values[(-1,) * len(shape)]  # and no byte more
                assert (found[box.slices] == -1).all()
                found[box.slices] = values
            assert (found == wanted).all()


@pytest.mark.parametrize(("offsets", "lengths"), [((0, 0), (2, 4)), ((-1, 0), (1, 1)), ((0,), (1,)), ((2, 0), (1, 1))])
def test_a_part_beyond_a_tensor_is_an_error(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has no"):
        ByteRange((2, 3), offsets, lengths, 4)


# Loading


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return {
        "3d": torch.randn(7, 120, 1001),
        "2d": torch.randint(-1000, 1000, (1203, 1001), dtype=torch.int32),
        "1d": torch.randn(1_500_003, dtype=torch.float64),
        "small": torch.randn(3, 5),
        "few": torch.randn(1),
    }


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(along(0, 2), along(0, 3), id="two to three"),
        pytest.param(along(0, 3), along(1, 2), id="rows to columns"),
        pytest.param(along(1, 3), along(0, 2), id="columns to rows"),
        pytest.param(along(1, 2), along(1, 5), id="columns to columns"),
        pytest.param(along(2, 2), along(0, 4), id="innermost to rows"),
        pytest.param(whole, along(2, 3), id="one to innermost"),
        pytest.param(along(1, 4), whole, id="columns to one"),
        pytest.param(along(0, 7), whole, id="seven to one"),
    ],
)
def test_any_sharding_is_loaded_into_any_other(
    tmp_path: Path, state: dict[str, Tensor], saved: Cut, loaded: Cut
) -> None:
    metadata: Any = make(tmp_path, state, saved)
    for _ in ("with checksums", "without"):
        planned = Targets(metadata)
        for name, tensor in state.items():
            for chunk in loaded(tensor.size()):
                planned.add(name, torch.zeros(chunk.sizes, dtype=tensor.dtype), chunk)
        load(tmp_path, planned)
        for name, tensor in state.items():
            assert torch.equal(put_together(planned, name, tensor.size(), tensor.dtype), tensor)
        metadata.lightning = None


@pytest.mark.parametrize("checksums", [True, False], ids=["ours", "stock"])
def test_every_kind_of_tensor_is_loaded_bit_for_bit(tmp_path: Path, checksums: bool) -> None:
    kinds = [
        torch.bool, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
        torch.complex128, torch.int8, torch.int64,
    ]  # fmt: skip
    random_bytes = torch.randint(0, 2, (1_600_016,), dtype=torch.uint8)
    state = {str(kind): random_bytes.view(kind) for kind in kinds}
    state |= {f"{kind} scalar": random_bytes[16:32].view(kind)[0].clone() for kind in kinds}
    state |= {f"{kind} odd": random_bytes.view(kind)[:3].clone() for kind in kinds}
    state |= {"nothing": torch.zeros(0), "no rows": torch.zeros(0, 5, dtype=torch.int8)}
    metadata = make(tmp_path, state, checksums=checksums)
    planned = targets(metadata, state)
    load(tmp_path, planned)
    for index, target in planned.tensors.items():
        assert_same(target, state[index.fqn])


def test_a_target_of_another_kind_or_layout_is_filled_as_by_copying(tmp_path: Path) -> None:
    metadata = make(tmp_path, LARGE, along(0, 3))
    converted = torch.zeros(3000, 1000, dtype=torch.bfloat16)
    strided = torch.zeros(1000, 3000).t()
    memory = torch.full((3002, 1004), -1.0)
    inner = memory[1:-1, 2:-2]
    parameter = torch.nn.Parameter(torch.zeros(3000, 1000))
    for target in (converted, strided, inner, parameter):
        planned = Targets(metadata)
        planned.add("large", target)
        load(tmp_path, planned)
        assert torch.equal(target.detach(), LARGE["large"].to(target.dtype))
    inner.fill_(-1)
    assert (memory == -1).all()  # nothing around it was touched


def test_objects_are_loaded_small_and_large(tmp_path: Path) -> None:
    objects = {"small": {"lr": 0.1}, "large": random.Random(0).randbytes(20_000_000)}
    for checksums in (True, False):
        metadata = make(tmp_path, {"w": torch.ones(10)}, objects=objects, checksums=checksums)
        planned = targets(metadata, ["w"], objects)
        load(tmp_path, planned)
        assert planned.objects == objects


def test_what_torch_itself_saved_is_loaded(tmp_path: Path) -> None:
    class Reader(dcp.FileSystemReader):
        def set_up_storage_reader(self, metadata: Metadata, *arguments: Any, **options: Any) -> None:
            super().set_up_storage_reader(metadata, *arguments, **options)
            self.metadata = metadata

        def read_data(self, plan: Any, planner: Any) -> Any:
            read_plan(locate(tmp_path), self.metadata, plan, planner)
            done: torch.futures.Future[None] = torch.futures.Future()
            done.set_result(None)
            return done

    state = {"model": {"w": torch.randn(100, 100), "b": torch.randn(7)}, "step": 3, "name": "x"}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=2))
    loaded = {"model": {"w": torch.zeros(100, 100), "b": torch.zeros(7)}, "step": 0, "name": ""}
    dcp.load(loaded, storage_reader=Reader(tmp_path))
    assert_same(loaded, state)


def test_what_an_extension_of_torch_wrote_is_undone_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Deflate(StreamTransformExtension):
        def transform_from(self, input: Any) -> io.BytesIO:
            return io.BytesIO(zlib.decompress(input.read()))

        transform_to = registry_name = from_descriptor = get_descriptor = None  # type: ignore[assignment]

    state = {"w": torch.randn(50, 3)}
    metadata = make(tmp_path, state, objects={"step": 3}, ranks=1, checksums=False)
    file, content = tmp_path / "__0_0.distcp", b""
    saved = file.read_bytes()
    for info in metadata.storage_data.values():
        packed = zlib.compress(saved[info.offset : info.offset + info.length])
        info.offset, info.length, info.transform_descriptors = len(content), len(packed), ["test.deflate/1"]
        content += packed
    file.write_bytes(content)
    monkeypatch.setattr(ExtensionRegistry, "from_descriptor_list", lambda registry, descriptors: [Deflate()])
    planned = targets(metadata, ["w"], ["step"])
    load(tmp_path, planned)
    assert torch.equal(next(iter(planned.tensors.values())), state["w"])
    assert planned.objects == {"step": 3}


@pytest.mark.parametrize("place", ["obstore", "s3fs", "memory"])
def test_stores_are_read_as_disks_are(
    place: str, tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = make(tmp_path, LARGE, along(0, 3), objects={"step": 3})
    if place == "s3fs":
        monkeypatch.setitem(sys.modules, "obstore", None)
    folder = locate("memory://reads/x.ckpt" if place == "memory" else f"{bucket.url}/x.ckpt")
    for file in tmp_path.iterdir():
        if place == "memory":
            MemoryFileSystem().pipe_file(f"/reads/x.ckpt/{file.name}", file.read_bytes())
        else:
            bucket.put(f"x.ckpt/{file.name}", file.read_bytes())
    planned = targets(metadata, LARGE, ["step"])
    load(folder, planned)
    assert torch.equal(next(iter(planned.tensors.values())), LARGE["large"])


# How it is read


def test_large_tensors_are_read_into_their_own_memory_and_nowhere_else(tmp_path: Path, log: Log) -> None:
    metadata = make(tmp_path, LARGE, along(0, 2))
    planned = targets(metadata, LARGE)
    load(tmp_path, planned)
    target = next(iter(planned.tensors.values()))
    start, stop = target.data_ptr(), target.data_ptr() + target.nbytes
    assert all(start <= address and address + count <= stop for address, count in log.addresses)
    assert log.count == target.nbytes


def test_of_a_part_no_more_is_read_than_the_blocks_around_it(tmp_path: Path, log: Log) -> None:
    state = {"w": torch.randn(20_000, 500)}  # 38 MiB
    metadata = make(tmp_path, state)
    chunk = along(0, 3)(state["w"].size())[1]
    planned = Targets(metadata)
    planned.add("w", torch.zeros(chunk.sizes), chunk)
    load(tmp_path, planned)
    target = next(iter(planned.tensors.values()))
    assert torch.equal(target, state["w"][slices(chunk)])
    start, stop = target.data_ptr(), target.data_ptr() + target.nbytes
    inside = [count for address, count in log.addresses if start <= address and address + count <= stop]
    assert log.count <= target.nbytes + 2 * BLOCK
    assert sum(inside) >= target.nbytes - 2 * BLOCK


def test_what_lies_far_apart_is_not_read_whole(tmp_path: Path, log: Log) -> None:
    state = {"w": torch.randn(8, 2_000_000)}
    metadata = make(tmp_path, state)
    chunk = ChunkStorageMetadata(torch.Size((0, 1000)), torch.Size((8, 10)))
    planned = Targets(metadata)
    planned.add("w", torch.zeros(8, 10), chunk)
    load(tmp_path, planned)
    assert torch.equal(next(iter(planned.tensors.values())), state["w"][:, 1000:1010])
    assert log.count <= 2 * 8 * BLOCK


def test_small_tensors_share_requests(tmp_path: Path, log: Log) -> None:
    state = {f"w{i}": torch.full((64 * 256,), float(i)) for i in range(2000)}  # 64 KiB each
    metadata = make(tmp_path, state, ranks=1)
    names = list(state)
    random.Random(0).shuffle(names)
    planned = targets(metadata, names)
    load(tmp_path, planned)
    assert all(torch.equal(target, state[index.fqn]) for index, target in planned.tensors.items())
    total = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert len(log.ranges) <= total // byte_ranges.REQUEST + 2 < 2000 / 100
    assert log.count <= total
    assert (log.opened, log.checks, log.closed) == (1, 1, 1)


def test_a_store_is_asked_a_tenth_as_often_as_by_torch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    state = {f"w{i}": torch.full((64 * 256,), float(i)) for i in range(800)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock", sync_files=False))
    metadata = make(tmp_path / "ours", state, ranks=1)
    Counting.fetches.clear()
    dcp.load(
        {name: torch.zeros(64 * 256) for name in state}, storage_reader=FsspecReader(f"counting://{tmp_path}/stock")
    )
    by_torch = len(Counting.fetches)
    Counting.fetches.clear()
    load(locate(f"counting://{tmp_path}/ours"), targets(metadata, state))
    assert len(Counting.fetches) <= by_torch / 10


def test_items_of_one_record_share_what_they_need(tmp_path: Path, log: Log) -> None:
    state = {"w": torch.randn(3000, 300)}
    for checksums in (True, False):
        metadata = make(tmp_path, state, ranks=1, checksums=checksums)
        planned = Targets(metadata)
        for chunk in along(1, 3)(state["w"].size()):
            planned.add("w", torch.zeros(chunk.sizes), chunk)
        log.ranges.clear()
        load(tmp_path, planned)
        assert torch.equal(put_together(planned, "w", state["w"].size(), torch.float32), state["w"])
        assert log.count <= (tmp_path / "__0_0.distcp").stat().st_size


@pytest.mark.parametrize("parallel", [True, False])
def test_requests_go_out_together_unless_the_source_takes_one_at_a_time(
    tmp_path: Path, log: Log, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Serial(Watched):
        def __init__(self, place: Place) -> None:
            super().__init__(open_source(place), log)
            self.parallel = parallel

    monkeypatch.setattr(read_plan_module, "open_source", Serial)
    together = threading.Event()

    def hold(start: int) -> None:
        if log.highest > 8:
            together.set()
        together.wait(20 if parallel else 0)

    log.between = hold
    state = {name: torch.zeros(16 * 2**20 // 4) for name in "abcdefgh"}
    metadata = make(tmp_path, state, ranks=1)
    load(tmp_path, targets(metadata, state))
    assert 8 < log.highest <= 16 if parallel else log.highest == 1
    assert parallel or log.ranges == sorted(log.ranges)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from /proc")
@pytest.mark.parametrize("checksums", [True, False], ids=["ours", "stock"])
def test_memory_is_bounded_whatever_the_size(tmp_path: Path, log: Log, checksums: bool) -> None:
    state = {f"w{i}": torch.zeros(24 * 2**20 // 4) for i in range(16)}
    metadata = make(tmp_path, state, ranks=1, checksums=checksums)
    planned = Targets(metadata)
    for name, tensor in state.items():
        planned.add(name, torch.empty(tensor.size(), device="meta"))  # takes what comes, and no memory
    del state
    highest = 0

    def resident(start: int = 0) -> int:
        nonlocal highest
        now = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        highest = max(highest, now)
        return now

    before = resident()
    log.between = resident
    load(tmp_path, planned)
    assert highest - before <= 160 * 2**20


def test_a_target_is_asked_for_when_its_turn_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{i}": torch.zeros(2**20) for i in range(25)}
    metadata = make(tmp_path, state)
    outstanding = highest = 0

    class Lazy(Targets):
        def resolve_tensor(self, read_item: Any) -> Tensor:
            nonlocal outstanding, highest
            outstanding += 1
            highest = max(highest, outstanding)
            return torch.empty(tuple(read_item.lengths))

        def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
            nonlocal outstanding
            outstanding -= 1
            super().commit_tensor(read_item, tensor)

    planned = Lazy(metadata)
    for name, tensor in state.items():
        planned.add(name, tensor)
    load(tmp_path, planned)
    assert highest <= 18


# Damage


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 4]))


def record_of(metadata: Any, name: str) -> tuple[str, Record]:
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
    records = records_of(metadata.lightning["files"][info.relative_path])
    return info.relative_path, next(record for record in records if record.offset == info.offset)


@pytest.mark.parametrize("where", ["first", "inside", "last"])
@pytest.mark.parametrize("name", ["direct", "small", "column", "object", "large object"])
def test_a_flipped_bit_is_an_error_that_names_file_and_tensor(tmp_path: Path, name: str, where: str) -> None:
    state = {"direct": torch.randn(1_600_000), "small": torch.randn(1000, 300), "column": torch.randn(3000, 1000)}
    objects = {"object": list(range(1000)), "large object": bytes(9_000_000)}
    metadata = make(tmp_path, state, objects=objects)
    file, record = record_of(metadata, name)
    flip(tmp_path / file, record.data + {"first": 0, "inside": record.nbytes // 2, "last": record.nbytes - 1}[where])
    planned = targets(metadata, {"direct", "small"}, objects)
    chunk = along(1, 3)(state["column"].size())[1]
    planned.add("column", torch.zeros(chunk.sizes), chunk)
    with pytest.raises(
        OSError, match=rf"{re.escape(file)} is damaged: bytes \d+ to \d+, .*'{name}'.*another checkpoint"
    ):
        load(tmp_path, planned)


def test_damage_in_what_is_not_read_is_no_error_and_in_what_is_read_beside_it_is(tmp_path: Path) -> None:
    metadata = make(tmp_path, LARGE, ranks=1)
    file, record = record_of(metadata, "large")
    flip(tmp_path / file, record.data + 5 * BLOCK + 10)
    rows = along(0, 12)(LARGE["large"].size())
    for number, chunk in enumerate(rows):
        first, last = number * 1_000_000 // BLOCK, ((number + 1) * 1_000_000 - 1) // BLOCK
        planned = Targets(metadata)
        planned.add("large", torch.zeros(chunk.sizes), chunk)
        if first <= 5 <= last:
            with pytest.raises(OSError, match="'large'"):
                load(tmp_path, planned)
        else:
            load(tmp_path, planned)
            assert torch.equal(next(iter(planned.tensors.values())), LARGE["large"][slices(chunk)])


@pytest.mark.parametrize("checksums", [True, False], ids=["ours", "stock"])
def test_a_missing_or_short_file_is_an_error_that_names_it(tmp_path: Path, checksums: bool) -> None:
    metadata = make(tmp_path, LARGE, along(0, 2), checksums=checksums)
    file = tmp_path / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-1000])
    with pytest.raises(OSError, match=r"__1_0\.distcp is damaged: it .*'large'"):
        load(tmp_path, targets(metadata, LARGE))
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"__1_0\.distcp is missing, which holds 'large'.*incomplete"):
        load(tmp_path, targets(metadata, LARGE))


def test_a_record_of_torch_that_is_no_tensor_is_an_error_that_names_it(tmp_path: Path) -> None:
    metadata = make(tmp_path, {"w": torch.ones(1000)}, ranks=1, checksums=False)
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(OSError, match=r"no tensor .* bytes 0 to \d+ of .*__0_0\.distcp: 'w' \(UnpicklingError"):
        load(tmp_path, targets(metadata, ["w"]))


def test_metadata_that_do_not_describe_a_record_or_a_file_are_an_error(tmp_path: Path) -> None:
    metadata: Any = make(tmp_path, LARGE, ranks=1)
    described = metadata.lightning["files"].pop("__0_0.distcp")
    with pytest.raises(OSError, match=r"do not describe __0_0\.distcp"):
        load(tmp_path, targets(metadata, LARGE))
    metadata.lightning["files"]["__0_0.distcp"] = {**described, "records": []}
    with pytest.raises(OSError, match="no checksum of 'large'"):
        load(tmp_path, targets(metadata, LARGE))
    metadata.lightning["files"]["__0_0.distcp"] = described
    metadata.state_dict_metadata["large"].properties.dtype = torch.float64
    with pytest.raises(OSError, match=r"'large' has 12000000 bytes, which are not \[3000, 1000\] of torch.float64"):
        load(tmp_path, targets(metadata, LARGE))


def test_a_target_of_another_size_is_an_error(tmp_path: Path) -> None:
    for checksums in (True, False):
        metadata = make(tmp_path, LARGE, checksums=checksums)
        planned = targets(metadata, LARGE)
        planned.resolve_tensor = lambda item: torch.zeros(2, 2)  # type: ignore[method-assign]
        with pytest.raises(ValueError, match=r"'large' .* size \[2, 2\].*\[3000, 1000\]"):
            load(tmp_path, planned)


def test_a_file_that_is_written_to_while_it_is_read_is_an_error(tmp_path: Path, log: Log) -> None:
    metadata = make(tmp_path, LARGE, ranks=1, checksums=False)
    file = tmp_path / "__0_0.distcp"

    def touch(start: int) -> None:
        os.utime(file, ns=(1, 1))

    log.between = touch
    with pytest.raises(OSError, match=r"__0_0\.distcp: it was replaced while it was read"):
        load(tmp_path, targets(metadata, LARGE))


# Ends


@pytest.mark.parametrize("why", ["error", "interruption"])
def test_no_request_goes_on_when_an_error_leaves(tmp_path: Path, log: Log, why: str) -> None:
    state = {f"w{i}": torch.ones(2**20) for i in range(25)}
    metadata = make(tmp_path, state)
    planned = targets(metadata, state)
    began = itertools.count()

    def fail(start: int) -> None:
        number = next(began)
        if number == 5 and why == "error":
            raise OSError(errno.EIO, "the disk is gone")
        if number == 5:
            import _thread

            _thread.interrupt_main()
        time.sleep(0.2)

    log.between = fail
    with pytest.raises(OSError if why == "error" else KeyboardInterrupt):
        load(tmp_path, planned)
    assert log.running == 0
    assert len(log.ranges) < 25  # no other was begun
    assert log.closed == log.opened
    sums = [target.sum().item() for target in planned.tensors.values()]
    time.sleep(0.3)
    assert sums == [target.sum().item() for target in planned.tensors.values()]


def test_waiting_for_a_store_can_be_interrupted(tmp_path: Path, log: Log) -> None:
    import _thread

    metadata = make(tmp_path, LARGE)
    waiting = threading.Event()
    log.between = lambda start: (threading.Timer(0.1, _thread.interrupt_main).start(), waiting.wait(1))[0]
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, targets(metadata, LARGE))
    assert time.monotonic() - started < 5


def test_a_plan_without_items_reads_nothing(tmp_path: Path, log: Log) -> None:
    load(tmp_path, Targets(make(tmp_path, {})))
    assert not log.opened
