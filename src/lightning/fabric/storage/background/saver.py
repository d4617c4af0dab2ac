"""Saves checkpoints in the background: the training thread only copies the state to host memory."""

import itertools
import math
import os
from collections.abc import Callable, Iterable
from functools import cache, partial
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
from lightning.fabric.storage.collectives.errors import PeerFailed, failures_of_ranks, from_rank_zero
from lightning.fabric.storage.device_copies import has_streams
from lightning.fabric.storage.own_plugins import saves_shards
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.save_report import reporting, stage
from lightning.fabric.utilities.distributed import _distributed_is_initialized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import WriteItem

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
        #: Whether several ranks have the same parts of distributed tensors, once that is known.
        self._has_replicas: bool | None = None

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
                    shard = cache(lambda: Shard.of(state, meta, group))
                    items = self._items_to_copy(shard, plans)
                    copy, arrived = stage_shard(shard(), items, self._staging)
            except BaseException as error:
                # raised in the next collective call of the save, on all ranks
                self._queue.submit(save, partial(_save_shard, place, group, partial(_fail, error), plans))
                if not isinstance(error, Exception):
                    raise
                return
        self._queue.submit(save, partial(_save_shard, place, group, arrived, plans), copy.release)

    def _items_to_copy(self, shard: "Callable[[], Shard]", plans: "PlanCache") -> "list[WriteItem]":
        """Returns the items that this rank copies of its shard; a collective call.

        Those are all, unless several ranks have the same, as with hybrid sharding. Then the ranks agree at once which
        of them writes each, and no other one copies it.
        """
        from torch.distributed.checkpoint import CheckpointException

        from lightning.fabric.storage.collectives.rank_group import RankGroup

        group = RankGroup()  # that of this thread
        ranks = group.world_size
        try:
            if self._has_replicas is None:
                self._has_replicas = group.gather_scatter(
                    "plan", lambda: shard().values(), lambda values: [_are_more_than_whole(values)] * ranks
                )
            return plans.agree(lambda: shard().plan, group)[0].items if self._has_replicas else shard().plan.items
        except CheckpointException as error:  # on all ranks, which report it in the background
            raise group.error or PeerFailed("another rank could not plan") from error

    def remove(self, place: Place, work: Callable[[], None], is_partial: bool = False) -> None:
        """Removes something after the last save, unless that fails.

        Args:
            place: The place of what is removed.
            work: Removes it.
            is_partial: Whether what was saved there stays.
        """
        self._queue.submit_removal(place, work, is_partial)

    def stepped(self, optimizer: Optimizer, strategy: Any) -> None:
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
        self.warm([*parameters, *states_of(self._stepped)], strategy)
        self._stepped.clear()

    def copy_when_saved(self, place: Place, work: Callable[[], None]) -> None:
        """Copies the last save to ``place``, unless it fails."""
        self._queue.submit_copy(place, work)

    def warm(self, tensors: Iterable[Tensor], strategy: Any) -> None:
        """Allocates memory in a thread, so that the first save need not.

        Args:
            tensors: Most of the tensors of a state, or this rank's parts of them. Only their sizes matter.
            strategy: The strategy that saves it.
        """
        self.is_warm = True
        self._staging.warm(*_expected(list(tensors), strategy))


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
        saver.stepped(optimizer, strategy)


def _are_more_than_whole(values: list[tuple[int, int]]) -> bool:
    """Returns whether ranks have more values of distributed tensors than these have, by what each of them counted."""
    return 2 * sum(own for own, _ in values) > 3 * max(whole for _, whole in values)


def _expected(tensors: list[Tensor], strategy: Any) -> tuple[int, torch.device | None]:
    """Returns about how many bytes of a state this rank stages, and an accelerator that some of them are on."""
    is_sharded = saves_shards(strategy)
    sharding = getattr(getattr(strategy, "sharding_strategy", None), "name", None)
    # with FSDP's first version each rank has a part of the flat parameters
    ranks = strategy.world_size if not is_sharded and sharding in ("FULL_SHARD", "SHARD_GRAD_OP") else 1
    plain = [tensor for tensor in tensors if is_plain(tensor)]
    distributed = [tensor for tensor in tensors if hasattr(tensor, "to_local")]
    size = sum(_share_of(tensor) if is_sharded else tensor.nbytes for tensor in distributed)
    size += ranks * sum(tensor.nbytes for tensor in plain)
    # each is aligned, and there is a little more in a state
    size += _EXTRA + ALIGNMENT * len(tensors)
    if not is_sharded and (distributed or ranks > 1):  # torch gathers it in host memory
        return size, None
    return size, next((tensor.device for tensor in (*plain, *distributed) if has_streams(tensor.device)), None)


def _share_of(tensor: Any) -> int:
    """Returns the bytes that this rank copies of a distributed tensor, of which others may have the same part."""
    placements = enumerate(getattr(tensor, "placements", ()))
    copies = math.prod(tensor.device_mesh.size(dim) for dim, placement in placements if placement.is_replicate())
    return int(tensor.to_local().nbytes // copies)


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
