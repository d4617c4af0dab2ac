"""Reads the shards of a checkpoint of torch.distributed.checkpoint, from a store or a local folder."""

import io
import logging
import pickle
from typing import Any, cast

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future
from typing_extensions import override

from lightning.fabric.storage.archives.load import load_bytes
from lightning.fabric.storage.collectives.errors import portable, together, unseen_explained
from lightning.fabric.storage.collectives.rank_group import RankGroup
from lightning.fabric.storage.paths.place import Place
from lightning.fabric.storage.sharded.read_plan import read_plan

log = logging.getLogger(__name__)


class ShardReader(StorageReader):
    """Reads shards that stock PyTorch, stock Lightning or :class:`ShardWriter` wrote.

    Args:
        place: The checkpoint's folder.
        metadata: From :func:`~lightning.fabric.storage.sharded.metadata_file.read_metadata`.
        weights_only: The argument of :func:`torch.load` for objects other than tensors.
    """

    def __init__(self, place: Place, metadata: Metadata, weights_only: bool | None = None) -> None:
        super().__init__()
        self._place = place
        self._metadata = metadata
        self._weights_only = weights_only
        #: The error of this rank. The one that is raised in the end may have been pickled.
        self.error: BaseException | None = None

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        assert checkpoint_id is None, "a reader belongs to one checkpoint"

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        # all ranks leave this together, for torch goes on with a collective call whose time is limited
        with together(f"loading {self._place}"):
            try:
                self.read(plan, planner)
            except BaseException as error:
                self.error = error
        if self.error is not None:
            raise portable(self.error) from self.error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def load(self, state: dict[str, Any], planner: LoadPlanner) -> None:
        """Loads this rank's part into the tensors of ``state``, and replaces its other objects; a collective call.

        Each rank plans for itself, for the global plan of a load is nothing but all local ones. So the ranks exchange
        no plans, and only on gloo whether each has made its own: nothing is overwritten if one could not.

        Args:
            state: The objects to load, by their keys in the checkpoint.
            planner: A planner that is new.

        Raises:
            CheckpointException: A rank could not plan, or read. Every rank raises it, with all reasons.
        """
        plans: list[LoadPlan] = []
        group = RankGroup()

        def plan() -> None:
            planner.set_up_planner(state, self._metadata, group.is_coordinator)
            plans.append(planner.finish_plan(planner.create_local_plan()))

        try:
            for act in (plan, lambda: self.read(plans[0], planner)):
                group.gather_scatter(f"loading {self._place}", act, lambda done: done)
        finally:
            self.error = group.error

    def read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Reads what the plan of this rank says, and gives it to the planner."""
        careful = cast(LoadPlanner, _CarefulPlanner(planner, self._weights_only))  # has all methods that are called
        with unseen_explained(self._place):
            read_plan(self._place, self._metadata, plan, careful)


class _CarefulPlanner:
    """A planner that loads objects as ``weights_only`` says. torch's own planners unpickle everything.

    Args:
        planner: The planner that gets tensors as they are, and objects pickled anew.
        weights_only: The argument of :func:`torch.load`.
    """

    def __init__(self, planner: LoadPlanner, weights_only: bool | None) -> None:
        self._planner = planner
        self._weights_only = weights_only
        self.resolve_tensor = planner.resolve_tensor
        self.commit_tensor = planner.commit_tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if self._weights_only is not False:
            name = read_item.storage_index.fqn
            try:
                loaded = load_bytes(value, weights_only=self._weights_only)
            except pickle.UnpicklingError as error:
                advice = "If you trust the author of the checkpoint, load it with `weights_only=False`"
                raise pickle.UnpicklingError(f"Could not load {name!r}. {advice}: {error}") from error
            value = io.BytesIO()
            torch.save(loaded, value)
            value.seek(0)
        self._planner.load_bytes(read_item, value)
