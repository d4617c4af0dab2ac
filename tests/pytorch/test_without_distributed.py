"""Builds of PyTorch that have no distributed package."""

import subprocess
import sys

import torch

from lightning.fabric.storage.strategies.checkpoint_save import save_sharded
from tests.pytorch import without_distributed
from tests.servers import Bucket


def test_where_pytorch_has_no_distributed_package_a_trainer_saves_and_resumes(bucket: Bucket) -> None:
    save_sharded({"w": torch.ones(2)}, None, f"{bucket.url}/sharded.ckpt")
    command = [sys.executable, without_distributed.__file__, bucket.url]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert {"plain/last.ckpt", "async/last.ckpt", "fabric.ckpt"} < set(bucket.names())
