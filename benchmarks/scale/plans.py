"""The plans of a large job's ranks, in one process: what torch's planner makes of a transformer's training state.

With FSDP2 the ranks share the parameters and both moments of Adam by rows; each has all ``step`` counters, as Adam
does. The plan of rank zero is torch's own, of DTensors without data on a mesh of so many ranks; the others differ from
it in the rows, which :func:`check` holds against torch's own plan of one of them. With FSDP1 each rank has a flat range
of each decoder layer, and of all that is beside them; the plan of each is made by itself.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning.fabric.storage.sharded.checksums import BLOCK, FileRecords, Record
from lightning.fabric.storage.sharded.flat_shard import FlatShard
from lightning.fabric.storage.sharded.writer import Report

HIDDEN, KEYS, INNER, VOCABULARY = 8192, 1024, 43008, 131072
#: The tensors of a decoder layer by name; with 32 layers, 41 * 10^9 parameters, which are 490 GB with their moments.
LAYER = {
    "attention.query": (HIDDEN, HIDDEN),
    "attention.key": (KEYS, HIDDEN),
    "attention.value": (KEYS, HIDDEN),
    "attention.output": (HIDDEN, HIDDEN),
    "mlp.gate": (INNER, HIDDEN),
    "mlp.up": (INNER, HIDDEN),
    "mlp.down": (HIDDEN, INNER),
    "norm_before_attention": (HIDDEN,),
    "norm_before_mlp": (HIDDEN,),
}
#: About what is saved of an item that is no tensor, in bytes.
OTHER = 8192
#: About what an archive has before its tensor, and after it, in bytes.
HEAD, TAIL = 512, 512


def parameters(layers: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of a transformer's parameters."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    return {**shapes, "norm.weight": (HIDDEN,), "head.weight": (VOCABULARY, HIDDEN)}


@contextmanager
def rank_of(world: int, rank: int) -> Iterator[DeviceMesh]:
    """Makes this process look like a rank of a job, with a process group that talks to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def state(layers: int, mesh: DeviceMesh) -> dict[str, Any]:
    """What a rank of FSDP2 gives to torch.distributed.checkpoint: tensors without data, but for the counters of Adam.

    Raises:
        ValueError: So many ranks cannot share the rows evenly.
    """
    if KEYS % mesh.size():
        raise ValueError(f"{mesh.size()} ranks cannot share {KEYS} rows evenly: take a power of two up to {KEYS}")

    def part(shape: tuple[int, ...]) -> DTensor:
        local = torch.empty(shape[0] // mesh.size(), *shape[1:], device="meta")
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    shapes = parameters(layers)
    return _with_moments(list(shapes), list(shapes), lambda name: part(shapes[name]))


def _with_moments(names: list[str], own: list[str], part: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """The state of a model with these parameters, and of an optimizer that has moments of its ``own`` ones."""
    moments = {name: {"step": torch.tensor(1.0), "exp_avg": part(name), "exp_avg_sq": part(name)} for name in own}
    groups = [{"params": names, "lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}]
    model = {name: part(name) for name in names}
    return {"state_dict": model, "optimizer_0": {"state": moments, "param_groups": groups}}


def flat_state(layers: int, world: int, rank: int) -> dict[str, Any]:
    """What a rank of FSDP1 gives: flat ranges without data, but for the counters of those that it has values of."""
    shapes = parameters(layers)
    units: dict[str, list[str]] = {}
    for name in shapes:
        units.setdefault(name.split(".")[1] if name.startswith("layers.") else "", []).append(name)
    ranges = {}
    for names in units.values():
        each = -(-sum(math.prod(shapes[name]) for name in names) // world)
        at = 0
        for name in names:
            size = math.prod(shapes[name])
            ranges[name] = [min(max(bound * each - at, 0), size) for bound in (rank, rank + 1)]
            at += size

    def part(name: str) -> FlatShard:
        start, stop = ranges[name]
        return FlatShard(torch.empty(stop - start, device="meta"), start, stop, shapes[name])

    return _with_moments(list(shapes), [name for name, (start, stop) in ranges.items() if start < stop], part)


def moved(plan: SavePlan, rank: int) -> SavePlan:
    """The plan of a rank, given that of rank zero."""
    return dataclasses.replace(plan, items=[_moved_item(item, rank) for item in plan.items])


def _moved_item(item: WriteItem, rank: int) -> WriteItem:
    if item.type != WriteItemType.SHARD:
        return item
    assert item.tensor_data is not None
    sizes = item.tensor_data.chunk.sizes
    offsets = torch.Size((rank * sizes[0], *item.tensor_data.chunk.offsets[1:]))
    data = dataclasses.replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets, sizes))
    return dataclasses.replace(item, index=MetadataIndex(item.index.fqn, offsets), tensor_data=data)


def check(layers: int, world: int, first: SavePlan) -> None:
    """Compares the plan of the last rank with torch's own.

    Raises:
        RuntimeError: They are not the same, so that nothing which is measured would hold.
    """
    with rank_of(world, world - 1) as mesh:
        planner = DefaultSavePlanner()
        planner.set_up_planner(state(layers, mesh))
        if planner.create_local_plan().items != moved(first, world - 1).items:
            raise RuntimeError("torch's planner has other plans than this benchmark: adapt benchmarks/scale/plans.py")


def _places(plan: SavePlan) -> Iterator[tuple[WriteItem, int, int]]:
    """Where a plan's items would be in a file: the offset of each, and the size of what is in its archive."""
    at = 0
    for item in plan.items:
        size = OTHER
        if item.tensor_data is not None:
            size = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        yield item, at, size
        at += HEAD + size + TAIL


def results(plan: SavePlan, rank: int) -> list[WriteResult]:
    """What a rank of torch's reports of the file that it has written."""
    name = f"__{rank}_0.distcp"
    return [
        WriteResult(item.index, HEAD + size + TAIL, _StorageInfo(name, at, HEAD + size + TAIL))
        for item, at, size in _places(plan)
    ]


def report(plan: SavePlan, name: str) -> Report:
    """What a rank of ours reports of the file that it has written: of that name, with checksums of no meaning."""
    records = [
        Record(at, HEAD + size + TAIL, at + HEAD, size, os.urandom(4 * (2 + -(-size // BLOCK))))
        for _, at, size in _places(plan)
    ]
    return Report({name: FileRecords.of(records)})
