"""The benchmarks from end to end, with small sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIGURES = ("save", "signed", "large", "hold_up", "load", "resume", "fit", "local")


def run(script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_every_figure_is_measured_and_reported(tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    measured = run("run.py", "--quick", "--results", results, "--only", *FIGURES)
    assert measured.returncode == 0, measured.stderr
    figures = json.loads(results.read_text())["figures"]
    assert list(figures) == list(FIGURES)
    assert [len(figures[figure]["ours"]) for figure in FIGURES] == [1] * len(FIGURES)
    for figure in ("save", "signed", "load"):
        (one,) = figures[figure]["ours"]
        assert min(one["wall_s"], one["cpu_s"], one["server_cpu_s"], one["requests"]) > 0
    assert figures["save"]["ours"][0]["payloads"] == ["UNSIGNED-PAYLOAD"]
    assert figures["signed"]["ours"][0]["payloads"] != ["UNSIGNED-PAYLOAD"]
    assert figures["load"]["ours"][0]["memory_mib"] >= 24
    assert figures["fit"]["ours"][0]["methods"]["PUT"] >= 6
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]

    page.write_text("before\n<!-- results: begin -->\nold\n<!-- results: end -->\nafter\n")
    for _ in range(2):
        assert run("report.py", results, page).returncode == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("| Requests of a fit of 3 epochs |") == 1


def test_a_page_without_a_place_for_the_results_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- results: begin -->\n")
    results = tmp_path / "results.json"
    results.write_text("{}")
    failed = run("report.py", results, page)
    assert failed.returncode != 0
    assert "<!-- results: end -->" in failed.stderr
    assert page.read_text() == "<!-- results: begin -->\n"


def test_a_client_that_fails_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho there is no Lightning here >&2\nexit 1\n")
    broken.chmod(0o755)
    failed = run("run.py", "--quick", "--results", tmp_path / "results.json", "--beside", broken)
    assert failed.returncode != 0
    assert "there is no Lightning here" in failed.stderr
    assert not (tmp_path / "results.json").exists()
