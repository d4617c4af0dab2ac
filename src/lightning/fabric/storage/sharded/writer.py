"""Writes the shards of a checkpoint of torch.distributed.checkpoint, straight to a store or a local folder."""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, SavePlan

from lightning.fabric.storage.archives.tensor_bytes import is_plain, memory_of
from lightning.fabric.storage.collectives.errors import PeerFailed, Peers
from lightning.fabric.storage.collectives.rank_group import RankGroup
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.paths.remove import remove_file, remove_if_empty
from lightning.fabric.storage.paths.replace import remove_leftovers, replace_by_folder
from lightning.fabric.storage.save_report import count_bytes, stage
from lightning.fabric.storage.sharded import commit, metadata_file
from lightning.fabric.storage.sharded.checksums import FileRecords, Record
from lightning.fabric.storage.sharded.global_plan import GlobalPlan
from lightning.fabric.storage.sharded.record_writer import RecordWriter
from lightning.fabric.storage.sharded.save_planner import PlanCache, Shard, size_of
from lightning.fabric.storage.transport.open import open_writer
from lightning.fabric.storage.transport.sink import Sink

log = logging.getLogger(__name__)

#: The most bytes of an archive beside those of its tensor, unless that has very many dimensions.
_ARCHIVE_EXTRA = 1024


@dataclasses.dataclass
class _Assignment:
    """Rank zero's decisions about a save.

    Attributes:
        save: The part of the files' names that is new for each save.
        suffix: An addition to the name of the checkpoint's folder, until the folder can take the place of a file.
        makes_folder: Whether the save makes that folder, on a local disk.
    """

    save: str
    suffix: str
    makes_folder: bool


class Report(NamedTuple):
    """A rank's report of its files.

    Attributes:
        files: The records of each file, by the file's name.
        records: The number of the record, in the rank's shard, of each item of its plan. None if each item has a record
            of its own, in their order: rank zero of many ranks has much to do already.
    """

    files: dict[str, FileRecords]
    records: NDArray[np.int32] | None = None


