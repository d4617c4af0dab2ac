"""Measures how a state is copied from a device to the host while training goes on.

- The rate of copies, beside that of one large copy into torch's own pinned memory, which is what the bus gives;
- how long the CPU is kept from training by one, and how much memory of the device it takes;
- how much longer an interval of steps of a model with FSDP takes if its shard is copied at the beginning.
"""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning.fabric.storage.background.staging import Staged, Staging

MIB = 1 << 20
#: Of fewer values, the 99th percentile is but the greatest.
ENOUGH = 100


@dataclass(frozen=True)
class Sizes:
    """Of states, in MiB, and how often things are done."""

    large: tuple[int, ...] = (2048, 1024, 1024)
    small_count: int = 2000
    small_kib: int = 1024
    layers: int = 24
    width: int = 4096
    batch: int = 1024
    interval: int = 20
    runs: int = 5
    copies: int = 100
    steps: int = 100
    saves: int = 10


def measure(device: str, sizes: Sizes) -> dict[str, Any]:
    """Returns the figures by name; on a CPU, for which these say little, those of the device's memory are missing."""
    figures = {"bus_gib_per_s": bus_rate(device, sizes), **copies(device, sizes)}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return figures | training(device, sizes)
    finally:
        dist.destroy_process_group()


def seconds(device: str, call: Callable[[], Any]) -> float:
    """What a call takes, and all that it has the device do."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def summary(name: str, values: list[float]) -> dict[str, float]:
    """The median and the greatest of some values, and the 99th percentile where these are enough for it."""
    figures = {name: statistics.median(values), f"{name}_count": len(values), f"{name}_longest": max(values)}
    if len(values) >= ENOUGH:
        figures[f"{name}_99th_percentile"] = statistics.quantiles(values, n=100)[98]
    return figures


def bus_rate(device: str, sizes: Sizes) -> float:
    source = torch.ones(sizes.large[0] * MIB, dtype=torch.uint8, device=device)
    target = torch.zeros(source.shape, dtype=torch.uint8, pin_memory=device == "cuda")
    taken = [seconds(device, lambda: target.copy_(source, non_blocking=True)) for _ in range(sizes.runs + 1)]
    return source.nbytes / 2**30 / statistics.median(taken[1:])


def copies(device: str, sizes: Sizes) -> dict[str, float]:
    state = {
        "large": [torch.ones(size * MIB // 4, device=device) for size in sizes.large],
        "small": [torch.ones(sizes.small_kib * 256, device=device) for _ in range(sizes.small_count)],
    }
    staging = Staging()
    blocked, rates, grown = [], [], []
    for _ in range(sizes.copies + 1):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.max_memory_allocated()
        start = time.perf_counter()
        staged = staging.stage_object(state)
        blocked.append(time.perf_counter() - start)
        staged.wait()
        rates.append(staged.size / 2**30 / (time.perf_counter() - start))
        if device == "cuda":
            grown.append((torch.cuda.max_memory_allocated() - before) / MIB)
        staged.release()
    figures = {
        "copied_gib": staged.size / 2**30,
        "first_copy_seconds_of_the_cpu": blocked[0],
        **summary("copy_seconds_of_the_cpu", blocked[1:]),
        "copy_gib_per_s": statistics.median(rates[1:]),
    }
    return figures | ({"device_memory_mib": max(grown)} if grown else {})


def training(device: str, sizes: Sizes) -> dict[str, float]:
    """How long an interval of steps takes with and without a copy, which another thread uses and releases."""
    layers = [torch.nn.Linear(sizes.width, sizes.width, device=device) for _ in range(sizes.layers)]
    model, mesh = torch.nn.Sequential(*layers), init_device_mesh(device, (1,))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    batch = torch.randn(sizes.batch, sizes.width, device=device)
    staging, users, blocked = Staging(), list[threading.Thread](), []

    def steps(count: int = sizes.interval) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    def stage_and_step() -> None:
        start = time.perf_counter()
        staged = staging.stage_tensors(shard(model, optimizer), optimizer.state_dict()["param_groups"])
        blocked.append(time.perf_counter() - start)
        users.append(threading.Thread(target=use, args=[staged]))
        users[-1].start()
        steps()

    steps(1)
    size = sum(tensor.nbytes for tensor in shard(model, optimizer))
    staging.warm(size, batch.device)
    with_copy, without = [], []
    for _ in range(sizes.runs + 1):
        without.append(seconds(device, steps))
        with_copy.append(seconds(device, stage_and_step))
        users[-1].join()
    return {
        "shard_gib": size / 2**30,
        "steps": sizes.interval,
        "steps_seconds": statistics.median(without[1:]),
        "steps_with_a_copy_seconds": statistics.median(with_copy[1:]),
        "shard_copy_seconds_of_the_cpu": statistics.median(blocked[1:]),
    }


def shard(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What this rank has of the parameters and of the optimizer's state."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [tensor.detach() for tensor in (*model.parameters(), *states)]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def use(staged: Staged) -> None:
    staged.wait()
    staged.release()
