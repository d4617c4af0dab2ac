"""The benchmark of copies from a device, with small sizes and on the CPU: that it runs, and what it counts."""

import importlib.util
import runpy
from pathlib import Path
from types import ModuleType

import pytest
import torch

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu" / "staging.py"


@pytest.fixture
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("staging_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_figure_is_measured(benchmark: ModuleType) -> None:
    sizes = benchmark.Sizes(
        large=(8, 4), small_count=8, small_kib=512, layers=2, width=128, batch=2, steps=2, runs=2
    )  # fmt: skip
    figures = benchmark.measure("cpu", sizes)
    assert figures.pop("device") == "cpu"
    assert figures["copied_gib"] * 1024 == 8 + 4 + 8 / 2
    parameters = 2 * (128 * 128 + 128)
    assert figures["shard_gib"] * 2**30 == 4 * (3 * parameters + 4), "both moments, and a step for each parameter"
    assert min(figures.values()) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(FILE), run_name="__main__")
    assert capsys.readouterr() == ("", "Skipped: this needs a CUDA device.\n")
