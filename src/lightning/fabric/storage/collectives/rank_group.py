"""Where the ranks of a sharded save meet: rank zero hears from each rank, and each from rank zero."""

import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.distributed.checkpoint import CheckpointException

from lightning.fabric.storage.collectives.channel import Channel, training_channel
from lightning.fabric.storage.collectives.errors import portable

_T = TypeVar("_T")
_R = TypeVar("_R")


class RankGroup:
    """The ranks of a job, or this process alone.

    Args:
        channel: Of all ranks. None for that of the thread that trains. Another thread needs another one, for what two
            threads ask of one could come in another order on another rank.
    """

    def __init__(self, channel: Channel | None = None) -> None:
        self._channel = channel or training_channel()
        self.rank = self._channel.rank
        self.world_size = self._channel.world_size
        #: Why this rank has failed: what :meth:`gather_scatter` raises is what all ranks raise.
        self.error: BaseException | None = None

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank zero."""
        return self.rank == 0

    def gather_scatter(self, what: str, mine: Callable[[], _T], decide: Callable[[list[_T]], list[_R]]) -> _R:
        """Has each rank say something, and rank zero answer each; a collective call.

        Args:
            what: What is being done, for the error.
            mine: Returns what this rank says, which can be pickled.
            decide: Called on rank zero with what all ranks say, in their order. Returns the answers.

        Raises:
            CheckpointException: One of the functions failed on a rank. Every rank raises it, with all reasons.
        """
        channel = self._channel
        with channel.talking():
            with channel.working(what):
                said = self._attempt(mine)
            all_said = channel.gather(said)
            with channel.working(what):
                answers = self._decide(all_said, decide) if self.is_coordinator else []
            answer = channel.scatter(answers)
        if isinstance(answer, _Failures):
            raise CheckpointException(
                what, {rank: (failure.error, failure.stack) for rank, failure in answer.of_ranks.items()}
            )
        return cast(_R, answer)

    def _decide(self, all_said: list[Any], decide: Callable[[list[_T]], list[_R]]) -> list[Any]:
        failures = {rank: one for rank, one in enumerate(all_said) if isinstance(one, _Failure)}
        if not failures:
            decided = self._attempt(lambda: decide(cast(list[_T], all_said)))
            if not isinstance(decided, _Failure):
                return decided
            failures = {0: decided}
        return [_Failures(failures)] * self.world_size

    def _attempt(self, function: Callable[[], _T]) -> "_T | _Failure":
        try:
            return function()
        except BaseException as error:
            self.error = error
            return _Failure(portable(error), traceback.extract_tb(error.__traceback__))


class _Failure:
    def __init__(self, error: BaseException, stack: traceback.StackSummary) -> None:
        self.error = error
        self.stack = stack


class _Failures:
    def __init__(self, of_ranks: dict[int, _Failure]) -> None:
        self.of_ranks = of_ranks
