"""Names inside the folder of a sharded checkpoint."""

import re
from collections.abc import Iterable

#: What of a sharded checkpoint says which files it is made of.
METADATA = ".metadata"
#: What stock Lightning has beside the shards.
STOCK_META = "meta.pt"
#: What makes a folder a complete sharded checkpoint.
MARKS = (METADATA, STOCK_META)
#: All that the folder of a sharded checkpoint holds, and that an interrupted save may leave there.
SHARD_FOLDER_PART = re.compile(r"\.metadata(\.tmp)?|meta\.pt|.+\.distcp|\.[0-9a-f]{16}\.tmp")


def is_shard_folder(names: Iterable[str]) -> bool:
    """Whether what is called so in a folder makes it a sharded checkpoint, or what a save or a removal left of one."""
    names = set(names)
    return not names.isdisjoint(MARKS) or (
        all(map(SHARD_FOLDER_PART.fullmatch, names)) and any(name.endswith(".distcp") for name in names)
    )
