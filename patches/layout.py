"""Where the files of Lightning are in the different kinds of trees that hold it."""

import re
from functools import cached_property
from pathlib import Path

from patches.format import RENAMES, REPOSITORY, Edit, Patch, PatchError, rename


class Layout:
    """Where a tree keeps the packages, and under which names.

    Args:
        tree: A checkout of Lightning (``src/lightning/``), or an unpacked wheel of either distribution.

    """

    def __init__(self, tree: Path) -> None:
        # In this order: a checkout also has the folders src/lightning_fabric and src/pytorch_lightning.
        for name in ("lightning/fabric", "lightning_fabric"):
            for prefix in (tree / "src", tree):
                if (prefix / name).is_dir():
                    self.prefix, self.renamed = prefix, name == "lightning_fabric"
                    return
        raise PatchError(f"{tree} is neither a checkout of Lightning nor an unpacked wheel: it has no lightning/fabric")

    def text(self, text: str) -> str:
        """``text`` with the imports and paths that this tree has."""
        return rename(text) if self.renamed else text

    def path(self, file: str) -> Path:
        """Where this tree has ``file``, which is named as in the ``lightning`` distribution."""
        return self.prefix / self.text(file)

    def imported_from(self, path: Path) -> set[str]:
        """The names that files of this tree import from the module at ``path``, so that it has to have them."""
        module = ".".join(path.relative_to(self.prefix).with_suffix("").parts).removesuffix(".__init__")
        statement = re.compile(rf"from\s+{re.escape(module)}\s+import\s+(\([^)]*\)|.*)")
        found = (names for text in self._sources for names in statement.findall(text))
        return {name for names in found for name in re.findall(r"\w+", names)}

    @cached_property
    def _sources(self) -> list[str]:
        packages = list(RENAMES.values()) if self.renamed else ["lightning"]
        return [path.read_text("utf-8") for name in packages for path in sorted((self.prefix / name).rglob("*.py"))]

    def edits(self, patch: Patch) -> list[Edit]:
        """Those edits of ``patch`` whose files are of this tree: ``pytorch-lightning`` has no package ``lightning``."""
        return [edit for edit in patch.edits if not self.renamed or rename(edit.spec["file"]) != edit.spec["file"]]

    def added(self, patch: Patch) -> dict[Path, bytes]:
        """The modules that ``patch`` brings along: where they go, and their content."""
        added = {}
        for name in (name for name in patch.adds if name.startswith("src/")):
            if not (REPOSITORY / name).is_file():
                raise PatchError(f"patch {patch.name!r} adds {name!r}, which does not exist")
            added[self.path(name[len("src/") :])] = self.text((REPOSITORY / name).read_text("utf-8")).encode()
        return added
