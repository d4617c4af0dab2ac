"""Graphs of CUDA's that are captured in global mode, which calls of other threads can spoil, while a save is made."""

from collections.abc import Iterator

import pytest
import torch

from lightning.fabric.storage.background import cuda_memory
from lightning.fabric.storage.background.staging import Staging
from tests.accelerators.beside import runs
from tests.accelerators.device import MIB
from tests.accelerators.staging import until, warm
from tests.gpu.conftest import CudaDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ADDITIONS = 10


class Captured:
    """A graph that adds to values, captured on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.values = torch.zeros(1000, device=device)
        self.graph = torch.cuda.CUDAGraph()
        self.values.add_(1)  # a kernel is loaded when it is used first, which a capture need not allow
        torch.cuda.synchronize(device)

    def check(self) -> None:
        self.values.zero_()
        for _ in range(3):
            self.graph.replay()
        assert self.values.eq(3 * ADDITIONS).all()

    def add(self) -> None:
        for _ in range(ADDITIONS):
            self.values.add_(1)


@pytest.fixture
def captured(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    monkeypatch.setattr(cuda_memory, "BLOCK", MIB)  # for many calls of the driver
    with torch.cuda.device(device.device):
        yield Captured(device.device)


def test_a_graph_that_is_captured_while_memory_is_warmed_replays_right(device: CudaDevice, captured: Captured) -> None:
    memory, tensor = Staging(), device.numbered(32)
    torch.cuda.synchronize(device.device)
    with torch.cuda.graph(captured.graph):
        memory.warm(64 * MIB, device.device)
        captured.add()
        until(lambda: not runs("warm-checkpoint-memory"))
    captured.check()
    (copy,) = memory.stage_tensors([tensor]).tensors
    assert copy.is_pinned()
    assert torch.equal(copy, tensor.cpu())


def test_a_graph_that_is_captured_while_copies_are_in_flight_replays_right(
    device: CudaDevice, captured: Captured
) -> None:
    memory, tensor = warm(device), device.numbered()
    expected, stream = tensor.cpu(), torch.cuda.Stream(device.device)
    device.synchronize()
    device.hold_copies()
    staged = memory.stage_tensors([tensor])
    with torch.cuda.stream(stream):
        captured.graph.capture_begin()  # `torch.cuda.graph` would wait for the device first
        assert runs("checkpoint-copies"), "something has waited for the device"
        captured.add()
        until(lambda: not runs("checkpoint-copies"))  # which has looked for the bytes many times
        captured.graph.capture_end()
    captured.check()
    assert torch.equal(staged.tensors[0], expected)
