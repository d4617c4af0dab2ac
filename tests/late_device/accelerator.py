"""The late device for the contracts of all devices, and for a Trainer."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

from lightning.fabric.storage.background import cuda_memory, staging
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from tests.accelerators.device import Device


class LateDevice(Device):
    """The second of the two, while the first is the current one."""

    can_sparse = False

    def __init__(self, late: ModuleType, patch: pytest.MonkeyPatch) -> None:
        self.module = late
        self.device = torch.device("late", 1)
        self._own_thread = threading.get_native_id()
        self._uses_all = False
        # its capture mode is not known to CUDA's driver
        for module in (staging, cuda_memory):
            patch.setattr(module, "beside_captures", lambda: late.capture_mode_guard("relaxed"))

    @property
    @override
    def devices(self) -> list[torch.device]:
        self._uses_all = True  # who asks has tensors on them
        return super().devices

    @override
    def hold_stream(self) -> None:
        self.module.hold_stream(self.module.current_stream(self.device))

    @override
    def hold_copies(self) -> None:
        self.module.hold_copies(to_device=False)

    @override
    def let_go(self) -> None:
        self.settle()
        self.module.release()

    @override
    def settle(self) -> None:
        self.module.settle()

    @override
    def limit_memory(self, more: int) -> None:
        self.module.set_memory_limit(self.module.memory_allocated(self.device) + more, self.device)

    @override
    def capturing(self) -> AbstractContextManager[Any]:
        return self.module.capture()  # type: ignore[no-any-return]

    @override
    def pins_by_registering(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(cuda_memory, "takes_registered", lambda device: device.type == "late")
        patch.setattr(cuda_memory, "_runtime", self.module.cudart)
        patch.setattr(cuda_memory, "torch", SimpleNamespace(**{**vars(torch), "cuda": self.module}))

    @override
    def fail_registering(self, patch: pytest.MonkeyPatch) -> None:
        self.module.fail_registering(after=1)

    @override
    def trainer_options(self) -> dict[str, Any]:
        strategy = SingleDeviceStrategy(device=self.device, accelerator=LateAccelerator())
        return {"devices": 1, "strategy": strategy}

    @contextmanager
    def without_strays(self) -> Iterator[None]:
        """Fails if another thread has used the first device, where it has nothing to do: that takes memory there."""
        yield
        others = {thread for thread, device in self.module.first_uses() if device == 0} - {self._own_thread}
        assert self._uses_all or not others, "a thread has not made the device of its tensors the current one"


class LateAccelerator(Accelerator):
    @override
    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    @override
    def teardown(self) -> None:
        torch.accelerator.set_device_index(0)

    @staticmethod
    @override
    def parse_devices(devices: Any) -> list[int]:
        return [1]

    @staticmethod
    @override
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("late", index) for index in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        return 1

    @staticmethod
    @override
    def is_available() -> bool:
        return True

    @staticmethod
    @override
    def name() -> str:
        return "late"
