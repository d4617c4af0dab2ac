"""Two ranks that save and resume with FSDP: on two devices with NCCL where there are two, else on one with gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("ranks_worker.py")
WORLD = 2


def run_ranks(device: str, backend: str, folder: Path) -> list[dict[str, list[str]]]:
    """What each rank says, each in a process that sees one device."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    devices = seen.split(",")
    processes = []
    for rank in range(WORLD):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = devices[rank if backend == "nccl" else 0]
        command = [sys.executable, str(WORKER), str(rank), str(WORLD), device, backend, str(folder)]
        with open(folder / f"errors-{rank}.txt", "w") as errors:
            processes.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
            )
    try:
        outputs = [process.communicate(timeout=270)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, process in enumerate(processes):
        assert process.returncode == 0, (folder / f"errors-{rank}.txt").read_text()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param("cpu", "gloo", marks=pytest.mark.slow),  # what of it needs no device
        pytest.param(
            "cuda", "gloo",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device"),
            ],
        ),
        pytest.param(
            "cuda", "nccl",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
        ),
    ],
)  # fmt: skip
def test_ranks_resume_bit_for_bit_and_load_what_is_beside_the_model_into_host_memory(
    device: str, backend: str, tmp_path: Path
) -> None:
    for of_rank in run_ranks(device, backend, tmp_path):
        assert of_rank
        assert {case: wrong for case, wrong in of_rank.items() if wrong} == {}
