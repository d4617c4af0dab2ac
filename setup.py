"""The build backend's entry (PEP 517 and PEP 660): ``pip install .`` comes in here.

Two distributions come from this tree: ``lightning``, and ``pytorch-lightning``, whose folder sets
``PACKAGE_NAME=pytorch``. Each is the released wheel, pinned in requirements/upstream.txt, with patches/ applied and
src/lightning laid over it. ``LIGHTNING_UPSTREAM_DIR`` names a folder with the released wheels, for builds without a
network.

"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from build_backend.assemble import assemble, stamp_notices
from build_backend.distribution import selected_distribution
from build_backend.editable import make_editable_tree, pth_file
from build_backend.sdist import sdist_stem, write_sdist
from build_backend.upstream import needs_download, read_pristine_wheel
from build_backend.wheel import dist_info, tree_files, wheel_name, write_dist_info, write_wheel

Settings = dict[str, Any] | None


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Ask for pip if the released wheel must be downloaded: the build environments of uv have none by themselves."""
    return ["pip>=22"] if needs_download(selected_distribution()) else []


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    """Write the dist-info folder without building the wheel."""
    distribution = selected_distribution()
    info = dist_info(distribution, read_pristine_wheel(distribution))
    return write_dist_info(Path(metadata_directory), distribution, info)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    """Build the wheel and return its file name."""
    distribution = selected_distribution()
    pristine = read_pristine_wheel(distribution)
    name = wheel_name(distribution)
    with tempfile.TemporaryDirectory() as temporary:
        assembly = assemble(distribution, pristine, Path(temporary))
        stamp_notices(assembly, distribution)
        packages = tree_files(assembly.tree)
    write_wheel(Path(wheel_directory) / name, distribution, packages, dist_info(distribution, pristine))
    return name


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Assemble a tree with our modules linked, build a wheel that points to it, and return the wheel's file name."""
    distribution = selected_distribution()
    pristine = read_pristine_wheel(distribution)
    name = wheel_name(distribution)
    tree = make_editable_tree(distribution, pristine)
    packages = pth_file(distribution, tree)
    write_wheel(Path(wheel_directory) / name, distribution, packages, dist_info(distribution, pristine))
    return name


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Build the sdist and return its file name."""
    distribution = selected_distribution()
    metadata = dist_info(distribution, read_pristine_wheel(distribution))["METADATA"]
    name = f"{sdist_stem(distribution)}.tar.gz"
    write_sdist(Path(sdist_directory) / name, distribution, metadata)
    return name


if __name__ == "__main__":
    sys.exit("setup.py is a build backend, not a script. Use: pip install . ./pytorch-lightning")
