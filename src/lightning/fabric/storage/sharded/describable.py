"""Prepares states for the format of torch.distributed.checkpoint, which cannot describe every part of one.

It describes each tensor by its type and shape, and nested dictionaries and lists by the paths in them. Keys of
dictionaries come back as strings, and empty dictionaries not at all; of tensors that are more than values in memory,
such as sparse ones, only the values come back, if anything. Such parts are pickled as they are.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


@dataclasses.dataclass(frozen=True)
class Object:
    """A value that is pickled."""

    value: Any


def describable(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state with an :class:`Object` for each part that would not come back as it is.

    Raises:
        ValueError: Such a part holds a distributed tensor, of which each rank has only its own shard.
    """
    return {name: _describable(value, name) for name, value in state.items()}


def _describable(value: Any, path: str) -> Any:
    if isinstance(value, Tensor):
        return value if is_distributed(value) or is_values(value) else Object(value)
    if type(value) in (dict, OrderedDict) and value and all(isinstance(name, str) for name in value):
        return {name: _describable(one, f"{path}.{name}") for name, one in value.items()}
    if type(value) is list:
        parts = [_describable(one, f"{path}.{at}") for at, one in enumerate(value)]
        if not any(isinstance(part, Object) for part in parts):
            return parts
    for inner, _ in shards_in(value, path):
        raise ValueError(
            f"{inner!r} is a distributed tensor in a {type(value).__name__} that is saved as a whole, but each rank has"
            " only a part of it. Keep it in a dictionary with strings for keys, or save its `full_tensor()`."
        )
    return Object(value) if isinstance(value, (Mapping, list)) else value


def is_values(tensor: Tensor) -> bool:
    """Returns whether a tensor is no more than a type, a shape and values."""
    is_strided = is_sized(tensor) and tensor.layout == torch.strided
    return is_strided and not tensor.is_quantized and not tensor.is_meta and type(tensor.detach()) is Tensor


def is_sized(tensor: Tensor) -> bool:
    """Returns whether a tensor has a size, as most have."""
    return is_distributed(tensor) or (not is_lazy(tensor) and not tensor.is_nested)


def is_distributed(tensor: Tensor) -> bool:
    """Returns whether a tensor knows which part of a larger one it is."""
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    return hasattr(tensor, "__create_write_items__") or isinstance(tensor, ShardedTensor)


def is_shard(tensor: Tensor) -> bool:
    """Returns whether a tensor is distributed, and another rank may have other values."""
    if not is_distributed(tensor):
        return False
    placements = getattr(tensor, "placements", None)
    return placements is None or not all(placement.is_replicate() for placement in placements)


def tensors_in(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in a collection, each with its path, the keys joined by dots."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        parts = tree.items()
    elif isinstance(tree, (list, tuple)):
        parts = enumerate(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = vars(tree).items()
    for name, value in parts:
        yield from tensors_in(value, f"{path}.{name}" if path else str(name))


def shards_in(tree: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in a collection of which each rank has a shard, each with its path."""
    return ((inner, tensor) for inner, tensor in tensors_in(tree, path) if is_shard(tensor))
