"""Devices, as the contracts of this package see them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

MIB = 2**20


class Device(ABC):
    """A device whose copies can be held up.

    Attributes:
        device: The device of the tensors; not the current one, if there are two.
        module: Its module in ``torch``.
        mib: MiB that a tensor has to have for copies of it to take longer than a few calls.
        can_sparse: Whether it has sparse tensors.
    """

    device: torch.device
    module: ModuleType
    mib = 1
    can_sparse = True

    @property
    def devices(self) -> list[torch.device]:
        return [torch.device(self.device.type, index) for index in range(self.module.device_count())]

    @abstractmethod
    def hold_stream(self) -> None:
        """Holds up what is launched on the device's current stream from now on, and what waits for it."""

    @abstractmethod
    def hold_copies(self) -> None:
        """Holds up the copies to the host that are launched from now on, and what waits for them."""

    @abstractmethod
    def let_go(self) -> None:
        """Lets all go on that was held up, after what need not wait for it has been done."""

    @abstractmethod
    def settle(self) -> None:
        """Waits until all has been done that is not held up."""

    @abstractmethod
    def limit_memory(self, more: int) -> None:
        """Lets tensors take so many bytes more, at most."""

    @abstractmethod
    def capturing(self) -> AbstractContextManager[Any]:
        """Captures a graph in global mode; raises an error in the end if something has spoiled it."""

    @abstractmethod
    def pins_by_registering(self, patch: pytest.MonkeyPatch) -> None:
        """Has host memory for copies registered, if torch would allocate it otherwise."""

    @abstractmethod
    def fail_registering(self, patch: pytest.MonkeyPatch) -> None:
        """Lets the second block of memory that is registered from now on fail, as when there is not enough."""

    @abstractmethod
    def trainer_options(self) -> dict[str, Any]:
        """Returns arguments for a Trainer that trains on the device."""

    def synchronize(self) -> None:
        self.module.synchronize(self.device)

    def numbered(self, mib: float | None = None, start: int = 0) -> Tensor:
        """Returns consecutive numbers on the device, by default as many as copies take long for."""
        count = int((self.mib if mib is None else mib) * MIB) // 4
        return torch.arange(start, start + count, dtype=torch.int32, device=self.device)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Has a stream of the device as the current one."""
        with self.module.stream(stream):
            yield
