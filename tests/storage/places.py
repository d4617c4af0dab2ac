"""A place in a store, for a test, and how it looks to another client."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

#: See :attr:`Store.url`.
NAME = "run/x.ckpt"
#: Each is the name of a folder and of a file in it. The percent signs could be taken for an encoded space.
NAMES = ["a[1]", "a*", "a?", "a#1", "a?b#c", "a%20b", "50% + é=1"]


class Outside(Protocol):
    """Another client of the same store, which nothing of Lightning's knows about."""

    def names(self) -> list[str]: ...

    def get(self, name: str) -> bytes: ...

    def put(self, name: str, content: bytes) -> None: ...

    def remove(self, name: str) -> None: ...

    def unfinished_uploads(self) -> list[str]: ...


@dataclass
class Explicit:
    """How the store is reached with ``storage_options`` alone."""

    root: str
    options: dict[str, Any]
    #: What the variables are set to that would lead there without the options.
    misleading: dict[str, str] = field(default_factory=dict)


@dataclass
class Store:
    """An empty place in a store, for one test."""

    root: str
    outside: Outside
    explicit: Explicit | None = None

    @property
    def url(self) -> str:
        """Where most tests save, in a folder that is not there yet."""
        return f"{self.root}/{NAME}"


@dataclass
class Folder:
    """A folder of this machine, as seen from outside."""

    path: Path

    def names(self) -> list[str]:
        return sorted(found.relative_to(self.path).as_posix() for found in self.path.rglob("*") if found.is_file())

    def get(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def put(self, name: str, content: bytes) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        new = self.path / "being written"
        new.write_bytes(content)
        new.replace(self.path / name)

    def remove(self, name: str) -> None:
        (self.path / name).unlink()

    def unfinished_uploads(self) -> list[str]:
        return []


class Memory:
    """fsspec's dictionary of files."""

    def names(self) -> list[str]:
        return sorted(name.lstrip("/") for name in MemoryFileSystem.store)

    def get(self, name: str) -> bytes:
        return MemoryFileSystem.store[f"/{name}"].getvalue()

    def put(self, name: str, content: bytes) -> None:
        MemoryFileSystem().pipe_file(f"/{name}", content)

    def remove(self, name: str) -> None:
        del MemoryFileSystem.store[f"/{name}"]

    def unfinished_uploads(self) -> list[str]:
        return []


def remember_listing(url: str) -> None:
    """Fills what a file system remembers of a folder."""
    fs, path = fsspec.url_to_fs(url)
    assert fs.ls(path)
