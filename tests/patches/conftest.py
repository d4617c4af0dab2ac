import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from patches import engine, imports
from patches.edit import place
from patches.format import Edit
from patches.layout import Layout


def once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a memory, for arguments of which ``key`` says all that its result depends on."""
    known: dict[Any, Any] = {}

    def call(*arguments: Any) -> Any:
        about = key(*arguments)
        if about not in known:
            known[about] = function(*arguments)  # errors are not kept
        return copy.deepcopy(known[about])

    return call


def _about_place(edit: Edit, source: bytes, layout: Layout) -> Any:
    return (edit.patch, *sorted(edit.spec.items()), source, layout.renamed)


@pytest.fixture(scope="session", autouse=True)
def places() -> Iterator[None]:
    """Each edit is placed once in the same file, for tests apply the same patches to the same trees many times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "place", once(place, _about_place))
        # an edit is what errors name
        patch.setattr(imports, "_insertion", once(imports._insertion, lambda edit, *rest: (*rest[:2], *rest[2])))
        patch.setattr(imports, "_removal", once(imports._removal, lambda edit, *rest: rest))
        patch.setattr(imports, "orphans", once(imports.orphans, lambda *texts: texts))
        yield
