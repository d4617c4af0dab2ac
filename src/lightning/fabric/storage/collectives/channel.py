"""Where the ranks of a job wait for each other's work on storage, which may take longer than a collective call may.

A rank that has done its part does not wait in a collective call, whose time is limited. All ranks meet about twice a
second, by a thread of each, until every one has said that it has done its part. So nobody's time runs out while a slow
store takes bytes; a rank that was killed is missed at the next group; and of one that makes no progress for
:data:`PATIENCE` all ranks are told in the same call.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport import progress
from lightning.fabric.storage.transport.threads import in_thread
from lightning.fabric.utilities.distributed import _distributed_is_initialized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")

#: How long ranks wait for one that makes no progress, or does not come to where the others are. It is as long as
#: Lightning lets a collective call take; if the strategy lets it take longer, they wait as long as that.
PATIENCE = timedelta(minutes=30)
#: How often, in seconds, a rank that is at work meets the others.
_ROUND_S = 0.5

#: What a rank reports of itself in a gather.
_AT_WORK, _DONE, _FAILED, _STUCK, _LEFT = range(5)


class RankGone(RuntimeError):
    """Another rank has died, or cannot be reached. The cause says how that showed."""


class Channel:
    """A process group of all ranks, for what they say of storage in one thread; nothing if there is but one rank.

    To make one is a collective call. The group is one of gloo whatever training uses: it notices at once that a process
    has died, and NCCL does not.

    Args:
        in_background: Whether the thread is one that the thread that trains may wait for.
    """

    def __init__(self, in_background: bool = False) -> None:
        self.in_background = in_background
        distributed = _distributed_is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.world_size = torch.distributed.get_world_size() if distributed else 1
        self.group: ProcessGroup | None = None
        self.patience = PATIENCE
        if self.world_size > 1:
            store = torch.distributed.distributed_c10d._get_default_store()
            self.patience = max(PATIENCE, getattr(store, "timeout", PATIENCE))  # which is the strategy's
            self.group = torch.distributed.new_group(backend="gloo", timeout=self.patience)
        self._rounds: _Rounds | None = None
        self._before: Future[None] | None = None
        #: Whether all ranks have come to the end of the last rounds, and had not failed.
        self._is_sound = True
        self._interruption: BaseException | None = None

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """For a body in which each rank works by itself: all leave it together; a collective call.

        Within it there may be others, and what is collective in another group.

        Args:
            doing: What is done, for errors.

        Raises:
            OSError: The body failed on another rank; of the same type where it is a built-in one.
            TimeoutError: A rank has made no progress for too long.
            RuntimeError: A rank is gone.
        """
        with self.talking(), self.working(doing):
            yield

    @contextmanager
    def talking(self) -> Iterator[None]:
        """For a body that uses the group, or :meth:`working`; a collective call.

        What interrupts a wait in it is raised at its end: a rank that left earlier would be waited for by the others.
        """
        outer = self._rounds
        if outer is not None:
            self._end(None)
        self._is_sound = True
        try:
            yield
        finally:
            if outer is not None and self._is_sound:
                self._begin(outer.doing)
            interruption, self._interruption = self._interruption, None
            if interruption is not None:
                raise interruption

    @contextmanager
    def working(self, doing: str) -> Iterator[None]:
        """As :meth:`together`, within :meth:`talking`."""
        self._begin(doing)
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        except BaseException:
            self._leave()
            raise
        try:
            self._end(failed)
        except Exception:
            if failed is None:
                raise
        if failed is not None:
            raise failed

    def gather(self, value: _T) -> list[_T]:
        """On rank zero what each rank calls this with, in their order; nothing on the others."""
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self.world_size if self.rank == 0 else []
        torch.distributed.gather_object(value, gathered or None, dst=0, group=self.group)
        return gathered

    def scatter(self, values: list[_T]) -> _T:
        """This rank's of the values that rank zero calls this with, one for each rank; what others give is ignored."""
        if self.group is None:
            return values[0]
        received: list[Any] = [None]
        torch.distributed.scatter_object_list(received, values or None, src=0, group=self.group)
        return cast(_T, received[0])

    def broadcast(self, value: _T) -> _T:
        """What rank zero calls this with."""
        if self.group is None:
            return value
        told = [value]
        torch.distributed.broadcast_object_list(told, src=0, group=self.group)
        return told[0]

    def _begin(self, doing: str) -> None:
        if self.group is None:
            return
        if self._before is not None:
            wait([self._before])  # of those that this rank has left
        self._rounds = _Rounds(self, doing)
        self._before = self._rounds.outcome

    def _end(self, failed: Exception | None) -> None:
        """Waits for the others, unless one around which this is has done so."""
        rounds, self._rounds = self._rounds, None
        if rounds is None:
            return
        self._is_sound = False
        self._interruption = rounds.finish(_FAILED if failed else _DONE) or self._interruption
        if (error := rounds.outcome.exception()) is not None:
            reason = f"{type(error).__name__}: {error}"
            raise RankGone(f"Another rank is gone, or cannot be reached ({rounds.doing}; {reason})") from error
        if stuck := rounds.which(_STUCK):
            seconds = self.patience.total_seconds()
            raise TimeoutError(f"rank {stuck} has made no progress for {seconds:.0f} seconds ({rounds.doing})")
        if left := rounds.which(_LEFT):
            raise OSError(f"rank {left} was interrupted ({rounds.doing})")
        if rounds.which(_FAILED):
            told: list[OSError | None] = [None] * self.world_size
            torch.distributed.all_gather_object(told, _told(self.rank, failed), group=self.group)
            raise next(error for error in told if error is not None)
        self._is_sound = True

    def _leave(self) -> None:
        """Tells the others, without waiting for them, that this rank does not come to where they are."""
        rounds, self._rounds = self._rounds, None
        self._is_sound = False
        if rounds is not None:
            rounds.tell(_LEFT)


