"""The two distributions that one source tree builds, and where our files go in each."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from patches.format import RENAMES

ROOT = Path(__file__).resolve().parent.parent
LOCAL_VERSION = "io.1"


@dataclass(frozen=True)
class Distribution:
    """One of the distributions.

    Attributes:
        name: The name on the package index.
        folders: Folder under ``src`` to folder in the wheel.
        packages: The import packages at the top of the wheel.

    """

    name: str
    folders: Mapping[str, str]
    packages: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """The name as wheels, sdists and dist-info folders spell it."""
        return self.name.replace("-", "_")

    @property
    def renames_imports(self) -> bool:
        """Whether our modules have another import name here than in ``src``."""
        return any(source != target for source, target in self.folders.items())

    def place(self, source: PurePosixPath) -> PurePosixPath:
        """Tell where a file or folder of ``src`` goes in the wheel.

        Raises:
            ValueError: If this distribution has no such place.

        """
        for folder, target in self.folders.items():
            if source.is_relative_to(folder):
                return PurePosixPath(target) / source.relative_to(folder)
        raise ValueError(
            f"src/{source} has no place in the distribution {self.name}: move it below one of "
            + ", ".join(f"src/{folder}" for folder in self.folders)
        )


LIGHTNING = Distribution("lightning", {"lightning": "lightning"}, ("lightning",))
PYTORCH_LIGHTNING = Distribution(
    "pytorch-lightning",
    {old.replace(".", "/"): new.replace(".", "/") for old, new in RENAMES.items()},
    tuple(sorted(RENAMES.values())),
)
# Upstream's own switch between its distributions, so that a build script for Lightning works here as well.
PACKAGE_NAMES = {"lightning": LIGHTNING, "pytorch": PYTORCH_LIGHTNING}


def selected_distribution() -> Distribution:
    """Return the distribution to build.

    That is the one named by ``PACKAGE_NAME``; without it, an unpacked sdist builds the distribution that it was made
    for, and a checkout builds ``lightning``.

    Raises:
        ValueError: If ``PACKAGE_NAME`` names no distribution of ours.

    """
    package_name = os.environ.get("PACKAGE_NAME")
    if package_name:
        if package_name not in PACKAGE_NAMES:
            raise ValueError(
                f"PACKAGE_NAME={package_name!r} names no distribution of this project: leave it unset or use"
                " 'lightning' to build lightning, or use 'pytorch' to build pytorch-lightning"
            )
        return PACKAGE_NAMES[package_name]
    sdist_metadata = ROOT / "PKG-INFO"
    if sdist_metadata.exists():
        name = HeaderParser().parsestr(sdist_metadata.read_text(encoding="utf-8"))["Name"]
        return next(distribution for distribution in PACKAGE_NAMES.values() if distribution.name == name)
    return LIGHTNING
