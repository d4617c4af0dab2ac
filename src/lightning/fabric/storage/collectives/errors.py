"""What the ranks of a job tell each other of a failure, so that none waits for one that has given up."""

import logging
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch

from lightning.fabric.storage.collectives.channel import RankGone, training_channel
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport.errors import context_kept
from lightning.fabric.storage.transport.sink import GivenUp
from lightning.fabric.utilities.distributed import _distributed_is_initialized

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: How many ranks that have failed alike are named in an error.
_NAMED = 4
#: What may differ between ranks of which the rest of the message is the same.
_OWN_WORD = re.compile(r"\S*\d\S*")
#: How often, in seconds, a rank looks whether another one has failed.
_LOOK_S = 0.5


def is_rank_zero() -> bool:
    """Whether this is the first rank, or the only one."""
    return not _distributed_is_initialized() or torch.distributed.get_rank() == 0


@contextmanager
def unseen_explained(place: Place) -> Iterator[None]:
    """For a body that reads a local file, which rank zero may see, or have saved, on another node."""
    try:
        yield
    except FileNotFoundError as error:
        if is_rank_zero() or not place.is_local:
            raise
        raise FileNotFoundError(
            f"{error}. This is rank {torch.distributed.get_rank()}: does its node share the folder with that of rank"
            " zero? If not, use a file system that all nodes share, or a URL"
        ) from error


def together(doing: str) -> AbstractContextManager[None]:
    """For a body in which the ranks of training work for long, each by itself; see :meth:`.Channel.together`.

    It is called in the thread that trains.
    """
    return training_channel().together(doing)


def together_in(strategy: Any, doing: str) -> AbstractContextManager[None]:
    """As :func:`together`, unless the ranks that there are do not belong to one job of ``strategy``."""
    ranks = torch.distributed.get_world_size() if _distributed_is_initialized() else 1
    return together(doing) if ranks == getattr(strategy, "world_size", 1) else nullcontext()


def saving_together(strategy: Any, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """As :func:`together_in`, for a body that saves a checkpoint."""
    return together_in(strategy, f"saving {redact(os.fspath(path))}")


def from_rank_zero(look: Callable[[], _T], doing: str) -> _T:
    """What a function returns on rank zero, for every rank; a collective call. If it fails there, every rank fails.

    Raises:
        OSError: On the other ranks, if the function failed; of the same type where it is a built-in one.
    """
    channel = training_channel()
    found = None
    with channel.talking():
        with channel.working(doing):
            if channel.rank == 0:
                found = look()
        return cast(_T, channel.broadcast(found))


@contextmanager
def failures_of_ranks(verb: str, place: Place, worker: Any) -> Iterator[None]:
    """Turns what torch.distributed.checkpoint raises, a BaseException, into what user code expects.

    Args:
        verb: What is being done.
        place: Where.
        worker: The reader or writer of this rank, which remembers its own error.
    """
    from torch.distributed.checkpoint import CheckpointException

    with context_kept():
        try:
            yield
        except (CheckpointException, Exception) as error:
            own = worker.error or _own_interruption(error)
            if own is not None and not isinstance(own, Exception):
                raise own from None
            if isinstance(error, CheckpointException):
                failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
                # which has the tracebacks of all ranks: they tell of a fault, and nothing of a store that refuses
                explained = all(isinstance(failure, (OSError, PeerFailed)) for failure in failures.values())
                raise _failure(verb, place, failures) from (None if explained else error)
            if own is not None and not isinstance(own, PeerFailed):
                raise own from None
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"Could not {verb} the sharded checkpoint {place}: {error}") from error
            cause = error.__cause__ if isinstance(error, RankGone) else error
            raise RuntimeError(
                f"Could not {verb} the sharded checkpoint {place}: another rank is gone, or cannot be"
                f" reached ({type(cause).__name__}: {cause})"
            ) from error


def _own_interruption(error: BaseException) -> BaseException | None:
    """What interrupted this rank in torch's own part of the work."""
    rank = torch.distributed.get_rank() if _distributed_is_initialized() else 0
    own = getattr(error, "failures", {}).get(rank, (None,))[0]
    return None if isinstance(own, Exception) else own


def _failure(verb: str, place: Place, failures: dict[int, BaseException]) -> Exception:
    reasons = {rank: reason for rank, reason in failures.items() if not isinstance(reason, PeerFailed)} or failures
    alike: dict[str, tuple[str, list[int]]] = {}
    for rank, reason in reasons.items():
        text = f"{type(reason).__name__}: {redact(str(reason), place.raw)}"
        # each rank has a file, a request and a time of its own, and one of a thousand is enough to know why
        alike.setdefault(_OWN_WORD.sub("", text), (text, []))[1].append(rank)
    text = "; ".join(f"{_named(those)}: {reason.rstrip('.')}" for reason, those in alike.values())
    kinds = {_kind(reason) for reason in reasons.values()}
    other = OSError if any(issubclass(kind, OSError) for kind in kinds) else RuntimeError
    kind = kinds.pop() if len(kinds) == 1 else other
    return kind(f"Could not {verb} the sharded checkpoint {place}: {text}.")


def _named(ranks: list[int]) -> str:
    if len(ranks) <= _NAMED:
        return f"rank {' and '.join(map(str, ranks))}"
    return f"rank {', '.join(map(str, ranks[:_NAMED]))} and {len(ranks) - _NAMED} more"


def _kind(error: BaseException) -> type[Exception]:
    """The type of an error, if it is a built-in one of the operating system; any other may take other arguments."""
    if isinstance(error, OSError):
        return type(error) if type(error).__module__ == "builtins" else OSError
    return RuntimeError


class Peers:
    """Lets the ranks of a save know when one has failed, before they meet, which may be minutes later."""

    def __init__(self, save: str) -> None:
        self._key = f"lightning/save/{save}/failed"
        self._looked = time.monotonic()
        self._has_failed = False
        distributed = _distributed_is_initialized()
        self._store = torch.distributed.distributed_c10d._get_default_store() if distributed else None

    def tell_of_failure(self) -> None:
        """To be called by the rank that has failed."""
        self._has_failed = True
        if self._store is not None:
            try:
                self._store.set(self._key, "")
            except RuntimeError as error:  # and with that rank's death the others fail as well
                log.info(f"The rank that keeps the store of the process group is gone ({error})")

    def has_one_failed(self) -> bool:
        """Whether a rank has told of a failure."""
        if not self._has_failed and self._store is not None:
            try:
                self._has_failed = self._store.check([self._key])
            except RuntimeError as error:  # the rank that keeps the store has died
                raise PeerFailed(f"the rank that keeps the store of the process group is gone ({error})") from error
        return self._has_failed

    def look(self) -> None:
        """Raises :class:`PeerFailed` if another rank has told of a failure."""
        if time.monotonic() >= self._looked + _LOOK_S:
            self._looked = time.monotonic()
            if self.has_one_failed():
                raise PeerFailed("another rank has failed")


class PeerFailed(GivenUp):
    """Another rank has failed, which is the one that says why."""


def portable(error: BaseException) -> BaseException:
    """What says the same and can be sent to another rank, which would wait for ever for an error that cannot.

    Of a built-in type, what it holds may be of any: the key of a ``KeyError``, or the errors in a group.
    """
    if isinstance(error, PeerFailed):
        return error
    if type(error).__module__ == "builtins":
        try:
            pickle.loads(pickle.dumps(error))
        except Exception as reason:
            log.debug(f"An error cannot be sent to other ranks as it is ({type(reason).__name__}: {reason})")
        else:
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
