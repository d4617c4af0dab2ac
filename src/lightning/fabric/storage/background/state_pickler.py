"""Pickles objects without the memory of their tensors, and restores them with that memory elsewhere."""

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage
from typing_extensions import override

from lightning.fabric.storage.archives.tensor_bytes import is_plain
from lightning.fabric.storage.gc_pause import collection_paused

#: Bytes that are read at a time, while no other thread of Python's can run.
_UNINTERRUPTED = 2**20
_FREQUENT = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32})
_NOT_PICKLABLE = (pickle.PicklingError, TypeError, AttributeError)
#: torch's thread-local with the device to restore tensors to; before torch 2.5 it was in another place.
_RESTORING: Any = (
    getattr(torch.serialization, "_serialization_tls", None) or torch._utils._thread_local_state  # type: ignore[attr-defined]
)


class Pickled:
    """An object, pickled without the memory of its tensors.

    Args:
        obj: Anything that ``torch.save`` takes.

    Raises:
        pickle.PicklingError: A part of the object cannot be pickled; the message names it.
        RuntimeError: Tensors of different types share memory, which ``torch.save`` does not take.
    """

    def __init__(self, obj: Any) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        try:
            pickler.dump(obj)
        except _NOT_PICKLABLE as error:
            culprit = _culprit(obj, error, "state", ())
            raise pickle.PicklingError(f"This state cannot be saved, because of {culprit}") from error
        self._bytes = file.getvalue()
        self._types = pickler.types
        self._storages = pickler.storages

    def take_storages(self) -> list[UntypedStorage]:
        """Returns the memory of the tensors, on any device, and keeps none of it."""
        storages, self._storages = self._storages, []
        return storages

    def restore(self, storages: Sequence[UntypedStorage]) -> Any:
        """Makes an object like the one that was pickled. Other threads get their turn after each MiB at least.

        Args:
            storages: Host memory with the content of :meth:`take_storages`.
        """
        with _restoring_to_host(), collection_paused():
            typed = [
                TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
                for storage, dtype in zip(storages, self._types, strict=True)
            ]
            unpickler = pickle.Unpickler(_Reader(self._bytes))
            unpickler.persistent_load = typed.__getitem__  # type: ignore[method-assign]
            obj = unpickler.load()
            torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]
        return obj


class _Pickler(pickle.Pickler):
    """Leaves storages out, and puts each into a list once."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.storages: list[UntypedStorage] = []
        self.types: list[torch.dtype] = []
        self._places: dict[int, int] = {}
        #: Whether torch pickles tensors by their storages, for each type of device that has come up.
        self._has_storages = {"cpu": True}

    @override
    def reducer_override(self, obj: Any) -> Any:
        """Reduces frequent tensors as ``Tensor.__reduce_ex__`` does, in less than half the time."""
        is_frequent = type(obj) is Tensor and obj.dtype in _FREQUENT
        if not is_frequent or obj.__dict__ or not is_plain(obj) or not self._has_storage(obj):
            return NotImplemented
        storage = TypedStorage(wrap_storage=obj.untyped_storage(), dtype=obj.dtype, _internal=True)  # type: ignore[no-untyped-call]
        place = storage, obj.storage_offset(), tuple(obj.size()), obj.stride()
        return torch._utils._rebuild_tensor_v2, (*place, obj.requires_grad, None)

    def _has_storage(self, tensor: Tensor) -> bool:
        kind = tensor.device.type
        if kind not in self._has_storages:
            function, *_ = tensor.new_empty(0).__reduce_ex__(2)  # type: ignore[no-untyped-call]
            self._has_storages[kind] = function is torch._utils._rebuild_tensor_v2
        return self._has_storages[kind]

    @override
    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)  # there are no subclasses of these; this is called for each and every object
        if kind is TypedStorage:
            return self._place(obj._untyped_storage, obj.dtype)
        return self._place(obj, torch.uint8) if kind is UntypedStorage else None

    def _place(self, storage: UntypedStorage, dtype: torch.dtype) -> int:
        place = self._places.setdefault(storage._cdata, len(self.storages))
        if place == len(self.storages):
            self.storages.append(storage)
            self.types.append(dtype)
        elif self.types[place] != dtype and storage.nbytes():
            raise RuntimeError(
                f"This state cannot be saved: it has tensors of {self.types[place]} and {dtype} that share memory."
                " Replace one of them by its `clone()`."
            )
        return place


class _Reader(io.BytesIO):
    """A file whose methods let other threads run, which those of the base class do not."""

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size)

    @override
    def readinto(self, buffer: Any, /) -> int:
        with memoryview(buffer) as view:
            return sum(
                super(_Reader, self).readinto(view[at : at + _UNINTERRUPTED])
                for at in range(0, len(view), _UNINTERRUPTED)
            )


@contextmanager
def _restoring_to_host() -> Iterator[None]:
    """Restores tensors without a storage, with which torch has pickled the device, to host memory."""
    before = getattr(_RESTORING, "map_location", None)
    _RESTORING.map_location = "cpu"
    try:
        yield
    finally:
        _RESTORING.map_location = before


def _culprit(obj: Any, error: Exception, path: str, outer: tuple[int, ...]) -> str:
    """Names the innermost part of an object that cannot be pickled, and why."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(obj, Mapping):
        parts = obj.items()
    elif isinstance(obj, (list, tuple)):
        parts = enumerate(obj)
    outer = (*outer, id(obj))
    for key, value in parts:
        if id(value) not in outer:
            try:
                _Pickler(io.BytesIO()).dump(value)
            except _NOT_PICKLABLE as reason:
                return _culprit(value, reason, f"{path}[{key!r}]", outer)
    return f"{path}: {error}"
