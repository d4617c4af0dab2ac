"""The memory of copies: pinned block by block, all of it or nothing, and as long as it is used."""

import ctypes
import gc
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning.fabric.storage.background import cuda_memory
from lightning.fabric.storage.background.host_memory import HostMemory
from lightning.fabric.storage.background.staging import Staging

BLOCK = 2**16
DEVICE = torch.device("cuda", 0)


class Runtime:
    """Calls of CUDA's, for which no device is needed; tests/gpu makes them."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.failing = False
        self.most = 0
        self.threads: set[str] = set()
        self.resident: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.threads.add(threading.current_thread().name)
        if self.failing and len(self.registered) == 2:
            return 2
        self.registered[address] = size
        self.most = max(self.most, len(self.registered))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.threads.add(threading.current_thread().name)
        assert is_mapped(address)
        del self.registered[address]
        return 0


def is_mapped(address: int) -> bool:
    if sys.platform != "linux":
        return True
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    made = Runtime()
    monkeypatch.setattr(cuda_memory, "_runtime", lambda: made)
    monkeypatch.setattr(cuda_memory, "_reason", lambda error: f"CUDA error {error}")
    monkeypatch.setattr(cuda_memory, "BLOCK", BLOCK)
    monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))
    yield made
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "pinned-checkpoint-memory":
            thread.join(10)
    assert not made.registered


def test_memory_is_pinned_in_blocks_as_long_as_a_tensor_of_it_is_left(runtime: Runtime) -> None:
    memory = HostMemory(2 * BLOCK + 100, DEVICE)
    tensor = memory.tensor(0, torch.uint8, torch.Size([100]))
    address = tensor.data_ptr()
    assert runtime.registered == {address: BLOCK, address + BLOCK: BLOCK, address + 2 * BLOCK: 100}
    registered = memory.registered
    assert registered is not None
    del memory
    registered.wait_if_freed()
    assert len(runtime.registered) == 3
    tensor.fill_(1)
    del tensor
    gc.collect()
    registered.wait_if_freed()
    assert not runtime.registered
    assert runtime.threads == {"pinned-checkpoint-memory"}, "none of training's"


def test_memory_of_which_one_block_cannot_be_pinned_is_not_pinned_at_all(runtime: Runtime) -> None:
    runtime.failing = True
    with pytest.warns(UserWarning, match=r"0\.0 GiB of host memory are not pinned, .*: CUDA error 2\."):
        memory = HostMemory(4 * BLOCK, DEVICE)
    assert (runtime.most, runtime.registered) == (2, {})
    del memory
    gc.collect()
    assert not runtime.registered


def test_memory_that_torch_cannot_pin_for_another_device_is_named() -> None:
    other = torch.device("privateuseone", 0)
    with pytest.warns(UserWarning, match="training stops for longer .*: PyTorch could not pin it for privateuseone"):
        memory = HostMemory(100, other)
    assert memory.tensor(0, torch.uint8, torch.Size([100])).numel() == 100


def test_an_error_in_the_thread_that_registers_is_raised(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "_register", lambda spans: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        HostMemory(BLOCK, DEVICE)


@pytest.mark.skipif(sys.platform != "linux", reason="is about Linux's advice for memory")
@pytest.mark.parametrize("refused", [(), (18,), (18, 10)], ids=["none", "wipe", "all"])
def test_memory_that_forks_would_share_is_not_pinned(
    refused: tuple[int, ...], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mapping(mmap.mmap):
        def madvise(self, advice: int, *args: int) -> None:
            if advice in refused:
                raise OSError("not here")
            super().madvise(advice, *args)

    monkeypatch.setattr(mmap, "mmap", Mapping)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        memory = HostMemory(2 * BLOCK, DEVICE)
    tensor = memory.tensor(0, torch.uint8, torch.Size([2 * BLOCK]))
    assert len(runtime.registered) == (0 if 10 in refused else 2)
    assert [str(warning.message).partition("device: ")[2] for warning in warned] == (
        ["the kernel cannot keep it from forked processes."] if 10 in refused else []
    )
    tensor.fill_(3)
    if (child := os.fork()) == 0:
        os._exit(int(refused == () and int(tensor.sum()) != 0))
    assert os.waitpid(child, 0)[1] == 0, "a fork has none of it"


def test_pages_are_touched_before_they_are_registered(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    touch, register = HostMemory.touch, cuda_memory._register
    monkeypatch.setattr(HostMemory, "touch", lambda memory: (order.append("touch"), touch(memory)))
    monkeypatch.setattr(cuda_memory, "_register", lambda spans: (order.append("register"), register(spans))[1])
    HostMemory(BLOCK, DEVICE)
    assert order == ["touch", "register"]


@pytest.mark.parametrize("start", [0, BLOCK - 256, BLOCK - 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_no_copy_goes_across_the_end_of_a_block(
    start: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_memory, "BLOCK", BLOCK)
    memory = HostMemory(4 * BLOCK)
    first = memory.tensor(0, torch.uint8, torch.Size([1])).data_ptr()
    for shape in ((3,), (8, 4), (100, 9), (300, 73), ()):
        source = torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)
        for cut in (source, source.t() if source.dim() == 2 else source):
            target = memory.tensor(start, dtype, cut.shape)
            target.zero_()
            for into, part in memory.parts(target, cut):
                begin = into.data_ptr() - first
                assert begin // BLOCK == (begin + into.nbytes - 1) // BLOCK
                into.copy_(part)
            assert torch.equal(target, cut)


class Driver:
    """The function of CUDA's driver that exchanges the capture mode of the calling thread."""

    def __init__(self) -> None:
        self._modes: dict[int, int] = {}
        self.error = 0

    @property
    def mode(self) -> int:
        return self._modes.get(threading.get_ident(), 0)

    def __call__(self, pointer: Any) -> int:
        if self.error:
            return self.error
        other = pointer._obj
        self._modes[threading.get_ident()], other.value = other.value, self.mode
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(cuda_memory, "_exchange_mode", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return made


def test_calls_beside_a_capture_are_made_in_relaxed_mode_and_the_mode_is_restored(driver: Driver) -> None:
    with cuda_memory.beside_captures():
        assert driver.mode == 2
        with cuda_memory.beside_captures():
            assert driver.mode == 2
        assert driver.mode == 2
    assert driver.mode == 0
    with pytest.raises(ZeroDivisionError), cuda_memory.beside_captures():
        1 / 0  # noqa: B018
    assert driver.mode == 0


def test_a_driver_that_cannot_exchange_modes_is_no_error(driver: Driver) -> None:
    driver.error = 1
    with cuda_memory.beside_captures():
        assert driver.mode == 0


def test_memory_is_registered_and_unregistered_beside_captures(
    driver: Driver, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    register, unregister = runtime.cudaHostRegister, runtime.cudaHostUnregister
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda *of: (modes.append(driver.mode), register(*of))[1])
    monkeypatch.setattr(runtime, "cudaHostUnregister", lambda *of: (modes.append(driver.mode), unregister(*of))[1])
    registered = HostMemory(2 * BLOCK, DEVICE).registered
    assert registered is not None
    registered.wait_if_freed()
    assert modes == [2, 2, 2, 2]


def test_devices_are_asked_beside_captures_whether_copies_have_arrived(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []

    class Copies:
        def arrived(self) -> bool:
            modes.append(driver.mode)
            return len(modes) > 1

    staged = Staging().stage_object([])
    staged.add(Copies())  # type: ignore[arg-type]
    staged.wait()
    assert modes == [2, 2]


@pytest.mark.parametrize("found", [True, False])
@pytest.mark.parametrize(
    ("hip", "names"),
    [(None, ["libcuda.so.1"]), ("6.2.41133", ["libamdhip64.so.6", "libamdhip64.so"])],
    ids=["CUDA", "ROCm"],
)
def test_the_function_that_exchanges_modes_is_that_of_the_driver(
    hip: str | None, names: list[str], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Library:
        def __init__(self, name: str) -> None:
            asked.append(name)
            if name != names[-1] or not found:
                raise OSError("not here")
            setattr(self, f"{'hip' if hip else 'cu'}ThreadExchangeStreamCaptureMode", 3)

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cuda_memory._exchange_mode.__wrapped__() == (3 if found else None)
    assert asked == names


def test_memory_is_registered_by_torchs_own_runtime_or_else_its_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Function:
        argtypes: Any = None

    class Library:
        def __init__(self, name: None) -> None:
            self.cudaHostRegister, self.cudaHostUnregister = Function(), Function()

    binding = object()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: binding)
    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert isinstance(cuda_memory._runtime.__wrapped__(), Library)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert cuda_memory._runtime.__wrapped__() is binding
