"""The command that verifies a checkpoint: ``python -m lightning.fabric.utilities.verify_checkpoint``."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact

if TYPE_CHECKING:
    import click

_WHAT = (
    "Checks, without loading it, that a checkpoint is complete and undamaged: a folder of shards, or a file of"
    " torch.save. Reads all of it. Of another folder, checks each checkpoint in it and its folders: folders of shards,"
    " and what is called *.ckpt. The exit code is 0 if all is well, 1 if one is damaged or incomplete, and else 2 if"
    " there is nothing to check, or one cannot be read."
)
_PATH = "A local path or a URL of any protocol that fsspec knows"


def run(path: str) -> int:
    """Prints a line for each problem of a checkpoint, and a summary; returns the exit code."""
    # not at the top, which every fabric command imports: there are builds of torch without torch.distributed
    from lightning.fabric.storage.tools.discover import checkpoints_below
    from lightning.fabric.storage.tools.verify import NoCheckpoint, verify

    try:
        place = locate(path)
        try:
            result = verify(place)
        except NoCheckpoint:
            found = checkpoints_below(place)
            if not found:
                raise
            return _run_each(found)
    except KeyboardInterrupt:
        print("Interrupted: the checkpoint is not verified", file=sys.stderr)
        return 130
    except Exception as error:  # clients of stores raise what they like
        print(_text_of(error, path), file=sys.stderr)
        return 2
    for problem in result.problems:
        print(problem)
    print(result)
    return 1 if result.problems else 0


def _run_each(found: Sequence[Place]) -> int:
    """Prints the problems and the summary of each of many checkpoints; returns the exit code."""
    from lightning.fabric.storage.tools.verify import NoCheckpoint, verify_one_of_many

    removed = wrong = unknown = 0
    for place in found:
        try:
            result = verify_one_of_many(place)
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not isinstance(error, NoCheckpoint):
                removed += 1
                print(f"{place}: removed meanwhile")
            else:
                unknown += 1
                print(f"{place}: not checked: {_text_of(error, place.raw)}")
            continue
        wrong += bool(result.problems)
        for problem in result.problems:
            print(problem)
        print(f"{place}: {result}")
    counts = [f"{wrong} with problems"] * bool(wrong) + [f"{unknown} not checked"] * bool(unknown)
    checked = len(found) - removed
    what = f"{checked} checkpoint{'s' * (checked != 1)}"
    print(f"{what}: {', '.join(counts)}" if counts else f"{what}, all complete")
    return 1 if wrong else 2 if unknown else 0


def _text_of(error: Exception, path: str) -> str:
    kind = "" if isinstance(error, OSError) and str(error) else f"{type(error).__name__}: "
    return f"{kind}{redact(str(error), path)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = ArgumentParser(prog="python -m lightning.fabric.utilities.verify_checkpoint", description=_WHAT)
    parser.add_argument("checkpoint", help=_PATH)
    return run(parser.parse_args(arguments).checkpoint)


def without_click() -> NoReturn:
    """Ends the command ``fabric`` where click is missing, on which it is built."""
    sys.exit("The command `fabric` needs click: pip install click")


def click_command() -> "click.Command":
    """Returns the command as a part of ``fabric``; only where click is installed."""
    import click

    @click.command("verify", help=f"{_WHAT}\n\nCHECKPOINT: {_PATH}.")
    @click.argument("checkpoint")
    def command(checkpoint: str) -> None:
        sys.exit(run(checkpoint))

    return command


if __name__ == "__main__":
    sys.exit(main())
