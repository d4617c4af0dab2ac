"""The global plan of a sharded save, made without an object for each of the items of all ranks."""

import math
import pickle
from collections.abc import Callable, Sequence
from itertools import chain, pairwise, repeat
from operator import getitem
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint import Metadata, SavePlan
from torch.distributed.checkpoint import filesystem as stock
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from lightning.fabric.storage.gc_pause import collection_paused
from lightning.fabric.storage.sharded.packing import Made, made_numbers, made_sizes

_Numbers = NDArray[np.int64]
#: The number of dimensions of objects that are no tensors.
_NO_TENSOR = -1


class PackedPlan(NamedTuple):
    """The local plan of a rank, in a form that costs rank zero little.

    Attributes:
        items: A pickle that many ranks have in common: an :class:`_Item` for each item, and torch's planner data.
        places: The offsets of all chunks in their tensors, then the sizes of all.
    """

    items: bytes
    places: bytes

    @classmethod
    def of(cls, plan: SavePlan) -> "PackedPlan":
        """Packs a plan of torch's planner."""
        items: list[_Item] = []
        offsets: list[int] = []
        sizes: list[int] = []
        for item in plan.items:
            data = item.tensor_data
            properties, size = (data.properties, data.size) if data else (None, None)
            items.append(_Item(item.index.fqn, properties, size, item.type == WriteItemType.SHARD))
            if data:
                offsets += data.chunk.offsets
                sizes += data.chunk.sizes
        packed = [tuple(item) for item in items]
        return cls(pickle.dumps((packed, plan.planner_data)), np.array(offsets + sizes, "<i8").tobytes())


class _Item(NamedTuple):
    """An item of a plan.

    Attributes:
        name: The name of the tensor or object.
        properties: The properties of the tensor, None for an object.
        size: The size of the whole tensor, None for an object.
        is_shard: Whether the tensor is distributed. Ranks that have the same part then have the same values.
    """

    name: str
    properties: TensorProperties | None
    size: torch.Size | None
    is_shard: bool


class _Part(NamedTuple):
    """The items of one name.

    Attributes:
        items: Their places among all items in the order of names.
        keys: Their indexes in the metadata.
        ranks: The ranks that write them.
    """

    items: slice
    keys: Any
    ranks: Made


class GlobalPlan:
    """The items that all ranks write. It is the same for all saves of a state that keeps its shape.

    Args:
        described: The metadata of the tensors and other objects, by name.
        planner_data: The planner data of all ranks.
        order: The items in the order of their names, as indexes of those that rank after rank writes.
        parts: The items of each name.
    """

    def __init__(
        self, described: dict[str, Any], planner_data: dict[str, Any], order: _Numbers, parts: list[_Part]
    ) -> None:
        self._described = described
        self._planner_data = planner_data
        self._order = order
        self._parts = parts

    def metadata(self, files: list[str], written: list[_Numbers]) -> Metadata:
        """Returns the metadata of the checkpoint, to be pickled.

        Args:
            files: The name of each rank's file.
            written: The offset and the length, in bytes of its file, of each item of each rank that writes some.
        """
        places = np.concatenate([np.empty((0, 2), np.int64), *written])
        assert len(places) == len(self._order), "every rank writes all of its items, or fails"
        offsets, lengths = places[self._order].T
        entries = []
        for items, keys, ranks in self._parts:
            names = Made(map, getitem, Made(repeat, files), ranks)
            infos = Made(map, stock._StorageInfo, names, made_numbers(offsets[items]), made_numbers(lengths[items]))
            entries.append(Made(zip, keys, infos))
        metadata = Metadata(self._described, self._planner_data, Made(dict, Made(chain, *entries)))
        if hasattr(stock, "CURRENT_DCP_VERSION"):
            metadata.version = stock.CURRENT_DCP_VERSION
        return metadata


def join_plans(plans: Sequence[PackedPlan]) -> tuple[list[bytes], GlobalPlan]:
    """Joins the local plans of all ranks.

    A part of a distributed tensor that several ranks have is written by the one of them that has the least to write, as
    with torch's own planner, whose time grows with the square of the number of ranks. Anything else that several ranks
    have may differ, and belong together: the lowest of them writes it.

    Args:
        plans: The local plan of each rank.

    Returns:
        A byte for each item of each rank, 1 if the rank writes it or 0; and the global plan.

    Raises:
        ValueError: The chunks of a tensor do not make up the tensor, or lie outside of it; or ranks have different
            kinds of objects of one name.
    """
    with collection_paused():
        rows = _Rows(plans)
        is_written = _without_duplicates(rows, len(plans))
        ends = np.cumsum(np.bincount(rows.rank, minlength=len(plans)))
        return [one.tobytes() for one in np.split(is_written, ends[:-1])], _join(rows, np.flatnonzero(is_written))


class _Items:
    """The items that some plans have in common.

    Args:
        pickled: The pickle in a :class:`PackedPlan`.
        numbers: Filled with a number for each name.
    """

    def __init__(self, pickled: bytes, numbers: dict[str, int]) -> None:
        items, self.planner_data = pickle.loads(pickled)
        self.items = [_Item(*item) for item in items]
        self.names = _numbers(numbers.setdefault(item.name, len(numbers)) for item in self.items)
        self.dims = _numbers(_NO_TENSOR if item.size is None else len(item.size) for item in self.items)
        self.is_shard = np.fromiter((item.is_shard for item in self.items), bool)
        self.itemsizes = _numbers(item.properties.dtype.itemsize if item.properties else 0 for item in self.items)


