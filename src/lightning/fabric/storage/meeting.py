"""Where the ranks of a sharded save meet: rank zero hears from each rank, and each from rank zero."""

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.distributed.checkpoint import CheckpointException

from lightning.fabric.storage.ranks import portable
from lightning.fabric.utilities.distributed import _distributed_is_initialized

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")
_R = TypeVar("_R")


class Meeting:
    """The ranks of a process group, or this process alone if there is none.

    Args:
        group: All ranks of the job. None for the group that training uses. A thread of its own needs a group of its
            own, for what two threads ask of one group could come in another order on another rank.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        self._group = group
        self._distributed = _distributed_is_initialized()
        self.rank = torch.distributed.get_rank(group) if self._distributed else 0
        self.world_size = torch.distributed.get_world_size(group) if self._distributed else 1
        #: Why this rank has failed: what :meth:`hold` raises is what all ranks raise.
        self.error: BaseException | None = None

    @property
    def is_coordinator(self) -> bool:
        """Whether this is rank zero."""
        return self.rank == 0

    def hold(self, what: str, mine: Callable[[], _T], decide: Callable[[list[_T]], list[_R]]) -> _R:
        """Has each rank say something, and rank zero answer each; a collective call.

        Args:
            what: What is being done, for the error.
            mine: Returns what this rank says, which can be pickled.
            decide: Called on rank zero with what all ranks say, in their order. Returns the answers.

        Raises:
            CheckpointException: One of the functions failed on a rank. Every rank raises it, with all reasons.
        """
        said = self._attempt(mine)
        all_said = self._gather(said)
        answers: list[Any] = []
        if self.is_coordinator:
            failures = {rank: one for rank, one in enumerate(all_said) if isinstance(one, _Failure)}
            if not failures:
                decided = self._attempt(lambda: decide(cast(list[_T], all_said)))
                if isinstance(decided, _Failure):
                    failures = {0: decided}
                else:
                    answers = decided
            if failures:
                answers = [_Failures(failures)] * self.world_size
        answer = self._scatter(answers)
        if isinstance(answer, _Failures):
            raise CheckpointException(
                what, {rank: (failure.error, failure.stack) for rank, failure in answer.of_ranks.items()}
            )
        return cast(_R, answer)

    def _attempt(self, function: Callable[[], _T]) -> "_T | _Failure":
        try:
            return function()
        except BaseException as error:
            self.error = error
            return _Failure(portable(error), traceback.extract_tb(error.__traceback__))

    def _gather(self, said: Any) -> list[Any]:
        if not self._distributed:
            return [said]
        all_said = [None] * self.world_size if self.is_coordinator else None
        torch.distributed.gather_object(said, all_said, dst=0, group=self._group)
        return all_said or []

    def _scatter(self, answers: list[Any]) -> Any:
        if not self._distributed:
            return answers[0]
        answer: list[Any] = [None]
        torch.distributed.scatter_object_list(answer, answers or None, src=0, group=self._group)
        return answer[0]


class _Failure:
    def __init__(self, error: BaseException, stack: traceback.StackSummary) -> None:
        self.error = error
        self.stack = stack


class _Failures:
    def __init__(self, of_ranks: dict[int, _Failure]) -> None:
        self.of_ranks = of_ranks
