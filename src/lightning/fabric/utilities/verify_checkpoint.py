"""The command that verifies a checkpoint: ``python -m lightning.fabric.utilities.verify_checkpoint``."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.fabric.storage.location import display_about, locate

if TYPE_CHECKING:
    import click

_WHAT = (
    "Checks, without loading it, that a checkpoint is complete and undamaged: a folder of shards, or a file of"
    " torch.save. Reads all of it. The exit code is 0 if all is well, 1 if not, and 2 if there is nothing to check, or"
    " it cannot be read."
)
_PATH = "A local path or a URL of any protocol that fsspec knows"


def run(path: str) -> int:
    """Prints a line for each problem of a checkpoint, and one that sums up. Returns the exit code."""
    # not at the top, which every fabric command imports: there are builds of torch without torch.distributed
    from lightning.fabric.storage.verify import verify

    try:
        result = verify(locate(path))
    except KeyboardInterrupt:
        print("Interrupted: the checkpoint is not verified", file=sys.stderr)
        return 130
    except Exception as error:  # clients of stores raise what they like
        kind = "" if isinstance(error, OSError) and str(error) else f"{type(error).__name__}: "
        print(f"{kind}{display_about(str(error), path)}", file=sys.stderr)
        return 2
    for problem in result.problems:
        print(problem)
    print(result)
    return 1 if result.problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = ArgumentParser(prog="python -m lightning.fabric.utilities.verify_checkpoint", description=_WHAT)
    parser.add_argument("checkpoint", help=_PATH)
    return run(parser.parse_args(arguments).checkpoint)


def click_command() -> "click.Command":
    """The same as a part of the ``fabric`` command; only where click is installed."""
    import click

    @click.command("verify", help=f"{_WHAT}\n\nCHECKPOINT: {_PATH}.")
    @click.argument("checkpoint")
    def command(checkpoint: str) -> None:
        sys.exit(run(checkpoint))

    return command


if __name__ == "__main__":
    sys.exit(main())
