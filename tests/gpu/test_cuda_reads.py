"""Sharded checkpoints that are loaded into the memory of a device."""

from pathlib import Path

import pytest
import torch

from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.sharded.read_plan import read_plan
from tests.storage.shards import Targets, along, make, slices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("checksums", [True, False], ids=["ours", "stock"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_part_reaches_a_device_bit_for_bit(tmp_path: Path, dtype: torch.dtype, checksums: bool) -> None:
    state = {"large": torch.randn(5001, 1003), "small": torch.randn(7), "scalar": torch.tensor(3.0)}
    metadata = make(tmp_path, state, along(0, 2), checksums=checksums)
    for cut in (along(0, 3), along(1, 3)):
        planned = Targets(metadata)
        for name, tensor in state.items():
            for chunk in cut(tensor.size()):
                planned.add(name, torch.zeros(chunk.sizes, dtype=dtype, device="cuda"), chunk)
        read_plan(locate(tmp_path), metadata, planned.plan, planned)
        assert len(planned.committed) == len(planned.plan.items)
        for index, target in planned.tensors.items():
            saved = next(chunk for chunk in cut(state[index.fqn].size()) if chunk.offsets == index.offset)
            assert torch.equal(target.cpu(), state[index.fqn][slices(saved)].to(dtype))
