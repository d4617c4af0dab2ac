"""torch.distributed.checkpoint's writer and reader of shards, on our transport."""

import dataclasses
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint import filesystem as stock
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning.fabric.storage import commit
from lightning.fabric.storage.checksums import Record
from lightning.fabric.storage.location import Location, beside, display, is_file, join, shares_names
from lightning.fabric.storage.namespace import remove_file
from lightning.fabric.storage.ranks import Peers, portable
from lightning.fabric.storage.reads import read_plan
from lightning.fabric.storage.records import RecordWriter
from lightning.fabric.storage.replacement import remove_leftovers, replace_by_folder
from lightning.fabric.storage.transport import open_writer
from lightning.fabric.storage.transport.sink import Sink

log = logging.getLogger(__name__)

#: What an archive has beside its tensor, at most, unless the tensor has very many dimensions.
_ARCHIVE_EXTRA = 1024


@dataclasses.dataclass
class _Assignment:
    """What the coordinator tells each rank with its plan."""

    save: str
    rank: int
    #: What is added to the name of the checkpoint's folder until the folder can take the place of a file.
    suffix: str


class ShardWriter(StorageWriter):
    """Writes one shard a rank, straight from the tensors' memory to the store.

    The files of every save have names of their own, so that overwriting a checkpoint in place leaves the old ones alone
    until ``.metadata`` makes the new ones the checkpoint. Then the coordinator removes the old ones.

    Args:
        location: The checkpoint's folder.
        meta: What belongs to the checkpoint beside model and optimizer; that of the coordinator is saved. None if
            there is nothing.
    """

    def __init__(self, location: Location, meta: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._location = location
        self._meta = meta
        self._coordinates = False
        self._assignment: _Assignment
        #: Files that are complete.
        self._written: list[Location] = []
        self._peers: Peers | None = None
        #: Why this rank failed: what torch raises in the end has been pickled.
        self.error: BaseException | None = None

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        assert checkpoint_id is None, "a writer belongs to one checkpoint"

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._coordinates = is_coordinator

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        save = commit.new_save()
        try:
            in_the_way = not shares_names(self._location) and is_file(self._location)
        except BaseException as error:
            self.error = error
            raise portable(error) from error
        suffix = f".{save}.new" if in_the_way else ""
        self._assignment = _Assignment(save, 0, suffix)
        return [
            dataclasses.replace(plan, storage_data=_Assignment(save, rank, suffix)) for rank, plan in enumerate(plans)
        ]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        assignment: _Assignment = plan.storage_data
        folder = self._folder(assignment)
        self._peers = Peers(assignment.save)
        results: list[WriteResult] = []
        try:
            if plan.items:
                name = f"__{assignment.save}_{assignment.rank}_0{commit.SHARD_SUFFIX}"
                with self._open(join(folder, name)) as file:
                    results += _write_items(plan, planner, file, name)
            if self._coordinates and self._meta is not None:
                name = commit.meta_name(assignment.save)
                with self._open(join(folder, name)) as file:
                    record = RecordWriter(file).write_object(self._meta)
                results.append(WriteResult(_NO_ITEM, record.length, (name, record)))
        except BaseException as error:
            self.error = error
            self._peers.tell_of_failure()
            raise portable(error) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        try:
            self._commit(metadata, [result for of_rank in results for result in of_rank])
        except BaseException as error:
            self.error = error
            raise portable(error) from error

    def _commit(self, metadata: Metadata, results: list[WriteResult]) -> None:
        save, folder = self._assignment.save, self._folder(self._assignment)
        records: dict[str, list[Record]] = {}
        metadata.storage_data = {}
        for result in results:
            name, record = result.storage_data
            records.setdefault(name, []).append(record)
            if name != commit.meta_name(save):
                metadata.storage_data[result.index] = stock._StorageInfo(name, record.offset, record.length)
        if hasattr(stock, "CURRENT_DCP_VERSION"):
            metadata.version = stock.CURRENT_DCP_VERSION
        commit.describe(metadata, commit.meta_name(save) if self._meta is not None else None, records)
        commit.write_metadata(folder, metadata)
        if folder is not self._location:
            replace_by_folder(folder, self._location)
        if self._meta is not None:  # last, for the checkpoint is in its place without it
            commit.write_stock_meta(self._location, self._meta)
        commit.clean_up(self._location, metadata)
        remove_leftovers(self._location)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """For a body that saves: if it fails before the checkpoint was to be committed, what this rank wrote goes."""
        try:
            yield
        except BaseException:
            self._discard()
            raise

    def _discard(self) -> None:
        try:
            if self._peers is not None and self._peers.has_one_failed():
                for place in self._written:
                    remove_file(place)
        except Exception as error:
            reason = f"{type(error).__name__}: {display(str(error))}"
            log.warning(f"Could not remove what a save that failed has left in {display(self._location)} ({reason})")

    @contextmanager
    def _open(self, location: Location) -> Iterator[Sink]:
        assert self._peers is not None
        with open_writer(location, lean=True) as file:
            file.idle = self._peers.look
            file.disposable = True  # only the metadata of a complete checkpoint names it
            yield file
        self._written.append(location)

    def _folder(self, assignment: _Assignment) -> Location:
        return beside(self._location, assignment.suffix) if assignment.suffix else self._location


def _write_items(plan: SavePlan, planner: SavePlanner, file: Sink, name: str) -> list[WriteResult]:
    file.expect(sum(_size(item) for item in plan.items))
    writer = RecordWriter(file)
    records = ((item.index, writer.write(planner.resolve_data(item))) for item in plan.items)
    return [WriteResult(index, record.length, (name, record)) for index, record in records]


_NO_ITEM: Any = None


def _size(item: WriteItem) -> int:
    """About how many bytes the item's record has."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize + _ARCHIVE_EXTRA


class ShardReader(StorageReader):
    """Reads shards that stock PyTorch, stock Lightning or :class:`ShardWriter` wrote.

    Args:
        location: The checkpoint's folder.
        metadata: From :func:`~lightning.fabric.storage.commit.read_metadata`.
    """

    def __init__(self, location: Location, metadata: Metadata) -> None:
        super().__init__()
        self._location = location
        self._metadata = metadata
        #: Why this rank failed, as in :class:`ShardWriter`.
        self.error: BaseException | None = None

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        assert checkpoint_id is None, "a reader belongs to one checkpoint"

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        try:
            read_plan(self._location, self._metadata, plan, planner)
        except BaseException as error:
            self.error = error
            raise portable(error) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done