class _Rounds:
    """Gathers of all ranks, in a thread, until each has finished or one says that it will not.

    Attributes:
        doing: What is done.
        outcome: Done when they are over.
    """

    def __init__(self, channel: Channel, doing: str) -> None:
        self.doing = doing
        self._channel = channel
        self._own = _AT_WORK
        self._is_told = Event()
        self._states = [_AT_WORK]
        self.outcome = in_thread("checkpoint-wait", self._run)

    def tell(self, state: int) -> None:
        """Has the other ranks know of this one."""
        self._own = state
        self._is_told.set()

    def finish(self, state: int) -> BaseException | None:
        """Tells ``state``, and waits until these rounds are over. Returns what has interrupted that, such as Ctrl-C."""
        self.tell(state)
        interruption = None
        while not self.outcome.done():
            try:
                wait([self.outcome])
            except BaseException as error:
                interruption = error
        return interruption

    def which(self, state: int) -> str:
        """The ranks that have told it."""
        return " and ".join(str(rank) for rank, told in enumerate(self._states) if told == state)

    def _run(self) -> None:
        steps, since = progress.count(), time.monotonic()
        while _AT_WORK in self._states and not {_STUCK, _LEFT} & {*self._states}:
            self._is_told.wait(_ROUND_S)
            state = self._own
            if progress.count() != steps:
                steps, since = progress.count(), time.monotonic()
            elif state == _AT_WORK and time.monotonic() > since + self._channel.patience.total_seconds():
                state = _STUCK
            self._states = self._meet(state)
            if state == _DONE and self._channel.in_background:
                progress.made()  # by others: who waits for this thread is not told of theirs

    def _meet(self, state: int) -> list[int]:
        """What all ranks tell. To gather and to broadcast takes few messages one after the other."""
        channel = self._channel
        everyones = torch.zeros(channel.world_size, dtype=torch.int32, device="cpu")
        mine = torch.full((1,), state, dtype=torch.int32, device="cpu")
        parts = [everyones[at : at + 1] for at in range(channel.world_size)] if channel.rank == 0 else None
        torch.distributed.gather(mine, parts, dst=0, group=channel.group)
        torch.distributed.broadcast(everyones, src=0, group=channel.group)
        return cast(list[int], everyones.tolist())


def _told(rank: int, failed: Exception | None) -> OSError | None:
    """What other ranks are told of a failure: a built-in type, for any other may not be picklable."""
    if failed is None:
        return None
    kind = type(failed) if isinstance(failed, OSError) and type(failed).__module__ == "builtins" else OSError
    return kind(f"rank {rank}: {type(failed).__name__}: {redact(str(failed))}")


#: Of the thread that trains, with the process group of training that it belongs to, of which a process has one as well.
_training: tuple[Any, Channel] | None = None


def training_channel() -> Channel:
    """The channel of the thread that trains. The first call with a process group is a collective one."""
    global _training
    world = torch.distributed.group.WORLD if _distributed_is_initialized() else None
    if _training is None or _training[0] is not world:
        _training = (world, Channel())
    return _training[1]
