"""The benchmarks of a GPU, with small sizes and on the CPU: that they run, and what they say without it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def test_every_figure_is_measured_and_shown(tmp_path: Path) -> None:
    ended = run("run.py", str(tmp_path / "results.json"), "--quick")
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["torch"] == torch.__version__
    figures = results["figures"]
    assert figures["copied_gib"] * 1024 == 8 + 4 + 8 / 2
    parameters = 2 * (128 * 128 + 128)
    both_moments_and_steps = 4 * (3 * parameters + 4)
    assert figures["shard_gib"] * 2**30 == both_moments_and_steps
    assert figures["saved_gib"] * 2**30 == both_moments_and_steps
    assert figures["save_seconds_count"] == 2
    assert min(value for name, value in figures.items() if "memory" not in name) > 0
    for name in ("bus", "copy", "first save", "step", "step while memory is warmed", "step during upload"):
        assert f"\n| {name} " in ended.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("script", ["run.py", "machine.py"])
def test_without_a_device_they_fail_and_say_so(script: str) -> None:
    ended = run(script)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("There is no CUDA device for torch ")
