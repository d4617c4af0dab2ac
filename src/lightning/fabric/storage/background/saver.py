"""Saves checkpoints in the background: the training thread only copies the state to host memory."""

import itertools
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning.fabric.storage.archives.tensor_bytes import is_plain
from lightning.fabric.storage.background.host_memory import ALIGNMENT
from lightning.fabric.storage.background.queue import OnError, Queue
from lightning.fabric.storage.background.staging import Staging
from lightning.fabric.storage.background.submissions import Save, may_skip
from lightning.fabric.storage.collectives.channel import Channel
from lightning.fabric.storage.collectives.errors import failures_of_ranks, from_rank_zero
from lightning.fabric.storage.own_plugins import saves_shards
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.save_report import reporting, stage
from lightning.fabric.utilities.distributed import _distributed_is_initialized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lightning.fabric.storage.collectives.rank_group import RankGroup
    from lightning.fabric.storage.sharded.save_planner import PlanCache, Shard

WhenBusy = Literal["wait", "skip"]

#: Bytes of memory that are prepared beside those of model and optimizers.
_EXTRA = 2**20
#: Numbers of saves by all ranks, whichever saver they are of.
_numbers = itertools.count(1)


class BackgroundSaver:
    """The engine with which a plugin, or one that wraps it, saves.

    Args:
        max_in_flight: The number of saves that may be in flight at a time, each with a staged copy of the state.
        when_busy: Whether a save waits while as many are in flight, or is skipped.
        on_error: Whether an error is raised, see :class:`~lightning.fabric.storage.background.queue.Queue`.
    """

    def __init__(self, max_in_flight: int, when_busy: WhenBusy, on_error: OnError) -> None:
        #: The process that made it, in which alone it can be used.
        self.process = os.getpid()
        self._skips = when_busy == "skip"
        self._queue = Queue(max_in_flight, on_error)
        self._staging = Staging(max_in_flight)
        #: Whether memory has been prepared for a save, or a save has been begun.
        self.is_warm = False
        #: Optimizers that have taken a step before there was anything to save.
        self._stepped: list[Optimizer] = []
        #: The channel of the ranks in the background, and the process group of training that it belongs to.
        self._channel: Channel | None = None
        self._channel_of: ProcessGroup | None = None
        self._plans: PlanCache | None = None

    def set_up(self) -> None:
        """Makes the process group of the saves in the background; a collective call."""
        if not _distributed_is_initialized():
            return
        world = torch.distributed.group.WORLD
        if self._channel is None or self._channel_of is not world:
            self._channel = Channel(in_background=True)
            self._channel_of = world

    def save(self, obj: Any, place: Place, write: Callable[[Any], None]) -> None:
        """Saves one file.

        Args:
            obj: Anything that ``torch.save`` takes. It is copied before this returns.
            place: The place to save to.
            write: Saves the copy.
        """
        save = Save(place)
        if self._skips and may_skip() and not self._queue.has_room:
            self._queue.skip(save)
            return
        self.is_warm = True
        with reporting(save.report):
            with stage("wait"):
                self._queue.wait_for_room(place)
            with stage("stage"):
                staged = self._staging.stage_object(obj)

        def write_copy() -> None:
            with stage("upload"):  # whatever the plugin does; ours begins the stage of the commit itself
                staged.wait()
                write(staged.object())

        self._queue.submit(save, write_copy, staged.release)

    def save_sharded(self, state: dict[str, Any], meta: dict[str, Any] | None, place: Place) -> None:
        """Saves a sharded checkpoint; a collective call, here and in the background.

        Args:
            state: The model and optimizer state of this rank. It is copied before this returns.
            meta: The other objects of the checkpoint, which are copied as well. Those of rank zero are saved.
            place: The place to save to.
        """
        from lightning.fabric.storage.background.staged_shard import stage as stage_shard
        from lightning.fabric.storage.collectives.rank_group import RankGroup
        from lightning.fabric.storage.sharded.save_planner import PlanCache, Shard

        self.set_up()
        place = place.absolute()  # training may change the working folder
        save = Save(place, next(_numbers))
        doing = f"saving {place}"
        if self._skips and may_skip() and not from_rank_zero(lambda: self._queue.has_room, doing):
            self._queue.skip(save)
            return
        plans = self._plans = self._plans or PlanCache()
        group = RankGroup(self._channel)
        self.is_warm = True
        with reporting(save.report):
            with stage("wait"):
                self._queue.wait_for_room(place)
            try:
                with stage("stage"):
                    copy, arrived = stage_shard(Shard.of(state, meta, group), self._staging)
            except BaseException as error:
                # raised in the next collective call of the save, on all ranks
                self._queue.submit(save, partial(_save_shard, place, group, partial(_fail, error), plans))
                if not isinstance(error, Exception):
                    raise
                return
        self._queue.submit(save, partial(_save_shard, place, group, arrived, plans), copy.release)

    def remove(self, place: Place, work: Callable[[], None], is_partial: bool = False) -> None:
        """Removes something after the last save, unless that fails.

        Args:
            place: The place of what is removed.
            work: Removes it.
            is_partial: Whether what was saved there stays.
        """
        self._queue.submit_removal(place, work, is_partial)

    def stepped(self, optimizer: Optimizer) -> None:
        """Allocates memory for the parameters and the states of all optimizers when one takes its second step.

        Then the others have taken their first, in which their states are made.
        """
        if self.is_warm:
            return
        if all(optimizer is not other for other in self._stepped):
            self._stepped.append(optimizer)
            return
        groups = [group for of in self._stepped for group in of.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        self.warm([*parameters, *states_of(self._stepped)])
        self._stepped.clear()

    def copy_when_saved(self, place: Place, work: Callable[[], None]) -> None:
        """Copies the last save to ``place``, unless it fails."""
        self._queue.submit_copy(place, work)

    def warm(self, tensors: Iterable[Tensor]) -> None:
        """Allocates memory in a thread, so that the first save need not.

        Args:
            tensors: Most of the tensors of a state of this rank. Only their sizes matter.
        """
        self.is_warm = True
        parts = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
        local = [tensor for tensor in parts if is_plain(tensor)]
        # each is aligned, and there is a little more in a state
        size = _EXTRA + sum(tensor.nbytes + ALIGNMENT for tensor in local)
        self._staging.warm(size, pinned=any(tensor.is_cuda for tensor in local))


def states_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Returns the tensors that optimizers keep beside the parameters."""
    values = [value for optimizer in optimizers for of in optimizer.state.values() for value in of.values()]
    return [value for value in values if isinstance(value, Tensor)]


def saves_here(strategy: Any) -> bool:
    """Returns whether this rank takes part in the saves of a strategy."""
    return bool(strategy.is_global_zero or saves_shards(strategy))


def optimizer_stepped(strategy: Any, optimizer: Optimizer) -> None:
    """Prepares memory; Fabric calls this after each step of an optimizer that it has set up."""
    saver = saver_of(getattr(strategy, "checkpoint_io", None))
    if saver is not None and not saver.is_warm and saves_here(strategy):
        saver.stepped(optimizer)


def _save_shard(place: Place, group: "RankGroup", look: "Callable[[], Shard]", plans: "PlanCache") -> None:
    from lightning.fabric.storage.sharded.writer import ShardWriter

    with failures_of_ranks("save", place, group):
        ShardWriter(place, group).save(look, plans)


def _fail(error: BaseException) -> Any:
    raise error


def saver_of(checkpoint_io: Any) -> BackgroundSaver | None:
    """Returns the engine of a plugin, or of one that it wraps; None if it saves in the training thread."""
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO  # would be a circle at the top

    while isinstance(checkpoint_io, CheckpointIO):
        saver = getattr(checkpoint_io, "saver", None)
        if isinstance(saver, BackgroundSaver):
            return saver
        checkpoint_io = getattr(checkpoint_io, "checkpoint_io", None)
    return None
