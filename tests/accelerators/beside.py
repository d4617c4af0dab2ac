"""The promises of staged copies beside a graph that is captured, and beside processes that are forked."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning.fabric.storage.background import cuda_memory
from lightning.fabric.storage.background.staging import Staging
from tests.accelerators.device import MIB, Device
from tests.accelerators.staging import until, warm


def runs(name: str) -> bool:
    """Whether there is a thread of a name."""
    return any(thread.name == name for thread in threading.enumerate())


class BesideContract:
    @pytest.fixture(autouse=True)
    def registering(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        device.pins_by_registering(monkeypatch)
        monkeypatch.setattr(cuda_memory, "BLOCK", MIB)  # for many calls of the driver
        yield
        until(lambda: not runs("pinned-checkpoint-memory"))

    def test_memory_is_warmed_while_a_graph_is_captured(self, device: Device) -> None:
        memory, tensor = Staging(), device.numbered(2.5)
        with device.capturing():
            memory.warm(4 * MIB, device.device)
            until(lambda: not runs("warm-checkpoint-memory"))
        (copy,) = memory.stage_tensors([tensor]).tensors
        assert copy.is_pinned()
        assert torch.equal(copy, tensor.cpu())

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_workers_that_are_forked_while_copies_are_in_flight_end_and_leave_the_copies_alone(
        self, device: Device
    ) -> None:
        memory, tensor = warm(device), device.numbered()
        expected = tensor.cpu()
        device.hold_copies()
        staged = memory.stage_tensors([tensor])
        tensor.fill_(-1)
        loader: DataLoader[Any] = DataLoader(range(8), batch_size=2, num_workers=2, multiprocessing_context="fork")
        seen = [value for batch in loader for value in batch.tolist()]
        device.let_go()
        assert seen == list(range(8))
        (copy,) = staged.tensors
        assert copy.is_pinned()
        assert torch.equal(copy, expected)
        assert tensor.eq(-1).all()
