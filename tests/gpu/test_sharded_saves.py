"""What no test without a GPU can show: that a sharded save moves a state from the device to its files bit by bit."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORKER = Path(__file__).with_name("saving_worker.py")
SERVER = Path(__file__).parents[2] / "benchmarks" / "object_server.py"
HUGE_MIB = 2048


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An S3 server that is fast with large objects, for the processes that a test starts."""
    command = [sys.executable, str(SERVER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{process.stdout.readline().strip()}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield  # leaving closes its standard input, which ends it


@pytest.mark.slow
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("api", "place"), [("fabric", "s3"), ("trainer", "s3"), ("fabric", "local")])
def test_a_state_on_the_device_is_saved_without_a_copy_of_it_and_loads_as_it_was_when_the_save_returned(
    api: str, place: str, tmp_path: Path
) -> None:
    url = "s3://bucket/x.ckpt" if place == "s3" else str(tmp_path / "x.ckpt")
    command = [sys.executable, str(WORKER), api, "cuda", str(HUGE_MIB), url]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    taken = json.loads(result.stdout.splitlines()[-1])
    assert taken["host_mib"] <= 256
    assert taken["device_mib"] <= 64
