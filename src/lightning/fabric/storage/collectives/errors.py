"""Failures that the ranks of a job share, so that none waits for one that has given up."""

import logging
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch

from lightning.fabric.storage.collectives.channel import RankGone, os_error_kind, rank_and_world_size, training_channel
from lightning.fabric.storage.paths.location import only_local
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport.errors import context_kept
from lightning.fabric.storage.transport.sink import GivenUp
from lightning.fabric.utilities.distributed import _distributed_is_initialized

log = logging.getLogger(__name__)

_T = TypeVar("_T")

#: The number of ranks with the same failure that are named in an error.
_NAMED = 4
#: Words that may differ between ranks of which the rest of the message is the same.
_OWN_WORD = re.compile(r"\S*\d\S*")
#: Strategies whose checkpoints are written by a library of their own.
_LOCAL_ONLY = ("DeepSpeedStrategy", "XLAFSDPStrategy")
#: Seconds between two looks for a failure of another rank, or whether it has come.
_LOOK_S = 0.5
#: Seconds for which a rank that has met an exception waits for the others, which may know nothing of it.
COMING_S = 60.0
#: The number of looks after which it logs that it waits.
_LATE = 6


def is_rank_zero() -> bool:
    """Returns whether this is the first rank, or the only one."""
    return rank_and_world_size()[0] == 0


@contextmanager
def unseen_explained(place: Place) -> Iterator[None]:
    """Explains that a local file, which the body reads, may be missing here because rank zero has another disk."""
    try:
        yield
    except FileNotFoundError as error:
        if is_rank_zero() or not place.is_local:
            raise
        raise FileNotFoundError(
            f"{error}. This is rank {rank_and_world_size()[0]}: does its node share the folder with that of rank"
            " zero? If not, use a file system that all nodes share, or a URL"
        ) from error


@contextmanager
def together(doing: str) -> Iterator[None]:
    """Ends on all ranks of training at the same time; in the body, each rank works by itself, perhaps for long.

    It is called in the thread that trains. See :meth:`~.channel.Channel.working`.
    """
    channel = training_channel()
    with channel.talking(), channel.working(doing):
        yield


def together_in(strategy: Any, doing: str) -> AbstractContextManager[None]:
    """Returns :func:`together`, unless the process group does not consist of the ranks of ``strategy``."""
    return together(doing) if rank_and_world_size()[1] == getattr(strategy, "world_size", 1) else nullcontext()


def come_together(strategy: Any) -> None:
    """Waits until all ranks have come to save after an exception, of which the others may know nothing.

    It is no collective call: a rank may wait for this one in another, as long as that may take.

    Raises:
        TimeoutError: A rank has not come, or this one came too late.
    """
    rank, world_size = rank_and_world_size()
    if world_size == 1 or world_size != getattr(strategy, "world_size", 1):
        return
    store = torch.distributed.distributed_c10d._get_default_store()
    came = f"lightning/came/{store.add(f'lightning/exceptions/{rank}', 1)}"
    store.set(f"{came}/{rank}", "")
    count = store.add(came, 1)
    for look in range(int(COMING_S / _LOOK_S)):
        if count >= world_size:
            return
        if count < 0:
            raise TimeoutError("Nothing is saved: other ranks have waited for this one, and have given up")
        if look == _LATE:
            log.warning(f"Waiting for up to {COMING_S:.0f} s until all ranks come to save, after an exception")
        time.sleep(_LOOK_S)
        count = store.add(came, 0)
    store.add(came, -2 * world_size)
    late = [str(one) for one in range(world_size) if not store.check([f"{came}/{one}"])]
    raise TimeoutError(
        f"Nothing is saved: rank {' and '.join(late[:_NAMED])} did not come within {COMING_S:.0f} seconds, and may wait"
        " for this one, or be at work. All ranks have to come to save"
    )


