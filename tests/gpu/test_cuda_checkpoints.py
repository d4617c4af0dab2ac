"""What a test without a GPU cannot show: tensors that torch copies to the host while it saves them."""

from pathlib import Path

import pytest
import torch

from lightning.fabric.storage.archives.load import load_file
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.transport import open as transport
from tests.servers import Bucket

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("place", ["s3", "local"])
@pytest.mark.parametrize("lean", [False, True])
def test_tensors_on_the_device_come_back_bit_for_bit(place: str, lean: bool, bucket: Bucket, tmp_path: Path) -> None:
    state = {name: torch.randn(size, device="cuda") for name, size in [("a", 40 * 2**20), ("b", 1), ("c", 3 * 2**20)]}
    url = locate(f"{bucket.url}/x.ckpt" if place == "s3" else tmp_path / "x.ckpt")
    with transport.open_writer(locate(url), lean=lean) as file:
        torch.save(state, file)
    loaded = load_file(url)
    assert all(value.device.type == "cuda" and torch.equal(value, loaded[name]) for name, value in state.items())
