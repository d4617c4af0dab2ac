"""What the commands that consolidate a checkpoint do, beside what they are called and which arguments they have."""

import logging
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from lightning.fabric.storage.checkpoints import find_checkpoint
from lightning.fabric.storage.consolidate import consolidate
from lightning.fabric.storage.location import Location, beside, display, display_about, kind, locate

log = logging.getLogger(__name__)


def checked_arguments(folder: str, output: str | None, code_if_missing: int = 1) -> Namespace:
    """What the commands for consolidation are given, if it makes sense; else the process ends with the exit code 1.

    Args:
        folder: A local path or a URL of any fsspec protocol.
        output: The same for the file, or None for the name of the folder with ``.consolidated``.
        code_if_missing: The exit code if there is no such folder.
    """
    code = 1
    try:
        location = locate(folder)
        target = beside(location, ".consolidated") if output is None else locate(output)
        problem = _problem_of(location, target)
    except _NoFolder as error:
        problem, code = str(error), code_if_missing
    except Exception as error:  # clients of stores raise what they like
        problem = _told(error, folder, output or folder)
    if problem:
        log.error(problem)
        sys.exit(code)
    return Namespace(checkpoint_folder=location, output_file=target)


class _NoFolder(Exception):
    """There is nothing to consolidate."""


def _problem_of(location: Location, target: Location) -> str:
    found = find_checkpoint(location)
    if found.is_full:
        return f"The checkpoint to consolidate has to be a folder of shards, and there is a file: {found}"
    if found.metadata is None and kind(location) == "nothing":
        raise _NoFolder(f"The checkpoint folder does not exist: {found}")
    if found.metadata is None:
        return f"There is no sharded checkpoint that Lightning has saved in the folder {found}"
    if kind(target) != "nothing":
        return (
            f"There is something at the path for the consolidated checkpoint already: {display(target)}. Remove it, or"
            " choose another path with --output_file"
        )
    return ""


def run(config: Namespace, convert: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> None:
    """Does what a command was asked for; if that fails, the process ends with the exit code 1.

    Args:
        config: From :func:`checked_arguments`.
        convert: As for :func:`consolidate`.
    """
    try:
        consolidate(config.checkpoint_folder, config.output_file, convert)
    except (OSError, RuntimeError) as error:
        log.error(_told(error, config.checkpoint_folder, config.output_file))
        sys.exit(1)


def _told(error: Exception, folder: Location, output: Location) -> str:
    text = display_about(display_about(str(error), folder), output)
    return text if isinstance(error, (OSError, RuntimeError)) and text else f"{type(error).__name__}: {text}"
