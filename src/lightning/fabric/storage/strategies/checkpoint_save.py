"""Saves of the FSDP and model-parallel strategies: a folder of shards, or one full file."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.fabric.storage.background.saver import saver_of
from lightning.fabric.storage.collectives.errors import failures_of_ranks, is_rank_zero, together
from lightning.fabric.storage.own_plugins import saves_at_path
from lightning.fabric.storage.paths.location import AnyPath
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.paths.redact import redact
from lightning.fabric.storage.paths.remove import remove_folder
from lightning.fabric.storage.paths.replace import remove_leftovers
from lightning.fabric.storage.save_report import reported
from lightning.fabric.storage.strategies.checkpoint_place import is_sharded_checkpoint, locate_checkpoint
from lightning.fabric.storage.strategies.extra_state import refuse_parts
from lightning.fabric.storage.transport.errors import questions_named
from lightning.fabric.storage.transport.retry import retrying

if TYPE_CHECKING:
    from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO


def set_up(checkpoint_io: "CheckpointIO") -> None:
    """Prepares a strategy's plugin for sharded saves; a collective call, once there is a process group."""
    if (saver := saver_of(checkpoint_io)) is not None:
        saver.set_up()


def save_sharded(
    state: dict[str, Any], meta: dict[str, Any] | None, path: AnyPath, checkpoint_io: "CheckpointIO | None" = None
) -> None:
    """Saves a sharded checkpoint, whole or not at all; a collective call.

    Args:
        state: The model and optimizer state of this rank. Tensors of an accelerator are copied piece by piece.
        meta: The rest of the checkpoint; that of rank zero is saved.
        path: The checkpoint's folder. A folder or file that is there is replaced when all ranks have succeeded.
        checkpoint_io: The strategy's plugin. If it saves in the background, so does this, and returns when the state
            has been copied to host memory.

    Raises:
        OSError: A rank could not write. Every rank raises the same, with the reasons of all.
        RuntimeError: A rank could not save for another reason, likewise.
        ValueError: ``meta`` has what cannot be saved of rank zero alone, likewise.
    """
    from lightning.fabric.storage.collectives.rank_group import RankGroup
    from lightning.fabric.storage.sharded.save_planner import PlanCache, Shard
    from lightning.fabric.storage.sharded.writer import ShardWriter

    place = locate_checkpoint(path)
    _refuse_parts(meta or {}, place)
    if (saver := saver_of(checkpoint_io)) is not None:
        saver.save_sharded(state, meta, place)
        return
    group = RankGroup()
    with reported(place), failures_of_ranks("save", place, group):
        ShardWriter(place, group).save(lambda: Shard.of(state, meta, group), PlanCache())


def save_full(
    state: dict[str, Any],
    meta: dict[str, Any] | None,
    place: Place,
    checkpoint_io: "CheckpointIO | None" = None,
) -> None:
    """Saves a full state, which rank zero has, as one file with the strategy's plugin; a collective call.

    Args:
        state: The full model and optimizer state.
        meta: The rest of the checkpoint.
        place: The place of the file.
        checkpoint_io: The strategy's plugin, or None for the default one.

    Raises:
        OSError: Rank zero could not write. Every rank raises it.
        ValueError: ``meta`` has what cannot be saved of rank zero alone. Every rank raises it.
    """
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    plugin = checkpoint_io or TorchCheckpointIO()
    with saving_full(place, plugin, meta or {}):
        if is_rank_zero():
            plugin.save_checkpoint({**state, **(meta or {})}, place.raw, storage_options=place.options or None)


@contextmanager
def saving_full(place: Place, checkpoint_io: "CheckpointIO", checkpoint: Mapping[str, Any]) -> Iterator[None]:
    """Surrounds a body that saves a full state as one file on rank zero; a collective call.

    A sharded checkpoint in its place goes when the body has succeeded, and every rank learns if it has not. If the
    plugin saves in the background, the shards go when it has done so.

    Args:
        place: The place of the file.
        checkpoint_io: The plugin that saves it.
        checkpoint: The rest of the checkpoint beside model and optimizers, or a whole one of the Trainer's.

    Raises:
        ValueError: ``checkpoint`` has what cannot be saved of rank zero alone. Every rank raises it.
        OSError: On the other ranks, if the body failed on rank zero; of the same type where it is a built-in one.
    """
    _refuse_parts(checkpoint, place)
    with together(f"saving {place}"):
        yield
        if is_rank_zero():
            saver = saver_of(checkpoint_io)
            if saver is None:
                _remove_replaced(place, checkpoint_io)
            else:
                saver.remove(place, lambda: _remove_replaced(place, checkpoint_io), is_partial=True)


def _refuse_parts(checkpoint: Mapping[str, Any], place: Place) -> None:
    of_trainer = ("state_dict", "optimizer_states", "loops")  # the rest may be a user's
    refuse_parts({key: value for key, value in checkpoint.items() if key not in of_trainer}, place)


def _remove_replaced(place: Place, checkpoint_io: "CheckpointIO") -> None:
    """Removes the shards that a file has replaced, and what killed saves have left."""
    if not saves_at_path(checkpoint_io) and not place.is_file():
        return  # the folder may be what the plugin has saved
    if place.shares_names() and _has_shards(place):  # elsewhere the file took the place of the shards
        try:
            with questions_named(place, "remove"):
                retrying(f"The removal of the shards of {place}", lambda: remove_folder(place))
        except Exception as error:
            raise OSError(
                f"{place} is saved, but the sharded checkpoint of that name could not be removed, and is"
                f" still what would be loaded: {redact(str(error))}"
            ) from error
    remove_leftovers(place)


def _has_shards(place: Place) -> bool:
    try:
        return is_sharded_checkpoint(place)
    except PermissionError:  # what S3 answers about a missing object to those who may write, but not list
        return False