class _Rows:
    """The items of all ranks, one after another."""

    def __init__(self, plans: Sequence[PackedPlan]) -> None:
        numbers: dict[str, int] = {}
        known: dict[bytes, _Items] = {}
        for plan in plans:
            if plan.items not in known:
                known[plan.items] = _Items(plan.items, numbers)
        of_ranks = [known[plan.items] for plan in plans]
        #: The names, in the order of their numbers.
        self.names = list(numbers)
        self.planner_data: dict[str, Any] = {}
        for items in reversed(known.values()):
            self.planner_data |= items.planner_data or {}
        self.rank = np.repeat(np.arange(len(plans)), [len(items.items) for items in of_ranks])
        self.name = np.concatenate([items.names for items in of_ranks])
        self.dims = np.concatenate([items.dims for items in of_ranks])
        self.is_shard = np.concatenate([items.is_shard for items in of_ranks])
        places = [np.frombuffer(plan.places, "<i8").reshape(2, -1) for plan in plans]
        self.offsets = _padded(self.dims, np.concatenate([of_rank[0] for of_rank in places]), 0)
        self.sizes = _padded(self.dims, np.concatenate([of_rank[1] for of_rank in places]), 1)
        self.nbytes = self.sizes.prod(axis=1) * np.concatenate([items.itemsizes for items in of_ranks])
        self._of_ranks = of_ranks
        self._starts = np.cumsum([0, *(len(items.items) for items in of_ranks)])

    def item(self, row: int) -> _Item:
        """Returns the item of a row."""
        rank = int(self.rank[row])
        return self._of_ranks[rank].items[row - int(self._starts[rank])]


def _numbers(values: Any) -> _Numbers:
    return np.fromiter(values, np.int64)


def _padded(dims: _Numbers, values: _Numbers, fill: int) -> _Numbers:
    """Returns a row of equal length for each item."""
    most = int(dims.max(initial=0))
    rows = np.full((len(dims), most), fill, np.int64)
    rows[np.arange(most) < dims[:, None]] = values
    return rows


def _without_duplicates(rows: _Rows, world: int) -> NDArray[np.bool_]:
    """Returns whether each row is written: one of those that are the same on several ranks."""
    keys = (*rows.offsets.T, rows.dims, rows.name)
    order = np.lexsort(keys)
    differs = np.ones(len(order), bool)
    if keys:
        differs[1:] = np.any([key[order[1:]] != key[order[:-1]] for key in keys], axis=0)
    starts = np.flatnonzero(differs)
    counts = np.diff(np.append(starts, len(order)))
    is_written = np.ones(len(order), bool)
    same = []
    for start, count in zip(starts, counts, strict=True):
        if count > 1:
            group = order[start : start + count].tolist()  # by rank
            is_shared = bool(rows.is_shard[group].all())
            is_written[group if is_shared else group[1:]] = False
            same += [group] if is_shared else []
    loads = np.bincount(rows.rank, weights=rows.nbytes * is_written, minlength=world).tolist()
    for group in sorted(same):
        ranks = rows.rank[group].tolist()
        writer = min(range(len(group)), key=lambda one: loads[ranks[one]])
        is_written[group[writer]] = True
        loads[ranks[writer]] += int(rows.nbytes[group[writer]])
    return is_written


def _join(rows: _Rows, written: _Numbers) -> GlobalPlan:
    order = np.argsort(rows.name[written], kind="stable")
    by_name = written[order]
    bounds = np.searchsorted(rows.name[by_name], np.arange(len(rows.names) + 1)).tolist()
    described: dict[str, Any] = {}
    parts: list[_Part] = []
    made: dict[tuple[tuple[int, ...], bytes], Made] = {}

    def once(make: Callable[[_Numbers], Made], column: _Numbers) -> Made:
        key = column.shape, column.tobytes()  # most tensors are cut alike
        return made.get(key) or made.setdefault(key, make(column))

    for start, stop in pairwise(bounds):
        of_name = by_name[start:stop]
        item = rows.item(int(of_name[0]))
        dims = _NO_TENSOR if item.size is None else len(item.size)
        if (rows.dims[of_name] != dims).any():
            raise ValueError(f"The ranks do not mean the same by {item.name!r}: give what differs another name")
        keys: Any = (MetadataIndex(item.name),)
        if item.size is None:
            described[item.name] = BytesStorageMetadata()
        else:
            offsets, sizes = rows.offsets[of_name, :dims], rows.sizes[of_name, :dims]
            if wrong := _wrong_with(item.size, offsets, sizes):
                raise ValueError(f"The ranks do not have {item.name!r} of shape {tuple(item.size)} in parts: {wrong}")
            places = once(made_sizes, offsets)
            keys = Made(map, MetadataIndex, Made(repeat, item.name), places, range(stop - start))
            chunks: Any = Made(list, Made(map, ChunkStorageMetadata, places, once(made_sizes, sizes)))
            described[item.name] = TensorStorageMetadata(cast(TensorProperties, item.properties), item.size, chunks)
        parts.append(_Part(slice(start, stop), keys, once(made_numbers, rows.rank[of_name])))
    return GlobalPlan(described, rows.planner_data, order, parts)


def _wrong_with(whole: torch.Size, offsets: _Numbers, sizes: _Numbers) -> str:
    is_outside = (offsets + sizes > np.array(whole, np.int64)).any(axis=1)
    if is_outside.any():
        first = int(is_outside.argmax())
        return f"one at {tuple(offsets[first].tolist())} of shape {tuple(sizes[first].tolist())} is not within it"
    have = int(sizes.prod(axis=1).sum())
    return f"they have {have} values and not {math.prod(whole)}" if have != math.prod(whole) else ""
