"""The benchmarks from end to end, with small sizes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from build_backend.distribution import LIGHTNING
from build_backend.upstream import read_pin

STOCK = f"stock {read_pin(LIGHTNING).version}"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 1 << 20
FIGURES = (
    "save", "signed", "large", "hold_up", "load", "resume", "fit", "local", "sharded_trainer", "sharded_full",
    "sharded_local",
)  # fmt: skip


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
    assert figures["sharded_trainer"]["ours"][0]["bytes"] >= 2 * 32 * MIB
    (local,) = figures["sharded_local"]["ours"]
    assert min(local["save_wall_s"], local["save_cpu_s"], local["load_wall_s"], local["load_cpu_s"]) > 0
    assert local["requests"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]

    sharded = "<!-- sharded: begin -->\nold\n<!-- sharded: end -->\n"
    page.write_text(f"before\n<!-- results: begin -->\nold\n<!-- results: end -->\n{sharded}after\n")
    for _ in range(2):
        assert run("report.py", results, page).returncode == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("| Requests of a fit of 3 epochs |") == 1


@pytest.mark.slow
def test_sharded_checkpoints_and_saves_in_the_background_are_measured_beside_stock_lightning(
    tmp_path: Path, pristine: Callable[[str], Path]
) -> None:
    stock = tmp_path / "python"
    stock.write_text(f'#!/bin/sh\nPYTHONPATH={pristine("lightning")} exec {sys.executable} "$@"\n')
    stock.chmod(0o755)
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    names = ("sharded_fsdp1", "sharded_mixed", "sharded_fsdp1_load", "stall_fsdp1", "steps")
    measured = run("run.py", "--quick", "--results", results, "--only", *names, "--beside", stock)
    assert measured.returncode == 0, measured.stderr
    figures = json.loads(results.read_text())["figures"]
    assert list(figures) == list(names)
    for release in (STOCK, "ours"):
        (saved,), (loaded,), (restored,), (stall,), (steps,) = (figures[name][release] for name in names)
        assert saved["bytes"] >= 2 * 32 * MIB
        assert min(saved["wall_s"], saved["cpu_s_per_gib"], saved["memory_mib"]) > 0
        assert min(loaded["methods"]["GET"], restored["methods"]["GET"]) >= 4  # .metadata and a file, for either rank
        assert len(stall["stalls_s"]) == len(stall["copies_s"]) == 2
        assert min(stall["first_s"], *stall["stalls_s"], *stall["copies_s"], stall["memory_mib"]) > 0
        afterwards = [until - held for until, held in zip(stall["saved_s"], stall["stalls_s"], strict=True)]
        assert release == STOCK or min(afterwards) > 0.005  # 64 MiB are sent then; stock sends them before
        assert len(steps["idle_steps_ms"]) == 20
        assert 0 < min(steps["steps_ms"]) <= steps["during_ms"] <= steps["longest_ms"] <= steps["uploaded_s"] * 1e3
        assert steps["bytes"] >= 32 * MIB
    assert figures["sharded_fsdp1"][STOCK][0]["clients"][0].startswith("aiobotocore")
    assert figures["sharded_fsdp1"][STOCK][0]["memory_mib"] >= 32  # it copies all that a rank has

    names = ("results", "sharded", "async")
    page.write_text("".join(f"<!-- {name}: begin -->\nold\n<!-- {name}: end -->\n" for name in names))
    assert run("report.py", results, page).returncode == 0
    text = page.read_text()
    assert text.count("old") == 1  # what was not measured
    assert f"| {STOCK} | ours | ours / {STOCK} |" in text
    assert text.count("| FSDP1, the same save: processor time per GiB |") == 1
    assert f"| {STOCK} | dcp.async_save | ours | ours / {STOCK} |" in text
    assert text.count("| ... while 32 MiB are uploaded |") == 1


def test_a_percentile_is_that_of_all_single_numbers(tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    keys = ("ratio", "without_ms", "during_ms", "idle_ratio", "longest_ms", "idle_longest_ms", "uploaded_s")
    one = dict.fromkeys(keys, 1.0) | {"idle_steps_ms": [1.0]}
    runs = [{**one, "steps_ms": [float(number) for number in numbers]} for numbers in (range(100), range(100, 200))]
    machine = {"system": "", "cores": 2, "memory_gib": 1, "python": ""}
    versions = {"ours": {"lightning": "2.6.6+io.1"}}
    results.write_text(
        json.dumps({"figures": {"steps": {"ours": runs}}, "versions": versions, "machine": machine, "sizes": {}})
    )
    page.write_text("<!-- async: begin --><!-- async: end -->")
    assert run("report.py", results, page).returncode == 0
    assert "| ... 99th percentile, during the upload | 197 ms |" in page.read_text()


def test_a_page_without_a_place_for_the_results_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- results: begin -->\n")
    results = tmp_path / "results.json"
    machine = {"system": "", "cores": 2, "memory_gib": 1, "python": ""}
    run_once = {"cpu_s": 1.0, "wall_s": 2.0, "memory_mib": 3.0, "server_cpu_s": 0, "link_s": 0, "connections": 1}
    figures = {"save": {"ours": [{**run_once, "clients": [], "payloads": []}]}}
    versions = {"ours": {"lightning": "2.6.6+io.1"}}
    results.write_text(json.dumps({"figures": figures, "versions": versions, "machine": machine, "sizes": {}}))
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
