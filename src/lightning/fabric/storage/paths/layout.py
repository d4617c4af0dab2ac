"""Names inside the folder of a sharded checkpoint."""

import re
from collections.abc import Iterable

#: The file of a sharded checkpoint that lists the others.
METADATA = ".metadata"
#: The file that stock Lightning saves beside the shards.
STOCK_META = "meta.pt"
#: The files that make a folder a complete sharded checkpoint.
MARKS = (METADATA, STOCK_META)
#: Names in the folder of a sharded checkpoint, those that an interrupted save leaves there included.
SHARD_FOLDER_PART = re.compile(r"\.metadata(\.tmp)?|meta\.pt|.+\.distcp|\.[0-9a-f]{16}\.tmp")


def is_shard_folder(names: Iterable[str]) -> bool:
    """Returns whether a folder with these names is a sharded checkpoint, or what a save or a removal left of one."""
    names = set(names)
    return not names.isdisjoint(MARKS) or (
        all(map(SHARD_FOLDER_PART.fullmatch, names)) and any(name.endswith(".distcp") for name in names)
    )
