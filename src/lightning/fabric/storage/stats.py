"""What moving one file took."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning.fabric.storage.location import Location, display

log = logging.getLogger(__name__)


@dataclass
class Transfer:
    """A file on its way.

    Args:
        verb: What is done to it, in the past tense.
        location: Where it is, or will be.
        size: Bytes, when that is known.
        seconds: From the first byte that was pickled or asked for to the last that was committed or unpickled.
    """

    verb: str
    location: Location
    size: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        size, rate = self.size / 2**20, self.size / 2**20 / max(self.seconds, 1e-9)
        return f"{self.verb} {display(self.location)}: {size:.1f} MiB in {self.seconds:.2f} s, {rate:.0f} MiB/s"


@contextmanager
def timed(verb: str, location: Location) -> Iterator[Transfer]:
    """Logs what a body that moves a file took, if it succeeds; the body sets the size."""
    transfer = Transfer(verb, location)
    started = time.monotonic()
    yield transfer
    transfer.seconds = time.monotonic() - started
    log.debug(str(transfer))
