from collections.abc import Iterator
from typing import Any

import pytest

from patches import engine
from patches.edit import place
from patches.format import Edit
from patches.layout import Layout
from patches.splice import Splice


@pytest.fixture(scope="session", autouse=True)
def places() -> Iterator[None]:
    """Each edit is placed once in the same file, for tests apply the same patches to the same trees many times."""
    known: dict[Any, Splice] = {}

    def place_once(edit: Edit, source: bytes, layout: Layout) -> Splice:
        key = (edit.patch, *sorted(edit.spec.items()), source, layout.renamed)
        if key not in known:
            known[key] = place(edit, source, layout)  # errors are not kept
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "place", place_once)
        yield
