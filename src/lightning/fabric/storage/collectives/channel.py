"""Waits of ranks for each other's work on storage, which may take longer than a collective call may.

A rank that has done its part does not wait in a collective call, whose time is limited. A thread of each rank exchanges
their states about twice a second, until all have done their part. So nobody's time runs out while a slow store takes
bytes; a rank that was killed shows in the next round; and one that makes no progress for :data:`PATIENCE` is an error
on all ranks.
"""

import atexit
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

#: The longest wait for a rank that makes no progress, or does not come to where the others are: the time that Lightning
#: lets a collective call take, or the strategy's if that is longer.
PATIENCE = timedelta(minutes=30)
#: Seconds between two exchanges of states.
_ROUND_S = 0.5
#: Seconds for which the end of the interpreter waits for the last exchange.
_EXIT_S = 2

#: The states of a rank.
_AT_WORK, _DONE, _FAILED, _STUCK, _LEFT = range(5)


class RankGone(RuntimeError):
    """Another rank has died, or cannot be reached. The cause is the error of the collective call that showed it."""


class Channel:
    """A process group of all ranks for one thread's collective calls about storage; nothing if there is but one rank.

    To make one is a collective call. The group is one of gloo whatever training uses: it notices at once that a process
    has died, and NCCL does not.

    Args:
        in_background: The thread is one that the thread that trains may wait for.
    """

    def __init__(self, in_background: bool = False) -> None:
        self.in_background = in_background
        self.rank, self.world_size = rank_and_world_size()
        self.group: ProcessGroup | None = None
        self.patience = PATIENCE
        if self.world_size > 1:
            store = torch.distributed.distributed_c10d._get_default_store()
            self.patience = max(PATIENCE, getattr(store, "timeout", PATIENCE))  # which is the strategy's
            self.group = torch.distributed.new_group(backend="gloo", timeout=self.patience)
            atexit.register(self._finish)
        self._rounds: _Rounds | None = None
        self._before: Future[None] | None = None
        #: True if all ranks have come to the end of the last rounds, and had not failed.
        self._is_sound = True
        self._interruption: BaseException | None = None

    @contextmanager
    def talking(self) -> Iterator[None]:
        """Opens the channel to the body, which uses the group, or :meth:`working`; a collective call.

        An interruption of a wait in it is raised at its end: the others would wait for a rank that left earlier.
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
        """Ends on all ranks at the same time, within :meth:`talking`; in the body, each rank works by itself.

        The body may contain other collective calls, in this group or another.

        Args:
            doing: The action, for errors.

        Raises:
            OSError: The body failed on another rank; of the same type where it is a built-in one.
            TimeoutError: A rank has made no progress for too long.
            RuntimeError: A rank is gone.
        """
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
        """Returns the values of all ranks, in their order, on rank zero; nothing on the others."""
        if self.group is None:
            return [value]
        gathered: list[Any] = [None] * self.world_size if self.rank == 0 else []
        torch.distributed.gather_object(value, gathered or None, dst=0, group=self.group)
        return gathered

    def scatter(self, values: list[_T]) -> _T:
        """Returns this rank's of the values of rank zero, one for each rank; those of other ranks are ignored."""
        if self.group is None:
            return values[0]
        received: list[Any] = [None]
        torch.distributed.scatter_object_list(received, values or None, src=0, group=self.group)
        return cast(_T, received[0])

    def broadcast(self, value: _T) -> _T:
        """Returns the value of rank zero."""
        values = [value]
        if self.group is not None:
            torch.distributed.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def _begin(self, doing: str) -> None:
        if self.group is None:
            return
        if self._before is not None:
            wait([self._before])  # of those that this rank has left
        self._rounds = _Rounds(self, doing)
        self._before = self._rounds.outcome

    def _end(self, failed: Exception | None) -> None:
        """Waits for the others, unless an inner :meth:`talking` has done so."""
        rounds, self._rounds = self._rounds, None
        if rounds is None:
            return
        self._is_sound = False
        self._interruption = rounds.finish(_FAILED if failed else _DONE) or self._interruption
        if (error := rounds.outcome.exception()) is not None:
            reason = f"{type(error).__name__}: {error}"
            raise RankGone(f"Another rank is gone, or cannot be reached ({rounds.doing}; {reason})") from error
        if stuck := rounds.ranks_in(_STUCK):
            seconds = self.patience.total_seconds()
            raise TimeoutError(f"rank {stuck} has made no progress for {seconds:.0f} seconds ({rounds.doing})")
        if left := rounds.ranks_in(_LEFT):
            raise OSError(f"rank {left} was interrupted ({rounds.doing})")
        if rounds.ranks_in(_FAILED):
            errors: list[OSError | None] = [None] * self.world_size
            text = f"rank {self.rank}: {type(failed).__name__}: {redact(str(failed))}"
            own = None if failed is None else os_error_kind(failed)(text)
            torch.distributed.all_gather_object(errors, own, group=self.group)
            raise next(error for error in errors if error is not None)
        self._is_sound = True

    def _finish(self) -> None:
        """Waits for rounds that this rank has left: a thread in a collective call aborts an interpreter that ends."""
        if self._before is not None:
            wait([self._before], _EXIT_S)

    def _leave(self) -> None:
        """Notifies the others, without waiting for them, that this rank does not come to where they are."""
        rounds, self._rounds = self._rounds, None
        self._is_sound = False
        if rounds is not None:
            rounds.report(_LEFT)


