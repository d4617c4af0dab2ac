"""Full states, each in one file, of which every rank of a distributed model reads no more than what it keeps.

The file is an archive of ``torch.save``. Torch reads all but the tensors' bytes, and tells where in the file these are.
Then they are read as those of a sharded checkpoint are: straight into the parts of the model's parameters and of the
optimizer's state that the rank has, many ranges at a time.
"""

import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning.fabric.storage import checkpoints
from lightning.fabric.storage.checksums import Record
from lightning.fabric.storage.load import OpenedFile, load_without_tensors
from lightning.fabric.storage.location import Location, Url, display, locate, options_of
from lightning.fabric.storage.ranks import failures_of_ranks, together, unseen_explained
from lightning.fabric.utilities.distributed import _distributed_is_initialized

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

#: An attribute of the storages of tensors that have not been read.
_MARK = "_lightning_file"


class _Place(NamedTuple):
    """Where the bytes of a contiguous tensor are."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


def load_full(path: Any, weights_only: bool | None = None, apart: Collection[str] | None = None) -> Any:
    """Loads a full state into host memory, but not all of it; a collective call.

    Args:
        path: Of the file.
        weights_only: As for :func:`torch.load`.
        apart: The keys whose tensors are left to :func:`load_module` and :func:`load_optimizer`, which read what this
            rank needs of them. Until then they are on the meta device. None stands for all keys.

    Returns:
        The object in the file. If there are no other ranks, or this release of torch does not tell where tensors are,
        all of it is loaded.

    Raises:
        OSError: A rank could not read the file. Every rank raises it.
    """
    location = locate(path)
    if not _distributed_is_initialized() or torch.distributed.get_world_size() == 1:
        return checkpoints.load_full(location, weights_only)
    with together(f"loading {display(location)}"):
        with unseen_explained(location):
            loaded = load_without_tensors(location, weights_only)
        if loaded is None or _mark(loaded.obj, loaded.file) != loaded.storages:
            return checkpoints.load_full(location, weights_only)
    if apart is None:
        return loaded.obj
    rest = {key: value for key, value in loaded.obj.items() if key not in apart}
    return {**loaded.obj, **_filled(rest)}


def load_module(state: dict[str, Any], module: torch.nn.Module, strict: bool) -> bool:
    """Loads into a distributed module what this rank keeps of it; a collective call.

    Args:
        state: From :func:`load_full`.
        module: Its parameters are DTensors.
        strict: Whether it is an error if the module has something that ``state`` has not.

    Returns:
        False if nothing was done, for ``state`` has been loaded already, or the module's own tensors do not exist yet.

    Raises:
        KeyError: ``state`` lacks something.
        OSError: A rank could not read the file. Every rank raises it.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    if not any(_is_unread(value) for value in state.values()):
        return False
    own = get_model_state_dict(module)
    if any(isinstance(value, Tensor) and value.is_meta for value in own.values()):
        state.update(_filled(dict(state)))
        return False
    missing = sorted(name for name, value in own.items() if isinstance(value, Tensor) and name not in state)
    if missing and strict:
        raise KeyError(
            f"The checkpoint has no {missing[0]!r}, and lacks {len(missing)} of the model's tensors in all. Is it one"
            " of this model? To load what there is, set `strict=False`."
        )
    for name, value in _read_parts({name: state[name] for name in own if name in state}, own).items():
        own[name] = value
    module.load_state_dict(own, strict=False)  # which calls hooks; what has been read is in its place
    return True


def load_optimizer(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], options: Any
) -> None:
    """Loads what this rank keeps of an optimizer's state; a collective call.

    Args:
        module: What is optimized.
        optimizer: The optimizer.
        state: From :func:`load_full`, by the names of the module's parameters.
        options: For torch's ``set_optimizer_state_dict``, if ``state`` has been loaded already.

    Raises:
        OSError: A rank could not read the file. Every rank raises it.
    """
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    if any(_is_unread(value) for values in state["state"].values() for value in values.values()):
        own: Any = get_optimizer_state_dict(module, optimizer)["state"]
        flat = {(name, key): value for name, values in state["state"].items() for key, value in values.items()}
        mine = {(name, key): value for name, values in own.items() for key, value in values.items()}
        names = {str(number): path for number, path in enumerate(flat)}
        parts = _read_parts(
            {number: flat[path] for number, path in names.items()},
            {number: mine[path] for number, path in names.items() if path in mine},
        )
        read: dict[str, dict[str, Any]] = {name: {} for name in state["state"]}
        for number, (name, key) in names.items():
            read[name][key] = parts[number]
        state = {**state, "state": read}
        options = StateDictOptions(strict=options.strict)
    set_optimizer_state_dict(module, optimizer, optim_state_dict=state, options=options)


def _mark(obj: Any, file: OpenedFile) -> int:
    """Marks the tensors in ``obj`` that were left out, and returns how many of the file's storages they are."""
    places = set()

    def mark(tensor: Tensor) -> Tensor:
        if type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and tensor.is_meta:
            storage = tensor.untyped_storage()
            if hasattr(storage, "_checkpoint_offset"):
                setattr(storage, _MARK, file)
                places.add(storage._checkpoint_offset)
        return tensor

    apply_to_collection(obj, Tensor, mark)
    return len(places)