def saving_together(strategy: Any, path: str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Returns :func:`together_in` for a body that saves a checkpoint.

    Raises:
        ValueError: ``path`` is a URL, and the strategy can only write to a local folder.
    """
    for kind in type(strategy).__mro__:
        if kind.__name__ in _LOCAL_ONLY:
            only_local(path, kind.__name__)
    return together_in(strategy, f"saving {redact(os.fspath(path))}")


def from_rank_zero(look: Callable[[], _T], doing: str) -> _T:
    """Returns a function's result on rank zero to all ranks; a collective call. If it fails there, all ranks fail.

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


def of_rank_zero(value: _T) -> _T:
    """Returns rank zero's value to all ranks; a collective call."""
    channel = training_channel()
    with channel.talking():
        return channel.broadcast(value)


@contextmanager
def failures_of_ranks(verb: str, place: Place, worker: Any) -> Iterator[None]:
    """Turns the error of torch.distributed.checkpoint, a BaseException, into one that user code expects.

    Args:
        verb: The action, such as "save".
        place: The place of the checkpoint.
        worker: The reader, or the group, of this rank, which remembers its own error.
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
                # its tracebacks, of all ranks, explain a fault of the code, and no refusal of a store
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
    """Returns the interruption of this rank in torch's own part of the work."""
    own = getattr(error, "failures", {}).get(rank_and_world_size()[0], (None,))[0]
    return None if isinstance(own, Exception) else own


def _failure(verb: str, place: Place, failures: dict[int, BaseException]) -> Exception:
    reasons = {rank: reason for rank, reason in failures.items() if not isinstance(reason, PeerFailed)} or failures
    alike: dict[str, tuple[str, list[int]]] = {}
    for rank, reason in reasons.items():
        text = f"{type(reason).__name__}: {redact(str(reason), place.raw)}"
        # each rank has a file, a request and a time of its own, and one of a thousand is enough to know why
        alike.setdefault(_OWN_WORD.sub("", text), (text, []))[1].append(rank)
    text = "; ".join(f"{_named(those)}: {reason.rstrip('.')}" for reason, those in alike.values())
    kinds = {os_error_kind(reason) if isinstance(reason, OSError) else RuntimeError for reason in reasons.values()}
    kind = kinds.pop() if len(kinds) == 1 else OSError  # one of them is
    return kind(f"Could not {verb} the sharded checkpoint {place}: {text}.")


def _named(ranks: list[int]) -> str:
    if len(ranks) <= _NAMED:
        return f"rank {' and '.join(map(str, ranks))}"
    return f"rank {', '.join(map(str, ranks[:_NAMED]))} and {len(ranks) - _NAMED} more"


class Peers:
    """The failure of a rank of a save, which the others see before they wait for it, perhaps minutes later."""

    def __init__(self, save: str) -> None:
        self._key = f"lightning/save/{save}/failed"
        self._looked = time.monotonic()
        self._has_failed = False
        distributed = _distributed_is_initialized()
        self._store = torch.distributed.distributed_c10d._get_default_store() if distributed else None

    def tell_of_failure(self) -> None:
        """Notifies the other ranks that this one has failed."""
        self._has_failed = True
        if self._store is not None:
            try:
                self._store.set(self._key, "")
            except RuntimeError as error:  # and with that rank's death the others fail as well
                log.info(f"The rank that keeps the store of the process group is gone ({error})")

    def has_one_failed(self) -> bool:
        """Returns whether a rank has failed."""
        if not self._has_failed and self._store is not None:
            try:
                self._has_failed = self._store.check([self._key])
            except RuntimeError as error:  # the rank that keeps the store has died
                raise PeerFailed(f"the rank that keeps the store of the process group is gone ({error})") from error
        return self._has_failed

    def look(self) -> None:
        """Raises :class:`PeerFailed` if another rank has failed."""
        if time.monotonic() >= self._looked + _LOOK_S:
            self._looked = time.monotonic()
            if self.has_one_failed():
                raise PeerFailed("another rank has failed")


class PeerFailed(GivenUp):
    """Another rank has failed, whose error has the reason."""


def portable(error: BaseException) -> BaseException:
    """Returns an error of the same text that can be pickled: another rank would wait for ever for one that cannot.

    One of a built-in type may hold anything, such as the key of a ``KeyError``, or the errors in a group.
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
