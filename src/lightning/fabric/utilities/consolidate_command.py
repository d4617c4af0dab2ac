"""The common part of the commands that consolidate a checkpoint."""

import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.strategies.checkpoint_place import find_checkpoint
from lightning.fabric.storage.transport.errors import questions_named

if TYPE_CHECKING:
    import click

log = logging.getLogger(__name__)

_WHAT = (
    "Makes one file of a sharded checkpoint of FSDP or ModelParallel, which the Trainer or Fabric has saved. A file of"
    " the Trainer's is what it saves itself without shards: `Trainer.fit(ckpt_path=...)` and `load_from_checkpoint`"
    " take it. A file of Fabric's has the names that were given to `fabric.save`, for `fabric.load`. The file is there"
    " when it is complete, and not before, and the checkpoint is not loaded into memory as a whole."
)
_FOLDER = "The checkpoint's folder: a local path or a URL of any protocol that fsspec knows"
_OUTPUT = "Where to write the file, likewise; by default beside the folder, with `.consolidated` at the end of its name"


def command(group: "click.Group") -> Callable[[Callable[..., Any]], "click.Command"]:
    """Returns a decorator that adds a function to a group as the command ``consolidate``.

    Its arguments are URLs or paths, also where Lightning declares them as local files that are there.
    """
    import click  # an extra of Lightning's

    def add(function: Callable[..., Any]) -> "click.Command":
        added = group.command("consolidate", help=f"{_WHAT}\n\nCHECKPOINT_FOLDER: {_FOLDER}.")(function)
        for parameter in added.params:
            parameter.type = click.STRING
            if isinstance(parameter, click.Option):
                parameter.help = _OUTPUT
        return added

    return add


def parsed_arguments() -> Namespace:
    """Returns the arguments of the commands that are modules."""
    parser = ArgumentParser(description=_WHAT)
    parser.add_argument("checkpoint_folder", help=_FOLDER)
    parser.add_argument("--output_file", help=_OUTPUT)
    return parser.parse_args()


def checked_arguments(folder: str, output: str | None, code_if_missing: int = 1) -> Namespace:
    """Returns the place of the checkpoint and that of the file; else the process ends with the exit code 1.

    Args:
        folder: A local path or a URL of any fsspec protocol.
        output: A path or URL for the file, or None for the name of the folder with ``.consolidated``.
        code_if_missing: The exit code if there is no such folder.
    """
    code = 1
    try:
        place = locate(folder)
        target = place.beside(".consolidated") if output is None else locate(output)
        problem = _problem_of(place, target)
    except _NoFolder as error:
        problem, code = str(error), code_if_missing
    except Exception as error:  # clients of stores raise what they like
        problem = _text_of(error, folder, output or folder)
    if problem:
        log.error(problem)
        sys.exit(code)
    return Namespace(checkpoint_folder=place, output_file=target)


class _NoFolder(Exception):
    """There is nothing to consolidate."""


def _problem_of(place: Place, target: Place) -> str:
    with suppress(PermissionError), questions_named(place):  # there are roles that may read, but not list
        place.kind()  # a store that is out of reach says so at once
    found = find_checkpoint(place)
    if found.is_full:
        return f"The checkpoint to consolidate has to be a folder of shards, and there is a file: {found}"
    if found.metadata is None and place.kind() == "nothing":
        raise _NoFolder(f"The checkpoint folder does not exist: {found}. {place.advice_if_missing()}")
    if found.metadata is None:
        return f"There is no sharded checkpoint that Lightning has saved in the folder {found}"
    if target.kind() != "nothing":
        return (
            f"There is something at the path for the consolidated checkpoint already: {target}. Remove it, or"
            " choose another path with --output_file"
        )
    return ""


def run(config: Namespace) -> None:
    """Consolidates the checkpoint of :func:`checked_arguments`; on failure the process ends with the exit code 1."""
    # not at the top, which every fabric command imports: there are builds of torch without torch.distributed
    from lightning.fabric.storage.tools.consolidate import consolidate

    try:
        consolidate(config.checkpoint_folder, config.output_file)
    except (OSError, RuntimeError) as error:
        log.error(_text_of(error, config.checkpoint_folder.raw, config.output_file.raw))
        sys.exit(1)


def _text_of(error: Exception, folder: str, output: str) -> str:
    text = redact(redact(str(error), folder), output)
    return text if isinstance(error, (OSError, RuntimeError)) and text else f"{type(error).__name__}: {text}"
