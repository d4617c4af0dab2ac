"""Shared downloads: one rank of each node downloads a checkpoint that all load, the others read that rank's copy.

The copy is a memfd, memory that is a file without a name: it is not limited by the size of ``/dev/shm``, and is gone
with the last process that holds it open, however that process ends.
"""

import builtins
import io
import json
import logging
import mmap
import os
import pickle
import secrets
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import torch

from lightning.fabric.storage.archives.checkpoint_file import open_checkpoint
from lightning.fabric.storage.collectives.channel import training_channel
from lightning.fabric.storage.collectives.errors import together_in, unseen_explained
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.transport import progress
from lightning.fabric.storage.transport.ranged_file import RangedFile
from lightning.fabric.storage.transport.threads import in_thread, wait_until_done
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.fabric.utilities.types import _PATH

if sys.platform == "linux":
    import fcntl

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Lightning's methods that do the same on every rank: they read the file at the path that they are given, or call
#: another of these. Any other method may read on one rank only, or something else.
_PLAIN_LOADS = {
    "lightning.fabric.plugins.io.async_io.AsyncCheckpointIO.load_checkpoint",
    "lightning.fabric.plugins.io.torch_io.TorchCheckpointIO.load_checkpoint",
    "lightning.fabric.strategies.strategy.Strategy.load_checkpoint",
    "lightning.pytorch.plugins.io.wrapper._WrappingCheckpointIO.load_checkpoint",
    "lightning.pytorch.strategies.strategy.Strategy.load_checkpoint",
}
#: Built-in types of which a failed download may be: also of a client that is not installed, or an unknown protocol.
_KINDS = (OSError, ImportError, ValueError)


class _Offer(NamedTuple):
    """A rank's request for a checkpoint, and its memory for a copy.

    Attributes:
        machine: A name of the machine, from :func:`_machine`.
        source: The place of the checkpoint.
        place: The path of the memory, on this machine.
        name: The random name of the memory.
    """

    machine: str
    source: Place
    place: str
    name: str


@contextmanager
def one_download_per_node(strategy: Any, path: _PATH, weights_only: bool | None) -> Iterator[tuple[_PATH, bool | None]]:
    """Yields the arguments for ``strategy.load_checkpoint``; in a distributed job a collective call of all ranks.

    If several ranks on this machine load from one URL, the lowest of them downloads the file into memory, and all load
    from there. That memory has the size of the file, once on each node, and is free again when the last rank leaves the
    context.

    Each rank downloads for itself where nothing can be shared: in another container, on other systems than Linux, from
    ``memory://``, and with a strategy or a checkpoint plugin that has a ``load_checkpoint`` of its own. Ranks may load
    from different paths.

    Args:
        strategy: The strategy of a Trainer or of Fabric.
        path: The path of the checkpoint.
        weights_only: The argument of :func:`torch.load`.

    Yields:
        The path and the ``weights_only`` to call ``load_checkpoint`` with.

    Raises:
        OSError: The download failed. All ranks that wait for it raise the same error, of a more specific type where
            the reason is a common one, such as ``FileNotFoundError``.
    """
    with ExitStack() as stack:
        # the next collective call, whose time is limited, comes when all ranks have loaded
        place = locate(path)
        stack.enter_context(together_in(strategy, f"loading {place}"))
        copy = None
        if _reads_on_every_rank(strategy):
            stack.enter_context(unseen_explained(place))
            copy = _copy(place, stack)
        if copy is None:
            yield path, weights_only
        else:
            if weights_only is None and str(path).startswith("http"):
                weights_only = False  # what Lightning makes of None for these URLs
            own = f"/proc/self/fd/{copy.fileno()}"
            try:
                yield own, weights_only
            except (RuntimeError, pickle.UnpicklingError) as error:  # of a damaged file, with the path of the copy
                if own not in str(error):
                    raise
                raise type(error)(str(error).replace(own, str(place))) from error


def _reads_on_every_rank(strategy: Any) -> bool:
    ranks = torch.distributed.get_world_size() if _distributed_is_initialized() else 1
    # another number than the strategy's is of a process group that someone has made for other purposes
    if sys.platform != "linux" or ranks == 1 or ranks != getattr(strategy, "world_size", 1):
        return False
    reader = strategy
    while reader is not None:
        load = getattr(reader, "load_checkpoint", None)
        if f"{getattr(load, '__module__', '')}.{getattr(load, '__qualname__', '')}" not in _PLAIN_LOADS:
            return False
        reader = getattr(reader, "checkpoint_io", None)  # the strategy's plugin, or what that wraps
    return True


