"""What a patch file says: its header, its edits, and which other patches it requires."""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATCHES = Path(__file__).resolve().parent
REPOSITORY = PATCHES.parent

#: How the ``pytorch-lightning`` distribution calls the packages that ``lightning`` ships. Holds for imports and paths.
RENAMES = {"lightning.fabric": "lightning_fabric", "lightning.pytorch": "pytorch_lightning"}
#: What becomes of what is found.
FOUND_KINDS = ("replace", "before", "after", "wrap")
_EDIT_KINDS = [{"find", kind} for kind in FOUND_KINDS] + [{"body"}]
_TEXTS = ("subject", "why", "upstream", "drop")
_LISTS = ("tests", "adds", "requires")


class PatchError(Exception):
    """A patch is malformed, or does not fit the tree; the message names the patch, the file and the scope."""


class Landed(PatchError):
    """The tree already holds what the edit brings."""


class NoMatch(PatchError):
    """The tree holds nothing that the edit could change."""


@dataclass(frozen=True)
class Edit:
    """One place in one file: ``spec`` holds the keys of the ``[[edit]]`` table."""

    patch: str
    spec: dict[str, str]

    @property
    def is_import(self) -> bool:
        """Whether nothing but an import is added."""
        return self.spec.keys() == {"file", "import"}

    def __str__(self) -> str:
        return f"patch {self.patch!r}, file {self.spec['file']!r}, scope {self.spec.get('in', '<module>')!r}"


@dataclass(frozen=True)
class Patch:
    """A commit: ``subject`` and ``why`` are its message, ``adds`` the files it brings along, ``edits`` what it changes.

    ``upstream`` says where the change stands with Lightning, ``drop`` when this project can do without it, ``tests``
    what protects it, and ``requires`` which patches must be applied with it.
    """

    name: str
    subject: str
    why: str
    upstream: str
    tests: list[str]
    drop: str
    adds: list[str]
    requires: list[str]
    edits: list[Edit] = field(repr=False)


def rename(text: str) -> str:
    """Rewrites imports and paths of ``lightning`` into those of ``pytorch-lightning``."""
    for old, new in RENAMES.items():
        text = re.sub(rf"(?<![\w.]){re.escape(old)}\b", new, text)
        text = re.sub(rf"(?<![\w./]){re.escape(old.replace('.', '/'))}(?=/|$)", new, text)
    return text


def load_patches(folder: Path = PATCHES) -> list[Patch]:
    """Reads every ``*.toml`` of ``folder``, in the order of names except that what a patch requires comes first."""
    patches = {path.stem: _read(path) for path in sorted(folder.glob("*.toml"))}
    return select(patches.values(), list(patches))


def select(patches: Iterable[Patch], names: Sequence[str]) -> list[Patch]:
    """The patches called ``names`` and all they require, each after what it requires."""
    known = {patch.name: patch for patch in patches}
    chosen: dict[str, Patch] = {}

    def add(name: str, trail: tuple[str, ...]) -> None:
        if name not in known:
            wanted = f"required by {trail[-1]!r}" if trail else "asked for"
            raise PatchError(f"there is no patch {name!r} ({wanted}); there are: {', '.join(sorted(known))}")
        if name in trail:
            raise PatchError(f"patches require each other in a circle: {' -> '.join((*trail, name))}")
        for needed in known[name].requires:
            add(needed, (*trail, name))
        chosen.setdefault(name, known[name])

    for name in names:
        add(name, ())
    return list(chosen.values())


def _read(path: Path) -> Patch:
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise PatchError(f"{path.name}: {error}") from error
    edits = data.pop("edit", [])
    for key in _TEXTS:
        if not isinstance(data.get(key), str) or not data[key].strip():
            raise PatchError(f"{path.name}: needs {key!r}, a string that says something")
    for key in _LISTS:
        if not isinstance(data.get(key), list) or not all(isinstance(item, str) for item in data[key]):
            raise PatchError(f"{path.name}: needs {key!r}, a list of strings")
    if unknown := data.keys() - {*_TEXTS, *_LISTS}:
        raise PatchError(f"{path.name}: unknown key {sorted(unknown)[0]!r}")
    if strange := [file for file in data["adds"] if not file.startswith(("src/lightning/", "tests/"))]:
        raise PatchError(f"{path.name}: adds {strange[0]!r}, which is neither below src/lightning/ nor below tests/")
    if not edits and not data["adds"]:
        raise PatchError(f"{path.name}: neither edits nor adds anything")
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise PatchError(f"{path.name}: write [[edit]], with two brackets on each side")
    for edit in edits:
        _check_edit(path, edit)
    return Patch(path.stem, edits=[Edit(path.stem, edit) for edit in edits], **data)


def _check_edit(path: Path, edit: dict[str, object]) -> None:
    if edit.keys() != {"file", "import"} and edit.keys() - {"file", "in", "landed", "import"} not in _EDIT_KINDS:
        raise PatchError(
            f"{path.name}: an edit has the keys {sorted(edit)}; it needs 'file' and one of find with"
            f" {', '.join(FOUND_KINDS)}, or body, beside which it may have an import; or an import alone"
        )
    if "file" not in edit:
        raise PatchError(f"{path.name}: an edit has the keys {sorted(edit)}; it needs 'file'")
    if strange := [key for key, value in edit.items() if not isinstance(value, str)]:
        raise PatchError(f"{path.name}: {strange[0]!r} of an edit must be a string")
