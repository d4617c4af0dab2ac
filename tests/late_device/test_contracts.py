"""The contracts of all devices, on the late one."""

import gc
import threading

import pytest

from lightning.fabric.storage.background.staging import Staging
from tests.accelerators.beside import BesideContract
from tests.accelerators.device import MIB
from tests.accelerators.optimizers import OptimizersContract
from tests.accelerators.reads import FilesContract, ShardsContract
from tests.accelerators.staging import (
    OrderContract,
    RegisteringContract,
    StagingContract,
    no_memory_is_registered,
    until,
)
from tests.accelerators.training import PluginContract, TrainingContract
from tests.late_device.accelerator import LateDevice

pytestmark = pytest.mark.late_device


class TestOrder(OrderContract):
    pass


class TestStaging(StagingContract):
    pass


class TestRegistering(RegisteringContract):
    def test_the_driver_sees_touched_blocks_in_threads_of_ours_that_use_the_right_device(
        self, device: LateDevice
    ) -> None:
        calls = device.module.cudart().calls
        staged = Staging().stage_tensors([device.numbered(2.5)])
        assert staged.tensors[0].is_pinned()
        assert [call.size for call in calls] == [MIB, MIB, MIB // 2]
        assert all(call.touched == call.size for call in calls), "before the driver does it, under a lock"
        staged.release()
        del staged
        gc.collect()
        until(no_memory_is_registered)
        assert [call.is_removal for call in calls] == [False] * 3 + [True] * 3
        assert {(call.error, call.device) for call in calls} == {(0, device.device.index)}
        assert threading.get_native_id() not in {call.thread for call in calls}


class TestFiles(FilesContract):
    pass


class TestShards(ShardsContract):
    pass


class TestPlugin(PluginContract):
    pass


class TestTraining(TrainingContract):
    pass


class TestBeside(BesideContract):
    pass


class TestOptimizers(OptimizersContract):
    pass
