"""Gathers from, and scatters to, the ranks of a sharded save, whose errors reach every rank."""

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from torch.distributed.checkpoint import CheckpointException

from lightning.fabric.storage.collectives.channel import Channel, training_channel
from lightning.fabric.storage.collectives.errors import portable

_T = TypeVar("_T")
_R = TypeVar("_R")


class RankGroup:
    """The ranks of a job, or this process alone.

    Args:
        channel: The channel of all ranks. None for that of the thread that trains. Another thread needs another one:
            the calls of two threads on one could come in another order on another rank.
    """

    def __init__(self, channel: Channel | None = None) -> None:
        self._channel = channel or training_channel()
        self.rank = self._channel.rank
        self.world_size = self._channel.world_size
        #: The error of this rank itself: :meth:`gather_scatter` raises the same on all ranks.
        self.error: BaseException | None = None

    @property
    def is_coordinator(self) -> bool:
        """Returns whether this is rank zero."""
        return self.rank == 0

    def gather_scatter(self, what: str, mine: Callable[[], _T], decide: Callable[[list[_T]], list[_R]]) -> _R:
        """Gathers a value of each rank, and scatters what rank zero makes of them; a collective call.

        Args:
            what: The action, for the error.
            mine: Returns this rank's value, which can be pickled.
            decide: Called on rank zero with the values of all ranks, in their order. Returns the answers.

        Returns:
            This rank's answer.

        Raises:
            CheckpointException: One of the functions failed on a rank. Every rank raises it, with all reasons.
        """
        channel = self._channel
        with channel.talking():
            with channel.working(what):
                value = self._attempt(mine)
            values = channel.gather(value)
            with channel.working(what):
                answers = self._decide(what, values, decide) if self.is_coordinator else []
            answer = channel.scatter(answers)
        if isinstance(answer, CheckpointException):
            raise answer
        return cast(_R, answer)

    def _decide(self, what: str, values: list[Any], decide: Callable[[list[_T]], list[_R]]) -> list[Any]:
        failures = {rank: value for rank, value in enumerate(values) if isinstance(value, _Failure)}
        if not failures:
            answers = self._attempt(lambda: decide(values))
            if not isinstance(answers, _Failure):
                return answers
            failures = {0: answers}
        return [CheckpointException(what, dict(failures))] * self.world_size

    def _attempt(self, function: Callable[[], _T]) -> "_T | _Failure":
        try:
            return function()
        except BaseException as error:
            self.error = error
            # as plain tuples: in some releases of Python the frames hold code, which cannot be pickled
            frames = [
                (frame.filename, frame.lineno or 0, frame.name, frame.line)
                for frame in traceback.extract_tb(error.__traceback__)
            ]
            return _Failure(portable(error), traceback.StackSummary.from_list(frames))


class _Failure(NamedTuple):
    """A pair as of :class:`CheckpointException`."""

    error: BaseException
    stack: traceback.StackSummary
