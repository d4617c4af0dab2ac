"""The pages for users: their links lead somewhere, and their text is wrapped in one way."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WIDTH = 120

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Returns what GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_each_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pages
def test_lines_but_those_of_tables_and_of_generated_parts_are_wrapped(page: Path) -> None:
    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > WIDTH and not line.startswith("|")] == []


SOURCES = ROOT / "src" / "lightning"
DEVELOPMENT = (ROOT / "docs" / "development.md").read_text(encoding="utf-8")


def file_of(module: str) -> Path:
    """Returns the file of a module as the page names it: below the package for storage, or below Lightning."""
    below = SOURCES if module.startswith(("fabric/", "pytorch/")) else SOURCES / "fabric" / "storage"
    package = below / module / "__init__.py"
    return package if package.exists() else (below / module).with_suffix(".py")


def section(heading: str) -> str:
    return DEVELOPMENT.partition(f"## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("heading", ["How a save flows", "How a load flows"])
def test_each_module_that_a_save_or_a_load_goes_through_is_there(heading: str) -> None:
    rows = re.findall(r"^\| \d+ \| (.*?) \|", section(heading), re.MULTILINE)
    modules = [module for row in rows for module in re.findall("`(.*?)`", row)]
    assert len(modules) >= 15
    assert [module for module in modules if not file_of(module).exists()] == []


def test_each_hidden_channel_of_the_page_is_there_and_none_is_missing() -> None:
    listed: dict[Path, set[str]] = {}
    for row in re.findall(r"^\| (`.*?) \|", section("Hidden channels"), re.MULTILINE):
        first, *others = re.findall("`(.*?)`", row)
        module, _, name = first.rpartition(".")
        listed.setdefault(file_of(module), set()).update([name, *others])
    for file, names in listed.items():
        text = file.read_text(encoding="utf-8")
        assert [name for name in names if not re.search(rf"^(class )?{name}\b", text, re.MULTILINE)] == [], file
    channel = re.compile(r"^(\w+)(?:: .*?)? = (?:threading\.local\(|ContextVar|set\(\)|\{\}$|\[\]$)", re.MULTILINE)
    for file in SOURCES.rglob("*.py"):
        missing = set(channel.findall(file.read_text(encoding="utf-8"))) - listed.get(file, set())
        assert not missing, f"{file} has {sorted(missing)}, which docs/development.md does not explain"
