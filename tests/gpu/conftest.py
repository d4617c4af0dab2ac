"""A CUDA device for the contracts of all devices."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from typing_extensions import override

from lightning.fabric.storage.background import cuda_memory
from tests.accelerators.device import Device

#: Of the device's clock: some tenths of a second, which is longer than staging keeps the CPU busy here.
CYCLES = 1_000_000_000


class CudaDevice(Device):
    """The last one. What is held up there goes on by itself after a while."""

    module = torch.cuda
    mib = 512

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.device_count() - 1)

    @override
    def hold_stream(self) -> None:
        with torch.cuda.device(self.device):
            torch.cuda._sleep(CYCLES)

    @override
    def hold_copies(self) -> None:
        self.hold_stream()  # for which they wait

    @override
    def let_go(self) -> None:
        pass

    @override
    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    @override
    def limit_memory(self, more: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved(self.device) + more) / total, self.device
        )

    @contextmanager
    @override
    def capturing(self) -> Iterator[None]:
        values = torch.zeros(3, device=self.device)
        values.add_(1)  # a kernel is loaded when it is used first, which a capture need not allow
        with torch.cuda.device(self.device), torch.cuda.graph(torch.cuda.CUDAGraph()):
            values.add_(1)
            yield

    @override
    def pins_by_registering(self, patch: pytest.MonkeyPatch) -> None:
        pass  # always

    @override
    def fail_registering(self, patch: pytest.MonkeyPatch) -> None:
        register, calls = cuda_memory._runtime().cudaHostRegister, itertools.count()

        class Runtime:
            cudaHostRegister = staticmethod(lambda *span: 2 if next(calls) == 1 else register(*span))
            cudaHostUnregister = cuda_memory._runtime().cudaHostUnregister

        patch.setattr(cuda_memory, "_runtime", lambda: Runtime)

    @override
    def trainer_options(self) -> dict[str, Any]:
        return {"accelerator": "cuda", "devices": [self.device.index]}


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = CudaDevice()
    made.synchronize()
    yield made
    made.synchronize()
    torch.cuda.set_per_process_memory_fraction(1.0, made.device)