class _Rounds:
    """Exchanges of the states of all ranks, in a thread, until each has finished or one never will.

    Attributes:
        doing: The action, for errors.
        outcome: Done when they are over.
    """

    def __init__(self, channel: Channel, doing: str) -> None:
        self.doing = doing
        self._channel = channel
        self._own = _AT_WORK
        self._has_reported = Event()
        self._states = [_AT_WORK]
        self.outcome = in_thread("checkpoint-wait", self._run)

    def report(self, state: int) -> None:
        """Reports the state of this rank to the others, in the next round."""
        self._own = state
        self._has_reported.set()

    def finish(self, state: int) -> BaseException | None:
        """Reports ``state``, and waits until the rounds are over. Returns an interruption of that, such as Ctrl-C."""
        self.report(state)
        interruption = None
        while not self.outcome.done():
            try:
                wait([self.outcome])
            except BaseException as error:
                interruption = error
        return interruption

    def ranks_in(self, state: int) -> str:
        """Names the ranks in a state; empty if there is none."""
        return " and ".join(str(rank) for rank, reported in enumerate(self._states) if reported == state)

    def _run(self) -> None:
        steps, since = progress.count(), time.monotonic()
        while _AT_WORK in self._states and not {_STUCK, _LEFT} & {*self._states}:
            self._has_reported.wait(_ROUND_S)
            state = self._own
            if progress.count() != steps:
                steps, since = progress.count(), time.monotonic()
            elif state == _AT_WORK and time.monotonic() > since + self._channel.patience.total_seconds():
                state = _STUCK
            self._states = self._exchange(state)
            if state == _DONE and self._channel.in_background:
                progress.made()  # by others, which a thread that waits for this one does not see

    def _exchange(self, state: int) -> list[int]:
        """Returns the states of all ranks. To gather and to broadcast takes few messages one after the other."""
        channel = self._channel
        everyones = torch.zeros(channel.world_size, dtype=torch.int32, device="cpu")
        mine = torch.full((1,), state, dtype=torch.int32, device="cpu")
        parts = [everyones[at : at + 1] for at in range(channel.world_size)] if channel.rank == 0 else None
        torch.distributed.gather(mine, parts, dst=0, group=channel.group)
        torch.distributed.broadcast(everyones, src=0, group=channel.group)
        return cast(list[int], everyones.tolist())


def rank_and_world_size() -> tuple[int, int]:
    """Returns the rank of this process, and the number of ranks."""
    if not _distributed_is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def os_error_kind(error: BaseException) -> type[OSError]:
    """Returns the type of an error, if it is a built-in ``OSError``; any other may not be picklable."""
    return type(error) if isinstance(error, OSError) and type(error).__module__ == "builtins" else OSError


#: The process group of training, and the channel of the thread that trains in it.
_training: tuple[Any, Channel] | None = None


def training_channel() -> Channel:
    """Returns the channel of the thread that trains. The first call with a process group is a collective one."""
    global _training
    world = torch.distributed.group.WORLD if _distributed_is_initialized() else None
    if _training is None or _training[0] is not world:
        _training = (world, Channel())
    return _training[1]
