"""The device, once it is built, in a process that has no other tests, which do not expect it."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.late_device import late as late_module
from tests.late_device.accelerator import LateDevice
from tests.late_device.build import library


@pytest.fixture
def late(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The module ``torch.late``. Nothing is held up any more, and no memory is taken, when a test has ended."""
    if not library().exists():
        pytest.skip("needs a device of our own: `make test-device` builds it, with a C++ compiler")
    if any(Path(__file__).parent not in item.path.parents for item in request.session.items):
        pytest.skip("a process can have one device: run these tests alone, as `make test-device` does")
    late = late_module.load()
    for index in range(late.device_count()):
        late.synchronize(index)
    late.forget_uses()
    late.cudart().calls.clear()
    late.reset_peak_memory_stats()
    yield late
    late.release()
    late.set_delay(0)
    late.fail_registering(0)
    for index in range(late.device_count()):
        late.set_memory_limit(None, index)
        late.synchronize(index)
    late.empty_cache()


@pytest.fixture
def device(late: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    """The device that the contracts are tested with, each of whose copies is late."""
    late.set_delay(0.001)
    made = LateDevice(late, monkeypatch)
    with made.without_strays():
        yield made
