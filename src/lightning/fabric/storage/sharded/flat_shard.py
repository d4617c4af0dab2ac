"""A rank's part of a tensor of which the ranks have flat ranges, as parameters of FSDP's first version are sharded.

A flat range of a tensor of ``n`` dimensions is at most ``2 * n - 1`` boxes: the rest of a row, whole rows, a part of a
row, and each such part of a row cut likewise. Boxes are what torch.distributed.checkpoint's format has chunks for.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import Self, override

#: Functions of torch that give of a part what they give of the whole.
_POINTWISE = ("aten::alias", "aten::clone", "aten::detach", "aten::_to_copy")
#: Methods of tensors that take the memory of the whole, and do not pass through the dispatcher.
_OF_MEMORY = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage)


class NeedsWholeTensor(RuntimeError):
    """A part of a tensor was used as the whole."""


class Box(NamedTuple):
    """A box of a tensor that is one range of its values in row-major order.

    Attributes:
        offsets: The place in the tensor, in each dimension.
        sizes: The size in each dimension.
        start: The number of its first value among all values of the tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cuts a range of a tensor's values in row-major order into boxes, in that order.

    Args:
        shape: The shape of the tensor.
        start: The number of the range's first value.
        stop: The number of the first value after it.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,), (stop - start,), start) if shape else Box((), (), 0)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * row)
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], at: int, start: int, stop: int) -> Iterator[Box]:
    before = at * math.prod(shape[1:])
    for offsets, sizes, inner in boxes_of(shape[1:], start - before, stop - before):
        yield Box((at, *offsets), (1, *sizes), before + inner)


class FlatShard(Tensor):
    """A rank's flat range of a tensor, in place.

    It has the shape, type and device of the whole tensor, and is planned by torch.distributed.checkpoint as torch's own
    distributed tensors are. Copies, also of another type or to another device, are made of the part; any other use is
    an error.

    Args:
        local: The values of the range, in one dimension.
        start: The number of the first value, of all values of the tensor in the order of ``dims``.
        stop: The number of the first value after the range.
        shape: The shape of the whole tensor.
        dims: The dimensions from that with the largest stride in memory to that with the smallest. None for row-major.
    """

    _local: Tensor
    _range: tuple[int, int]
    _dims: tuple[int, ...]

    @staticmethod
    def __new__(
        cls, local: Tensor, start: int, stop: int, shape: Sequence[int], dims: Sequence[int] | None = None
    ) -> "FlatShard":
        """Makes a shard in place; see the class."""
        made = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        made._local, made._range = local.detach(), (start, stop)
        made._dims = tuple(range(len(shape)) if dims is None else dims)
        return made

    def to_local(self) -> Tensor:
        """Returns the values of the range, in one dimension, on the memory that the shard describes."""
        return self._local

    @property
    def range(self) -> tuple[int, int]:
        """Returns the numbers of the range's first value and of the first value after it."""
        return self._range

    def with_local(self, local: Tensor) -> "FlatShard":
        """Returns the same range of another tensor of the same shape."""
        return FlatShard(local, *self._range, self.shape, self._dims)

    def boxes(self) -> list[tuple[torch.Size, Tensor]]:
        """Returns each box's offsets, and its values as a view of the box's shape. A tensor without values is one box.

        Raises:
            ValueError: The values are more or less than those of the range.
        """
        start, stop = self._range
        if self._local.shape != (stop - start,):
            raise ValueError(
                f"A tensor of shape {tuple(self._local.shape)} is not a flat part of {stop - start} values of one of"
                f" shape {tuple(self.shape)}: the states of an optimizer have the shape of their parameters, or none."
            )
        if not self.numel():
            return [(torch.Size([0] * self.dim()), self._local.view(self.shape))]
        found = []
        for box in boxes_of([self.shape[dim] for dim in self._dims], start, stop):
            values = self._local.narrow(0, box.start - start, math.prod(box.sizes)).view(box.sizes)
            back = [self._dims.index(dim) for dim in range(self.dim())]
            found.append((torch.Size([box.offsets[at] for at in back]), values.permute(back)))
        return found

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Returns an item of a local plan for each box."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Returns the place and the size of each box."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(offsets, values.size()) for offsets, values in self.boxes()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Returns the box at an index's offsets."""
        return next(values for offsets, values in self.boxes() if offsets == index.offset)

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_MEMORY:
            _refuse(func.__name__, args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # which is declared as a function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Copies, or refuses what takes whole tensors. A copy onto itself is none."""
        if func._schema.name == "aten::copy_" and args[0] is args[1]:
            return args[0]
        if func._schema.name not in _POINTWISE:
            shards = (one for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
            _refuse(func._schema.name.removeprefix("aten::"), next(shards))
        shard, *others = args
        options = {key: value for key, value in (kwargs or {}).items() if key != "memory_format"}
        return shard.with_local(func(shard._local, *others, **options))

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied: Self = memo.setdefault(id(self), self.clone())
        return copied

    @override
    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickle", self)

    @override
    def __repr__(self) -> str:  # type: ignore[override]  # which takes contents to show
        start, stop = self._range
        return f"FlatShard({start}:{stop} of {tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"


def _refuse(use: str, shard: "FlatShard") -> NoReturn:
    raise NeedsWholeTensor(
        f"{use!r} needs the whole tensor, and this is the part that a rank has: {shard!r}. There are whole ones within"
        " `FullyShardedDataParallel.summon_full_params(model)`, and in checkpoints of"
        " `FSDPStrategy(state_dict_type='full')`; the part alone is its `to_local()`."
    )
