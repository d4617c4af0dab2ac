"""Editable installs: an assembled tree in the source tree's build folder, and a wheel that points to it."""

import shutil
import tempfile
from pathlib import Path

from build_backend.assemble import assemble
from build_backend.distribution import ROOT, Distribution

EDITABLE = ROOT / "build" / "editable"


def make_editable_tree(distribution: Distribution, pristine: bytes) -> Path:
    """Assemble the distribution below ``build/editable``, in the place of an earlier tree, and return where."""
    EDITABLE.mkdir(parents=True, exist_ok=True)
    tree = EDITABLE / distribution.name
    # Assembled beside it and moved, so that a failed or interrupted build leaves the earlier install as it was.
    with tempfile.TemporaryDirectory(dir=EDITABLE) as temporary:
        new = Path(temporary) / "tree"
        assemble(distribution, pristine, new, editable=True)
        if tree.exists():
            shutil.move(tree, Path(temporary) / "old")
        shutil.move(new, tree)
    return tree


def pth_file(distribution: Distribution, tree: Path) -> dict[str, bytes]:
    """Return the one file of an editable wheel: a plain path, which type checkers and editors follow too."""
    return {f"_editable_{distribution.file_name}.pth": f"{tree}\n".encode()}
