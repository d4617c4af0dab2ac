"""A file system with folders and renames, that is remote as far as anyone can tell: ``tree://`` and a local path."""

import os
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem


class TreeFileSystem(LocalFileSystem):
    """See above."""

    protocol = "tree"
    refuses_overwriting = ""

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.refuses_overwriting and os.path.exists(path2):
            if self.refuses_overwriting == "silently":
                return
            raise FileExistsError(path2)
        super().mv(path1, path2, **kwargs)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path.removeprefix(f"{cls.protocol}://") if isinstance(path, str) else path


class GenericFileSystem(TreeFileSystem):
    """The same with fsspec's own way to move, which copies and removes, and takes names for patterns."""

    protocol = "generic"
    mv = AbstractFileSystem.mv


for implementation in (TreeFileSystem, GenericFileSystem):
    fsspec.register_implementation(str(implementation.protocol), implementation, clobber=True)
