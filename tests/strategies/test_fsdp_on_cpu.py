import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

#: A checkout of Lightning, where the patches may be tested as well, has only one of them.
PACKAGES = [name for name in ("lightning.fabric", "lightning_fabric") if importlib.util.find_spec(f"{name}.utilities")]
# A process of its own, since Lightning's launcher sets up a process group in it.
SCRIPT = """
import sys, torch
from {package} import Fabric
from {package}.strategies import FSDPStrategy

class CPUStrategy(FSDPStrategy):
    pass

fabric = Fabric(accelerator="cpu", devices=1, strategy=CPUStrategy(state_dict_type="full"))
fabric.launch()
module = fabric.setup_module(torch.nn.Linear(4, 4))
fabric.save(sys.argv[1], {{"model": module}})
fabric.load(sys.argv[1], {{"model": module}})

# the other places that name a device: a mesh, and modules that are wrapped as they are made
strategy = CPUStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(1, 1))
fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
fabric.launch()
assert strategy._fsdp_kwargs["device_mesh"].device_type == "cpu"
with strategy.module_sharded_context():
    wrapped = torch.distributed.fsdp.wrap.wrap(torch.nn.Linear(4, 4))
assert wrapped.compute_device.type == "cpu"
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_fsdp_saves_and_loads_full_state_on_the_cpu(package: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(package=package))
    command = [sys.executable, str(script), str(tmp_path / "full.ckpt")]
    result = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert torch.load(tmp_path / "full.ckpt")["model"]["weight"].shape == (4, 4)


@pytest.mark.parametrize("package", PACKAGES)
def test_only_fsdp_modules_that_compute_on_an_accelerator_offload_their_state(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardedOptimStateDictConfig

    offload_if_needed = importlib.import_module(f"{package}.utilities.fsdp").offload_if_needed

    class Part:
        def __init__(self, device: str) -> None:
            self.compute_device = torch.device(device)

    for devices, expected in [(["cpu"], False), (["cuda:0"], True), (["cpu", "cuda:0"], True), ([], False)]:
        parts = [Part(device) for device in devices]
        monkeypatch.setattr(FullyShardedDataParallel, "fsdp_modules", staticmethod(lambda module, parts=parts: parts))
        configs = FullStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=False)
        offload_if_needed(torch.nn.Linear(1, 1), *configs)
        assert [config.offload_to_cpu for config in configs] == [expected] * 2