class ShardWriter:
    """Writes one shard a rank, straight from the tensors' memory to the store.

    The files of every save have names of their own, so that overwriting a checkpoint in place leaves the old ones alone
    until ``.metadata`` makes the new ones the checkpoint. Then rank zero removes the old ones.

    Args:
        place: The checkpoint's folder.
        group: The group of all ranks.
    """

    def __init__(self, place: Place, group: RankGroup) -> None:
        self._place = place
        self._group = group
        self._assignment: _Assignment
        #: Files that are complete.
        self._written: list[Place] = []
        self._peers: Peers | None = None
        #: The reports of all ranks, on rank zero.
        self._reports: list[Report] = []

    def save(self, look: Callable[[], Shard], plans: PlanCache) -> None:
        """Saves this rank's shard; a collective call.

        Args:
            look: Returns the shard. If it fails, the save fails on all ranks.
            plans: The plans of the last save.

        Raises:
            CheckpointException: A rank has failed. If that was before the commit, the files of this rank are removed.
        """
        group = self._group
        shards: list[Shard] = []
        is_committing = False

        def plan_own() -> SavePlan:
            shards.append(look())
            return shards[0].plan

        try:
            with stage("plan"):
                plan, global_plan = plans.agree(plan_own, group)
                self._assignment = group.gather_scatter("save", _nothing, lambda ranks: [self._assign()] * len(ranks))
            with stage("upload"):
                group.gather_scatter("save", lambda: self._write(shards[0], plan), self._take_reports)
            with stage("commit"):
                is_committing = True
                group.gather_scatter("save", _nothing, lambda _: self._commit(global_plan, shards[0].meta))
        except BaseException as error:
            # what the group raises, all ranks raise; else one must have reported that it failed
            if not is_committing and (isinstance(error, CheckpointException) or self._has_one_failed()):
                self._discard()
            raise

    def _assign(self) -> _Assignment:
        save = metadata_file.new_save()
        in_the_way = not self._place.shares_names() and self._place.is_file()
        is_free = self._place.is_local and self._place.kind() == "nothing"
        return _Assignment(save, f".{save}.new" if in_the_way else "", in_the_way or is_free)

    def _write(self, shard: Shard, plan: SavePlan) -> Report:
        save, folder = self._assignment.save, self._folder
        self._peers = Peers(save)
        files: dict[str, FileRecords] = {}
        numbers = None
        try:
            if plan.items:
                name = metadata_file.shard_name(save, self._group.rank)
                with self._open(folder / name) as file:
                    records, numbers = _write_items(shard, plan, file)
                files[name] = FileRecords.of(records)
            if shard.meta is not None:
                name = metadata_file.meta_name(save)
                with self._open(folder / name) as file:
                    files[name] = FileRecords.of([RecordWriter(file).write_object(shard.meta)])
        except BaseException:
            self._peers.tell_of_failure()
            raise
        return Report(files, numbers)

    def _take_reports(self, reports: list[Report]) -> list[None]:
        self._reports = reports
        others = {name: file for report in reports[1:] for name, file in report.files.items()}
        if others:
            commit.await_files(self._folder, others)
        count_bytes(sum(file.size for file in others.values()))
        return [None] * len(reports)

    def _commit(self, global_plan: GlobalPlan | None, meta: Any) -> list[None]:
        assert global_plan is not None, "rank zero has it"
        save, folder = self._assignment.save, self._folder
        names = [metadata_file.shard_name(save, rank) for rank in range(len(self._reports))]
        written = [
            report.files[name].places[... if report.records is None else report.records]
            for name, report in zip(names, self._reports, strict=True)
            if name in report.files
        ]
        metadata = global_plan.metadata(names, written)
        files = {name: file for report in self._reports for name, file in report.files.items()}
        metadata_file.describe(metadata, metadata_file.meta_name(save) if meta is not None else None, files)
        metadata_file.write_metadata(folder, metadata)
        if folder is not self._place:
            replace_by_folder(folder, self._place)
        if meta is not None:  # last, for the checkpoint is in its place without it
            commit.write_stock_meta(self._place, meta)
        commit.clean_up(self._place, metadata)
        remove_leftovers(self._place)
        return [None] * len(names)

    def _has_one_failed(self) -> bool:
        try:
            return self._peers is not None and self._peers.has_one_failed()
        except PeerFailed as error:
            log.warning(f"Whether {self._place} was saved is not known here: {error}")
            return False

    def _discard(self) -> None:
        """Removes the files of this rank, and the folder with the last of all files."""
        if self._peers is None:  # no file has been begun
            return
        try:
            for place in self._written:
                remove_file(place)
            if self._assignment.makes_folder:
                remove_if_empty(self._folder)
        except Exception as error:
            reason = f"{type(error).__name__}: {redact(str(error))}"
            log.warning(f"Could not remove what a save that failed has left in {self._place} ({reason})")

    @contextmanager
    def _open(self, place: Place) -> Iterator[Sink]:
        assert self._peers is not None
        with open_writer(
            place,
            lean=True,
            files=self._group.world_size,
            idle=self._peers.look,
            disposable=True,  # only the metadata of a complete checkpoint names it
        ) as file:
            yield file
        self._written.append(place)

    @property
    def _folder(self) -> Place:
        suffix = self._assignment.suffix
        return self._place.beside(suffix) if suffix else self._place


def _nothing() -> None:
    """Is given to a collective call for which the ranks have nothing to report."""


def _write_items(shard: Shard, plan: SavePlan, file: Sink) -> tuple[list[Record], NDArray[np.int32] | None]:
    """Writes the items of a plan; tied tensors, which have several names, once.

    Returns:
        The records, and the number of the record of each item, as in :class:`Report`.
    """
    # all of them first: tensors that are alive at the same time have different memory
    tensors = [shard.resolve(item) if item.tensor_data is not None else None for item in plan.items]
    known: dict[Hashable, int] = {}
    numbers: list[int] = []
    firsts: list[int] = []
    for at, tensor in enumerate(tensors):
        key = memory_of(tensor) if isinstance(tensor, Tensor) and is_plain(tensor) else at
        numbers.append(known.setdefault(key, len(firsts)))
        if numbers[-1] == len(firsts):
            firsts.append(at)
    file.expect(sum(size_of(plan.items[at]) + _ARCHIVE_EXTRA for at in firsts))
    writer = RecordWriter(file)
    records = []
    for at in firsts:
        tensor = tensors[at]
        records.append(writer.write(shard.resolve(plan.items[at]) if tensor is None else tensor))
    return records, np.array(numbers, np.int32) if len(firsts) < len(numbers) else None
