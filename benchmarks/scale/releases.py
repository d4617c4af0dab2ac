"""How the releases save, as far as their code says it; what has to be measured is not in here.

The numbers of requests are those that ``benchmarks/object_server.py`` has in its log of a sharded save.
"""

from dataclasses import replace

from fsspec import AbstractFileSystem
from model import MIB, Release

from lightning.fabric.storage.transport.multipart import Parts

STOCK_NAME = "stock 2.6.6"

#: Stock strategies with torch's FsspecWriter: see ``benchmarks/stock_shards.py``. A part is sent when 50 MiB have been
#: collected, and the next one is collected when it has been answered. Before the upload the bucket and the metadata are
#: looked for; the metadata is written under another name, copied, looked for and removed; meta.pt is written.
STOCK = Release(copies=True, overlaps=False, part=50 * MIB, in_flight=1, opening=3, committing=9)
#: Each rank writes its own file; rank zero also what is neither model nor optimizer, twice, and looks what there was.
OURS = Release(closing=1, committing=4)
#: The same in the background, after a copy into memory that is pinned.
ASYNCHRONOUS = replace(OURS, asynchronous=True, copies=True, pinned=True)


def in_parts_for(release: Release, world: int) -> Release:
    """A release of ours in a job of so many ranks."""
    parts = Parts.of(AbstractFileSystem(), lean=True, files=world)  # a client without options
    return replace(release, part=parts.smallest, in_flight=parts.in_flight(parts.smallest))


def with_constants(release: Release, constants: dict[str, float]) -> Release:
    """A release on a machine whose constants ``validate.py`` has found."""
    return replace(
        release,
        fixed=constants["fixed_s"],
        background=constants.get("background_s", 0.0),
        prepare=constants["prepare_s_per_gib"] / 2**30,
    )
