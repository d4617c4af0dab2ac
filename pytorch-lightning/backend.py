"""Builds ``pytorch-lightning`` from a folder of its own, so that one command installs both distributions."""

import os
import sys
from pathlib import Path

os.environ["PACKAGE_NAME"] = "pytorch"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from setup import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
