"""Places of files and folders: on this machine, or in a store that fsspec knows.

A place is made once, where a path comes in, by :func:`~lightning.fabric.storage.paths.location.locate`, and then passed
on. Making one imports no client, and asks nobody. What it is asked, it asks its file system each time, for other
processes write there, too.
"""

import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol
from typing_extensions import Self, override

from lightning.fabric.storage.paths import filesystem
from lightning.fabric.storage.paths.hints import about_bucket
from lightning.fabric.storage.paths.redact import redact

#: Without the one that is all of a path, and those of a URL without more.
SLASHES_AT_END = re.compile(r"(?<!^)(?<!:)(?<!:/)/+$")


class Entry(NamedTuple):
    """Something right inside a folder.

    Attributes:
        name: Its name there.
        kind: ``"file"`` or ``"directory"``.
        size: Bytes; None where the listing has none.
    """

    name: str
    kind: str
    size: int | None


class Place(ABC):
    """A file or a folder, or where there is going to be one.

    Its text can be shown in messages, without passwords and signatures. Two places are equal if they are of the same
    kind and their raw text is the same. One can be pickled for another process.

    Args:
        raw: The text as Lightning and fsspec take it, secrets included.
        options: The options of fsspec's file system, on top of its configuration. They may hold secrets.

    Attributes:
        is_local: True on a file system of this machine.
    """

    is_local: ClassVar[bool]

    def __init__(self, raw: str, options: Mapping[str, Any] | None = None) -> None:
        self.raw = raw
        self.options = options or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.raw, self.options)

    def __str__(self) -> str:
        return redact(self.raw)

    def __repr__(self) -> str:
        return repr(str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and (self.is_local, self.raw) == (other.is_local, other.raw)

    def __hash__(self) -> int:
        return hash((self.is_local, self.raw))

    def __truediv__(self, name: str) -> Self:
        """Returns the place called ``name`` in this folder."""
        return type(self)(f"{self._text.removesuffix('/')}/{name}", self.options)

    @property
    def _text(self) -> str:
        return SLASHES_AT_END.sub("", self.raw)

    @property
    def protocol(self) -> str:
        """The protocol of the URL; ``"file"`` for a local path."""
        return "file" if self.is_local else str(get_protocol(self.raw))

    @property
    def name(self) -> str:
        """The last part of the raw text, which messages must not show: it may end with a signature."""
        return self._text.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The folder around it."""
        return type(self)(SLASHES_AT_END.sub("", self._text.removesuffix(self.name)), self.options)

    def beside(self, suffix: str) -> Self:
        """Returns the place in the same folder whose name has ``suffix`` at its end."""
        return type(self)(self._text + suffix, self.options)

    def absolute(self) -> Self:
        """Returns the same place by a name that does not depend on the working folder."""
        return self

    def real(self) -> Self:
        """Returns the place that links lead to."""
        return self

    @abstractmethod
    def resolve(self) -> tuple[AbstractFileSystem, str]:
        """Returns the fsspec file system, which is for this thread alone, and the path in it.

        What the file system remembers about that path is forgotten.

        Raises:
            ValueError: The protocol is not known, its client lacks an option, has no option or no file of that name,
                or the endpoint has no scheme.
            ImportError: The client of the store is not installed.
            OSError: The client has asked a server, and got no good answer.
        """

    def is_same(self, other: "Place") -> bool:
        """Returns whether another name is that of the same place."""
        return self._may_share_client(other) and self.resolve() == other.resolve()

    def is_within(self, folder: "Place") -> bool:
        """Returns whether it is below a folder, as far as names go."""
        if not self._may_share_client(folder):
            return False
        (fs, path), (other, above) = self.resolve(), folder.resolve()
        return fs == other and path.startswith(above.rstrip("/") + "/")

    def _may_share_client(self, other: "Place") -> bool:
        """Returns whether the protocols alone, which need not be known, let two places be in one store."""
        protocols = (self.protocol, other.protocol)
        one, two = (known_implementations.get(name, {"class": name})["class"] for name in protocols)
        return bool(one == two)

    def kind(self) -> str:
        """Returns ``"file"``, ``"directory"`` or ``"nothing"``.

        On an object store a folder is names below this one, and no file of that name.

        Raises:
            OSError: The store did not answer the question, for example because access is denied. So do all others.
        """
        return filesystem.kind_of(*self.resolve())

    def is_file(self) -> bool:
        """Returns whether there is a file (an object) of exactly that name."""
        return self.kind() == "file"

    def is_folder(self) -> bool:
        """Returns whether there is a folder that keeps a file of that name from being written."""
        return not self.shares_names() and self.kind() == "directory"

    def is_broken_link(self) -> bool:
        """Returns whether there is a link that leads to nothing."""
        return False

    def shares_names(self) -> bool:
        """Returns whether a file and a folder can have the same name there.

        So it is on object stores, where folders are no more than a part of names: ``last.ckpt`` and
        ``last.ckpt/meta.pt`` exist side by side.
        """
        return not filesystem.has_folders(self.resolve()[0])

    def entries(self) -> list[Entry]:
        """Lists what is right inside a folder. A link is what it leads to, or a file.

        On an object store a file and a folder of one name are two entries.

        Raises:
            FileNotFoundError: There is no such folder.
        """
        found = filesystem.infos_inside(*self.resolve())
        return [
            Entry(name, "directory" if info.get("type") == "directory" else "file", info.get("size"))
            for name, info in found
        ]

    def list_names(self) -> list[str]:
        """Lists the names of what is right inside a folder, as :meth:`entries`."""
        return sorted({entry.name for entry in self.entries()})

    def sizes_of_files(self) -> dict[str, int | None]:
        """Returns the sizes of the files right inside a folder, as of :class:`Entry`, by their names."""
        fs, path = self.resolve()
        start = len(path.rstrip("/")) + 1
        found = {name[start:]: info.get("size") for name, info in filesystem.files_below(fs, path).items()}
        return {name: size for name, size in sorted(found.items()) if "/" not in name}

    def modified(self) -> float:
        """Returns when a file, or what is in a folder, was last written, in seconds since the beginning of 1970.

        Raises:
            OSError: There is nothing, or the store did not answer.
            NotImplementedError: The file system has no such time.
        """
        fs, path = self.resolve()
        if filesystem.kind_of(fs, path) != "directory":
            return filesystem.modified(fs, path)
        return max((filesystem.modified(fs, name) for name in filesystem.files_below(fs, path)), default=0.0)

    def lacks_bucket(self) -> bool:
        """Returns whether the bucket is known to be missing."""
        return not self.protocol.startswith("http") and filesystem.lacks_bucket(*self.resolve())

    @abstractmethod
    def advice_if_missing(self) -> str:
        """Returns what to do about there being nothing, without a full stop."""


class LocalPlace(Place):
    """A place on this machine, which has no options.

    Attributes:
        path: Its path.
    """

    is_local = True

    def __init__(self, raw: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> None:
        self.path = Path(raw)
        super().__init__(str(self.path))

    @override
    def absolute(self) -> Self:
        return type(self)(self.path.absolute())

    @override
    def real(self) -> Self:
        return type(self)(os.path.realpath(self.path))

    @override
    def resolve(self) -> tuple[AbstractFileSystem, str]:
        return LocalFileSystem(), os.path.abspath(self.path)

    @override
    def kind(self) -> str:
        return "directory" if self.path.is_dir() else "file" if self.path.exists() else "nothing"

    @override
    def is_broken_link(self) -> bool:
        return self.path.is_symlink() and not self.path.exists()

    @override
    def entries(self) -> list[Entry]:
        with os.scandir(self.path) as entries:
            return [Entry(entry.name, "directory" if entry.is_dir() else "file", None) for entry in entries]

    @override
    def sizes_of_files(self) -> dict[str, int | None]:
        if not self.path.is_dir():
            return {}
        with os.scandir(self.path) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}

    @override
    def modified(self) -> float:
        return self.path.stat().st_mtime

    @override
    def advice_if_missing(self) -> str:
        path = Path(os.path.abspath(self.path))
        found = next(parent for parent in path.parents if parent.exists() or parent == parent.parent)
        return f"Correct the path: there is no {path.relative_to(found).parts[0]!r} in {found}"


class StorePlace(Place):
    """A place in a store.

    Its text, a URL, never becomes a :class:`~pathlib.Path`: that would turn ``s3://bucket/x`` into a local folder
    called ``s3:``.
    """

    is_local = False
    #: The last answer, and the process and the thread that it is for: a client must not get into another one.
    _resolved: tuple[tuple[int, int], AbstractFileSystem, str] | None = None

    @override
    def resolve(self) -> tuple[AbstractFileSystem, str]:
        here, found = (os.getpid(), threading.get_ident()), self._resolved
        if found is None or found[0] != here:
            found = self._resolved = (here, *filesystem.connect(self.raw, self.options))
        _, fs, path = found
        filesystem.refresh(fs, path)
        return fs, path

    @override
    def advice_if_missing(self) -> str:
        if self.lacks_bucket():
            return about_bucket(self.raw)
        return "Correct the URL: upper and lower case and every slash count in the names of a store"
