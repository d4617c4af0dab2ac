"""What `make test-versions` installs for a row, and what it writes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import versions

CLOUD = "# the extras\ns3fs>=2024.6.0\nobstore>=0.11.0\n"
TEST = "torch==2.13.0\npytest==9.2.0\npytest-xdist==3.8.0\n-r cloud.txt\nmoto[s3,server]==5.2.5\nruff==1\n"


def result(torch: str, outcome: str = "passed") -> dict[str, Any]:
    noted = dict.fromkeys(("python", "fsspec", "s3fs", "gcsfs", "adlfs", "obstore"), "1.0")
    return {"outcome": outcome, "versions": {"torch": torch, **noted}, "passed": 7, "date": "2026-12-01"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"torch": "2.4.1", "clients": "oldest"}, ["torch==2.4.1", "s3fs==2024.6.0", "obstore==0.11.0"]),
        ({"torch": "newest", "clients": "newest"}, ["torch", "s3fs>=2024.6.0", "obstore>=0.11.0"]),
    ],
)
def test_a_row_has_its_torch_and_clients_and_what_the_tests_need(row: dict[str, str], expected: list[str]) -> None:
    installed = versions.requirements_of(row, ["torch", "ruff"], TEST, CLOUD)
    assert installed == [*expected, "pytest==9.2.0", "pytest-xdist==3.8.0", "moto[s3,server]==5.2.5"]


def test_the_table_has_what_passed_by_version_and_the_rest_of_the_page_stays() -> None:
    page = "before\n<!-- supported: begin -->\nold\n<!-- supported: end -->\nafter\n"
    results = [result("2.10.0+cu128"), result("2.4.1"), result("2.8.0", "failed"), {"outcome": "not run"}]
    written = versions.with_table(page, results)
    assert written.startswith("before\n<!-- supported: begin -->\n| torch |")
    assert written.endswith("|\n<!-- supported: end -->\nafter\n")
    assert [line.split()[1] for line in written.splitlines() if line.endswith("2026-12-01 |")] == [
        "2.4.1",
        "2.10.0+cu128",
    ]
    assert "old" not in written
    assert versions.with_table(written, results) == written


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="supported: begin"):
        versions.with_table("nothing", [])


def test_the_readmes_table_is_what_the_kept_results_give() -> None:
    readme = versions.README.read_text(encoding="utf-8")
    results = json.loads(versions.RESULTS.read_text(encoding="utf-8"))
    assert versions.with_table(readme, results.values()) == readme


def test_each_test_of_the_list_is_there() -> None:
    for name in versions.read_table()["tests"]:
        file, _, kind = name.partition("::")
        assert f"class {kind}(" in (Path(versions.ROOT) / file).read_text(encoding="utf-8") or not kind
