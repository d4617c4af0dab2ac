"""torch.distributed.checkpoint's fsspec writer and reader, on our transport."""

import dataclasses
import logging
import os
import pickle
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from torch.distributed.checkpoint import SavePlan, filesystem
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning.fabric.storage.location import display, join, list_files
from lightning.fabric.storage.namespace import make_folder, remove_names
from lightning.fabric.storage.transport import open_reader, open_writer

log = logging.getLogger(__name__)

_METADATA = ".metadata"
_SHARD_SUFFIX = ".distcp"


class _Transport(FileSystem):
    """What DCP opens its files with: a write is complete or did not happen, a read sees what is there now."""

    @override
    @contextmanager
    def create_stream(  # type: ignore[override]  # torch calls it an IOBase, and needs no more of it than this
        self, path: str | os.PathLike[str], mode: str
    ) -> Iterator[IO[bytes]]:
        opened = open_reader(os.fspath(path)) if mode == "rb" else open_writer(os.fspath(path), streaming=True)
        with opened as stream:
            yield stream

    @override
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return str(join(os.fspath(path), suffix))


class ShardWriter(FsspecWriter):
    """Writes one shard a rank, straight to the store.

    The shards of every save have names of their own, so that overwriting a checkpoint in place leaves the old shards
    alone until ``.metadata``, written last and in one piece, makes the new ones the checkpoint. Then the coordinator
    removes the old ones, those of a larger world or a save that died included.

    Args:
        url: The checkpoint's folder.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, sync_files=False)  # there is no local file to sync, and DCP would sync the whole machine
        self.fs = _Transport()  # type: ignore[assignment]  # torch declares its local one
        self.path = self.fs.init_path(url)

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        make_folder(str(self.path))
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        save = secrets.token_hex(6)  # drawn by the coordinator, and sent to the ranks with their plans
        return [
            dataclasses.replace(
                plan, storage_data=dataclasses.replace(plan.storage_data, prefix=f"__{save}{plan.storage_data.prefix}")
            )
            for plan in plans
        ]

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        metadata.storage_meta = self.storage_meta()
        if hasattr(filesystem, "CURRENT_DCP_VERSION"):
            metadata.version = filesystem.CURRENT_DCP_VERSION
        url = str(self.path)
        with open_writer(join(url, _METADATA)) as file:
            pickle.dump(metadata, file)
        try:
            current = {info.relative_path for info in metadata.storage_data.values()}
            old = [name for name in list_files(url) if name.endswith(_SHARD_SUFFIX) and name not in current]
            remove_names(url, old)
        except Exception as error:  # the save itself is complete
            reason = f"{type(error).__name__}: {display(str(error))}"
            log.warning(f"Could not remove the shards of earlier saves from {display(url)} ({reason})")


class ShardReader(FsspecReader):
    """Reads shards that stock PyTorch, stock Lightning or :class:`ShardWriter` wrote.

    Args:
        url: The checkpoint's folder.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.fs = _Transport()  # type: ignore[assignment]  # torch declares its local one
        self.path = self.fs.init_path(url)