def _is_unread(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta and hasattr(value.untyped_storage(), _MARK)


def _start_of(tensor: Tensor) -> int:
    """Where in the file the storage of an unread tensor is."""
    return int(tensor.untyped_storage()._checkpoint_offset)  # type: ignore[arg-type]


def _filled(tree: Any) -> Any:
    """A copy of a collection with all its tensors, read into host memory; those that share memory go on sharing it."""
    unread: dict[int, torch.UntypedStorage] = {}

    def collect(tensor: Tensor) -> Tensor:
        if _is_unread(tensor):
            unread[_start_of(tensor)] = tensor.untyped_storage()
        return tensor

    apply_to_collection(tree, Tensor, collect)
    if not unread:
        return tree
    file: OpenedFile = getattr(next(iter(unread.values())), _MARK)
    memory = {str(start): torch.empty(storage.nbytes(), dtype=torch.uint8) for start, storage in unread.items()}
    _read(file, memory, {str(start): _Place(start, torch.uint8, memory[str(start)].size()) for start in unread})

    def fill(tensor: Tensor) -> Tensor:
        if not _is_unread(tensor):
            return tensor
        storage = memory[str(_start_of(tensor))].untyped_storage()
        filled = torch.empty(0, dtype=tensor.dtype)
        filled.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(filled, tensor.requires_grad)
        return filled.requires_grad_(tensor.requires_grad)

    return apply_to_collection(tree, Tensor, fill)


def _read_parts(state: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What this rank keeps of ``state``: in the tensors of ``own``, where it has those, else whole."""
    direct = {
        name: value
        for name, value in state.items()
        if _is_unread(value) and value.is_contiguous() and isinstance(own.get(name), Tensor)
    }
    places = {
        name: _Place(
            _start_of(value) + value.storage_offset() * value.itemsize,
            value.dtype,
            value.size(),
        )
        for name, value in direct.items()
    }
    if direct:
        file: OpenedFile = getattr(next(iter(direct.values())).untyped_storage(), _MARK)
        _read(file, {name: own[name] for name in direct}, places)
    rest = _filled({name: value for name, value in state.items() if name not in direct})
    return {name: own[name] if name in direct else _distributed(rest[name], own.get(name)) for name in state}


def _distributed(value: Any, like: Any) -> Any:
    """This rank's part of a whole tensor, in the memory of the one that it is for, if that is distributed."""
    if not isinstance(value, Tensor) or not hasattr(like, "device_mesh"):
        return value
    for chunk in _parts_of(like):
        whole = value[tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))]
        like.to_local().detach().copy_(whole)
    return like


def _parts_of(tensor: Tensor) -> "list[ChunkStorageMetadata]":
    """Which part of a tensor this rank has, unless that is empty."""
    from torch.distributed.checkpoint.planner_helpers import _create_chunk_list

    return [chunk for chunk in _create_chunk_list(tensor) if math.prod(chunk.sizes)]


def _read(file: OpenedFile, targets: dict[str, Tensor], places: dict[str, _Place]) -> None:
    """Reads into ``targets``, which are tensors in host memory or DTensors, what belongs there of each place."""
    from torch.distributed.checkpoint import DefaultLoadPlanner, load
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

    from lightning.fabric.storage.sharded import ShardReader

    class Reader(ShardReader):
        """Sees that what it has read is of the file that told where to read it."""

        @override
        def read_data(self, plan: Any, planner: Any) -> Any:
            done = super().read_data(plan, planner)
            file.check()
            return done

    folder, name = _split(file.location)
    metadata = Metadata(state_dict_metadata={}, storage_data={})
    records: dict[int, Record] = {}
    for key, place in places.items():
        chunks = []
        for chunk in _rows(targets[key], place.shape):
            record = _record(place, chunk, records)
            index = MetadataIndex(key, chunk.offsets)
            metadata.storage_data[index] = _StorageInfo(name, record.offset, record.length)
            chunks.append(chunk)
        properties = TensorProperties(dtype=place.dtype)
        metadata.state_dict_metadata[key] = TensorStorageMetadata(properties, place.shape, chunks)
    metadata.lightning = {  # type: ignore[attr-defined]
        "files": {name: {"size": file.size, "records": sorted(map(tuple, records.values()))}}
    }
    reader = Reader(folder, metadata)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with failures_of_ranks("load", file.location, reader):
        load(dict(targets), storage_reader=reader, planner=planner)


def _rows(target: Tensor, shape: torch.Size) -> "Iterator[ChunkStorageMetadata]":
    """The parts of the saved tensor that this rank needs, with all their columns: so their bytes are one run."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    for part in _parts_of(target):
        offsets = [*part.offsets[:1], *([0] * (len(shape) - 1))]
        yield ChunkStorageMetadata(torch.Size(offsets), torch.Size([*part.sizes[:1], *shape[1:]]))


def _record(place: _Place, rows: "ChunkStorageMetadata", records: dict[int, Record]) -> Record:
    """The bytes of some rows, as a record without checksums. Those of a file differ in their offsets."""
    row = math.prod(place.shape[1:]) * place.dtype.itemsize
    data = place.start + (rows.offsets[0] * row if rows.offsets else 0)
    nbytes = math.prod(rows.sizes) * place.dtype.itemsize
    offset = data - 1
    while offset in records and records[offset][2:4] != (data, nbytes):  # views of one memory
        offset -= 1
    return records.setdefault(offset, Record(offset, data + nbytes - offset, data, nbytes, b""))


def _split(location: Location) -> tuple[Location, str]:
    if isinstance(location, str):
        folder, _, name = location.rstrip("/").rpartition("/")
        return Url(folder, options_of(location)), name
    return location.parent, location.name