def _copy(place: Place, stack: ExitStack) -> IO[bytes] | None:
    """Returns a copy of the file, open until ``stack`` ends, or None if this rank has to download for itself."""
    rank = torch.distributed.get_rank()
    own, offer = _make_room(place, stack)
    offers = _gather(offer)
    wanted = Counter((other.machine, other.source) for other in offers if other is not None)
    if max(wanted.values(), default=1) == 1:  # the same on every rank
        return None
    peers = [i for i, other in enumerate(offers) if offer and other and other[:2] == offer[:2]]
    leader = offers[peers[0]] if peers else None
    leads = offer is not None and leader == offer
    copy = own if leads or leader is None else _open(leader, stack)
    # The last collective call, whose time is limited. Who reads the copy waits for its lock, which the kernel takes
    # from the leader when that dies
    has_copy = _gather(copy is not None)
    if copy is None or leader is None or sum(has_copy[i] for i in peers) == 1:
        return None
    log.debug(f"Rank {rank} is one of {len(peers)} for which rank {peers[0]} downloads {place}")
    whole = _fill(copy, place, leader) if leads else _is_filled(copy, place, leader)
    return copy if whole else None


def _gather(mine: T) -> list[T]:
    channel = training_channel()
    with channel.talking():
        return channel.broadcast(channel.gather(mine))


def _make_room(place: Place, stack: ExitStack) -> tuple[IO[bytes] | None, _Offer | None]:
    """Returns an empty copy, locked, with the offer of it; None where nothing can be shared."""
    if place.protocol in ("file", "memory"):  # the latter differs between processes
        return None, None
    try:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(f"lightning-{secrets.token_hex(16)}", flags)
        copy = stack.enter_context(cast(IO[bytes], io.FileIO(descriptor, "r+")))
        fcntl.flock(copy, fcntl.LOCK_EX)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        return copy, _Offer(_machine(), place, f"/proc/{os.getpid()}/fd/{descriptor}", name)
    except (AttributeError, OSError) as error:  # the former where Python was built for an old C library
        log.debug(f"No memory to share with other processes ({error})")
        return None, None


def _machine() -> str:
    """Returns what processes that see each other in ``/proc`` have in common: a booted kernel and a PID namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def _open(offer: _Offer, stack: ExitStack) -> IO[bytes] | None:
    """Returns the copy of another rank, or None if it is out of reach. No other file has its random name."""
    try:
        if os.readlink(offer.place) == offer.name:
            copy = stack.enter_context(cast(IO[bytes], io.FileIO(offer.place)))
            fcntl.flock(copy, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # as it must be while the leader holds it
        return copy
    except OSError as error:
        log.debug(f"Cannot open the memory of another process of this machine ({error})")
    return None


def _fill(copy: IO[bytes], place: Place, offer: _Offer) -> bool:
    """Downloads the file into the copy, or writes there why that failed, and unlocks it for the others.

    Returns:
        False if there can be no copy, and each rank is to download for itself.
    """
    try:
        with open_checkpoint(place) as source:
            memory = _map(copy, source, place)
            if memory is None:
                return False
            # After an error its traceback may hold a part of the view, which nobody can release then
            view = memoryview(memory)
            _read_into(source, view)
            if isinstance(source, RangedFile):
                source.check()
            view.release()
            memory.close()
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)  # a sign that this is all of it
        return True
    except Exception as error:
        failure = _failure(place, error)
        copy.truncate(0)
        copy.write(offer.name.encode() + json.dumps([type(failure).__name__, str(failure)]).encode())
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        raise failure from error
    finally:
        fcntl.flock(copy, fcntl.LOCK_UN)


def _map(copy: IO[bytes], source: IO[bytes], place: Place) -> mmap.mmap | None:
    """Gives the copy the size of the source, and maps it."""
    try:
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        copy.truncate(size)
        return mmap.mmap(copy.fileno(), size)
    except (OSError, ValueError) as error:  # no memory; or a server that gives no size
        log.warning(f"Each rank downloads {place} for itself, for it cannot be shared: {error}")
        return None


def _read_into(source: IO[bytes], view: memoryview) -> None:
    at = 0
    while at < len(view):
        count = cast(io.RawIOBase, source).readinto(view[at:])
        if not count:
            raise OSError(f"it ended after {at} of {len(view)} bytes")
        at += count


def _is_filled(copy: IO[bytes], place: Place, leader: _Offer) -> bool:
    """Waits for the leader, and raises its failure. Returns False if it ended without a result."""
    # to wait counts as progress: whether the leader makes any is for the leader to report
    locked = in_thread("checkpoint-wait", fcntl.flock, copy, fcntl.LOCK_SH)
    wait_until_done(locked, progress.made)
    locked.result()
    if not fcntl.fcntl(copy, fcntl.F_GET_SEALS) & fcntl.F_SEAL_GROW:
        log.warning(f"The rank that was to download {place} for this one did not: this one downloads it itself")
        return False
    mark = leader.name.encode()
    if os.pread(copy.fileno(), len(mark), 0) != mark:
        return True
    kind, message = json.loads(copy.read()[len(mark) :])
    raise getattr(builtins, kind)(message)


def _failure(place: Place, cause: Exception) -> Exception:
    built_in = (kind for kind in type(cause).__mro__ if kind.__module__ == "builtins" and issubclass(kind, _KINDS))
    kind = next(built_in, OSError)
    reason = redact(str(cause))
    if kind is OSError or not reason:
        reason = f"{type(cause).__name__}: {reason}"
    return kind(f"Could not download {place} for the ranks of this node: {reason}")
