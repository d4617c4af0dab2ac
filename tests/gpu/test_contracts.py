"""The contracts of all devices, on CUDA."""

import pytest
import torch

from tests.accelerators.beside import BesideContract
from tests.accelerators.optimizers import OptimizersContract
from tests.accelerators.reads import FilesContract, ShardsContract
from tests.accelerators.staging import OrderContract, RegisteringContract, StagingContract
from tests.accelerators.training import PluginContract, TrainingContract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class TestOrder(OrderContract):
    pass


class TestStaging(StagingContract):
    pass


class TestRegistering(RegisteringContract):
    pass


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
