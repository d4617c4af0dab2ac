"""Full states, each in one file, of which every rank of a distributed model reads no more than what it keeps.

The file is an archive of ``torch.save``. Torch reads all but the tensors' bytes, and tells where in the file these are.
Then they are read as those of a sharded checkpoint are: straight into the parts of the model's parameters and of the
optimizer's state that the rank has, many ranges at a time.
"""

import logging
import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning.fabric.storage.archives.load import OpenedFile, load_without_tensors
from lightning.fabric.storage.collectives.errors import failures_of_ranks, together, unseen_explained
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.sharded.checksums import Record
from lightning.fabric.storage.sharded.describable import is_distributed
from lightning.fabric.storage.strategies import checkpoints, load_targets, optimizer_state
from lightning.fabric.utilities.distributed import _distributed_is_initialized

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

log = logging.getLogger(__name__)

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
    place = locate(path)
    if not _distributed_is_initialized() or torch.distributed.get_world_size() == 1:
        return checkpoints.load_full(place, weights_only)
    with together(f"loading {place}"):
        try:
            with unseen_explained(place):
                loaded = load_without_tensors(place, weights_only)
        except NotImplementedError as error:  # as of quantized tensors, which there are not without values
            log.info(f"{place} is loaded as a whole ({error})")
            loaded = None
        if loaded is None or _mark(loaded.obj, loaded.file) != loaded.storages:
            return checkpoints.load_full(place, weights_only)
    if apart is None:
        return loaded.obj
    rest = {key: value for key, value in loaded.obj.items() if key not in apart}
    return {**loaded.obj, **filled(rest)}


def load_module(state: dict[str, Any], module: torch.nn.Module, strict: bool) -> bool:
    """Loads into a distributed module what this rank keeps of it; a collective call.

    Args:
        state: From :func:`load_full`.
        module: Its parameters are DTensors.
        strict: Whether it is an error if the module has something that ``state`` has not.

    Returns:
        False if nothing was done, for the module's own parameters do not exist yet.

    Raises:
        KeyError: ``state`` lacks something.
        OSError: A rank could not read the file. Every rank raises it.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    own = get_model_state_dict(module)
    if any(isinstance(value, Tensor) and value.is_meta for value in module.parameters()):
        state.update(filled(dict(state)))
        return False
    missing = sorted(name for name, value in own.items() if isinstance(value, Tensor) and name not in state)
    if missing and strict:
        raise KeyError(
            f"The checkpoint has no {missing[0]!r}, and lacks {len(missing)} of the model's tensors in all. Is it one"
            " of this model? To load what there is, set `strict=False`."
        )
    parts = load_targets.parts_of(module)
    wanted = {name: value for name, value in state.items() if name in own or load_targets.looks_itself(parts, name)}
    own.update(_read_parts(wanted, own))
    load_targets.replace_buffers(module, own)
    module.load_state_dict(own, strict=False)  # which calls hooks; what has been read is in its place
    return True


def load_own(state: dict[str, Any], module: torch.nn.Module, strict: bool) -> dict[str, Any] | None:
    """Loads into a module what this rank keeps of it, if its parameters are DTensors; a collective call.

    Args:
        state: From :func:`load_full`.
        module: The module.
        strict: As for :func:`load_module`.

    Returns:
        The whole state, to be loaded in another way; None if all is done.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
        return None if load_module(state, module, strict) else state
    if isinstance(module, FullyShardedDataParallel):
        state = filled(state)
        load_targets.replace_buffers(module, state)
    return state


def load_optimizer(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], strict: bool
) -> None:
    """Loads what this rank keeps of an optimizer's state; a collective call.

    Args:
        module: What is optimized. Its parameters are DTensors.
        optimizer: The optimizer.
        state: From :func:`load_full`, by the names of the module's parameters.
        strict: Whether it is an error if the checkpoint does not know a parameter of the optimizer.

    Raises:
        KeyError: It is.
        OSError: A rank could not read the file. Every rank raises it.
    """
    flat = {(name, part): value for name, values in state["state"].items() for part, value in values.items()}
    numbers = {str(number): path for number, path in enumerate(flat)}
    target = optimizer_state.targets(module, optimizer)
    parts = _read_parts(
        {number: flat[path] for number, path in numbers.items()},
        {
            number: target(*path, flat[path].size(), flat[path].dtype)
            for number, path in numbers.items()
            if isinstance(flat[path], Tensor) and load_targets.is_strided(flat[path])
        },
    )
    read: dict[str, dict[str, Any]] = {name: {} for name in state["state"]}
    for number, (name, part) in numbers.items():
        read[name][part] = parts[number]
    groups = filled(state["param_groups"])
    optimizer_state.place(module, optimizer, {"state": read, "param_groups": groups}, strict)


def _mark(obj: Any, file: OpenedFile) -> int:
    """Marks the tensors in ``obj`` that were left out, and returns how many of the file's storages they are."""
    places = set()

    def mark(tensor: Tensor) -> Tensor:
        is_usual = type(tensor) in (Tensor, torch.nn.Parameter) and load_targets.is_strided(tensor)
        if is_usual and tensor.is_meta and not tensor.is_conj() and not tensor.is_neg():
            storage = tensor.untyped_storage()
            if hasattr(storage, "_checkpoint_offset"):
                setattr(storage, _MARK, file)
                places.add(storage._checkpoint_offset)
        return tensor

    apply_to_collection(obj, Tensor, mark)
    return len(places)


def _is_unread(value: Any) -> bool:
    is_meta = isinstance(value, Tensor) and value.is_meta and value.layout == torch.strided
    return is_meta and hasattr(value.untyped_storage(), _MARK)


def _start_of(tensor: Tensor) -> int:
    """Where in the file the storage of an unread tensor is."""
    return int(tensor.untyped_storage()._checkpoint_offset)  # type: ignore[arg-type]


def filled(tree: Any) -> Any:
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
    own = {name: value for name, value in own.items() if _takes(value, state.get(name))}
    direct = {name: state[name] for name in own if _is_unread(state[name]) and state[name].is_contiguous()}
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
    rest = filled({name: value for name, value in state.items() if name not in direct})
    return {name: own[name] if name in direct else _distributed(rest[name], own.get(name)) for name in state}


def _takes(own: Any, value: Any) -> bool:
    """Whether a tensor is loaded into one of this rank; else it replaces what the rank has."""
    if not isinstance(own, Tensor) or not isinstance(value, Tensor) or own.is_meta:
        return False
    return is_distributed(own) or (load_targets.is_writable(own) and own.size() == value.size())


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

    from lightning.fabric.storage.sharded.reader import ShardReader

    class Reader(ShardReader):
        """Sees that what it has read is of the file that told where to read it."""

        @override
        def read_data(self, plan: Any, planner: Any) -> Any:
            done = super().read_data(plan, planner)
            file.check()
            return done

    folder, name = file.place.parent, file.place.name
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
    with failures_of_ranks("load", file.place, reader):
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
