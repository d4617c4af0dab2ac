"""The packages of ``lightning.fabric.storage`` stand on each other, and none on itself."""

from pathlib import Path

import pytest

from tools import imports


def test_each_package_imports_only_from_those_below_it() -> None:
    assert imports.faults() == []


def test_an_import_upwards_a_circle_and_a_module_without_a_room_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "SOURCES", tmp_path)

    def write(module: str, text: str) -> None:
        path = tmp_path / f"{imports.PACKAGE}.{module}".replace(".", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)

    write("paths.a", f"from {imports.PACKAGE}.transport import b")
    write("transport.b", "")
    assert imports.faults() == [f"{imports.PACKAGE}.paths.a imports {imports.PACKAGE}.transport.b, which is above it"]
    write("paths.a", "")
    write("transport.b", f"import {imports.PACKAGE}.transport.c")
    write("transport.c", f"def late():\n    from {imports.PACKAGE}.transport.b import one")
    assert [fault.split()[0].rpartition(".")[2] for fault in imports.faults()] == ["b", "c"]
    write("cellar.d", "")
    assert imports.faults() == [f"{imports.PACKAGE}.cellar.d is in no room"]


def test_one_module_alone_knows_a_kind_of_accelerator() -> None:
    """All others ask for the module of a tensor's own device, which need not be one of CUDA's."""
    texts = {name.rpartition(".")[2]: path.read_text("utf-8").lower() for name, path in imports.modules().items()}
    assert {name for name, text in texts.items() if "cuda" in text.replace("cuda_memory", "")} == {"cuda_memory"}
