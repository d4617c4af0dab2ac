"""What is measured: every figure by name, and how much of it."""

from dataclasses import dataclass, field
from typing import Any

#: The ranks of a sharded checkpoint, all on this machine.
RANKS = 2


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    mib: int = 1024
    tensor_mib: int = 64
    large_mib: int = 4096
    latency_ms: int = 20
    megabytes_per_s: int = 100
    epochs: int = 3
    small_tensors: int = 2000
    small_kib: int = 64
    kinds: int = 8
    runs: int = 5
    memory_runs: int = 2
    sharded_runs: int = 3
    long_runs: int = 2
    state_mib: int = 2048
    saves: int = 4
    steps: int = 300
    slow_megabytes_per_s: int = 25
    background_runs: int = 5


QUICK = Sizes(
    mib=32, tensor_mib=8, large_mib=48, small_tensors=40, state_mib=32, saves=2, steps=10,
    runs=1, memory_runs=1, sharded_runs=1, long_runs=1, background_runs=1,
)  # fmt: skip
#: The ways of torch to save in the background, as columns, with what asks for them. The second does not take FSDP1's.
TORCH = {"dcp.async_save": {"way": "torch"}}
TORCH_KEPT = {"dcp.async_save, memory kept": {"way": "torch, kept"}}


@dataclass(frozen=True)
class Figure:
    """One measurement of ``client.py``, and what it needs.

    Attributes:
        measure: Which one.
        place: The checkpoint's path; in ``{release}`` and ``{run}`` goes what is different in each.
        arguments: More of its arguments.
        runs: How often each release is measured.
        signed: Whether bodies are signed.
        link: Options of the server.
        prepare: The measurement that makes the object which this one loads, once for each place.
        ranks: How many processes measure together.
        others: Columns beside the releases: what the environment of this Lightning measures as well, with what is
            different in its arguments.
    """

    measure: str
    place: str
    arguments: dict[str, Any]
    runs: int
    signed: bool = False
    link: tuple[str, ...] = ()
    prepare: str = ""
    ranks: int = 1
    others: dict[str, dict[str, Any]] = field(default_factory=dict)


def file_figures(sizes: Sizes) -> dict[str, Figure]:
    """Checkpoints that are one file, by name."""
    tensors = {"mib": sizes.mib, "tensor_mib": sizes.tensor_mib}
    large = {"mib": sizes.large_mib, "tensor_mib": sizes.tensor_mib}
    runs, few, link = sizes.runs, sizes.memory_runs, link_options(sizes)
    return {
        "save": Figure("save", "s3://sink/x.ckpt", tensors, runs),
        "signed": Figure("save", "s3://sink/x.ckpt", tensors, runs, signed=True),
        "large": Figure("save", "s3://sink/x.ckpt", large, few),
        "hold_up": Figure("hold_up", "s3://sink/x.ckpt", tensors, runs),
        "load": Figure("load", "s3://store/x.ckpt", tensors, runs, link=link, prepare="save"),
        "resume": Figure("resume", "s3://store/x.ckpt", {"mib": sizes.mib}, few, prepare="save_training"),
        "fit": Figure("fit", "s3://store/{release}-{run}", {"epochs": sizes.epochs}, few),
        "local": Figure("save_local", "checkpoints/x.ckpt", tensors, runs),
    }


def sharded_figures(sizes: Sizes) -> dict[str, Figure]:
    """Checkpoints that every rank has a part of, by name; each release loads what it has saved."""
    fsdp2, fsdp1 = ({"strategy": name, "mib": sizes.mib} for name in ("fsdp2", "fsdp1"))
    small = {"tensors": sizes.small_tensors, "kib": sizes.small_kib, "kinds": 1}
    sink, store = "s3://sink/{release}-{run}.ckpt", "s3://store/{release}.ckpt"
    mixed = {**small, "kinds": sizes.kinds}
    runs, few, link = sizes.sharded_runs, sizes.long_runs, link_options(sizes)
    latency = link[:2]
    return {
        "sharded_save": Figure("save_shards", sink, fsdp2, runs, ranks=RANKS),
        "sharded_trainer": Figure("save_shards_by_trainer", sink, {"mib": sizes.mib}, runs, ranks=RANKS),
        "sharded_fsdp1": Figure("save_shards", sink, fsdp1, runs, ranks=RANKS),
        "sharded_small": Figure("load_small", store, small, runs, link=latency, prepare="save_small", ranks=RANKS),
        "sharded_mixed": Figure("load_small", store, mixed, few, link=latency, prepare="save_small", ranks=RANKS),
        "sharded_load": Figure("load_shards", store, fsdp2, runs, link=link, prepare="save_shards", ranks=RANKS),
        "sharded_local": Figure("shards_on_disk", "checkpoints/x.ckpt", fsdp2, runs, ranks=RANKS),
    }


def background_figures(sizes: Sizes) -> dict[str, Figure]:
    """Saves that go on while training does, by name."""
    whole = {"mib": sizes.state_mib, "tensor_mib": sizes.tensor_mib, "way": "plugin"}
    shards = {"mib": sizes.mib, "saves": sizes.saves, "way": "plugin"}
    slow = ("--megabytes-per-s", str(sizes.slow_megabytes_per_s))
    sink, runs = "s3://sink/{release}-{run}.ckpt", sizes.background_runs
    both = TORCH | TORCH_KEPT
    return {
        "stall": Figure("stall_of_file", sink, {**whole, "saves": sizes.saves}, runs, others=both),
        "stall_fsdp2": Figure("stall_of_shards", sink, {**shards, "strategy": "fsdp2"}, runs, ranks=RANKS, others=both),
        "stall_fsdp1": Figure(
            "stall_of_shards", sink, {**shards, "strategy": "fsdp1"}, runs, ranks=RANKS, others=TORCH
        ),
        "steps": Figure("steps_beside_a_save", sink, {**whole, "steps": sizes.steps}, runs, link=slow, others=TORCH),
    }


def link_options(sizes: Sizes) -> tuple[str, ...]:
    """Has the server be far away."""
    return ("--latency-ms", str(sizes.latency_ms), "--megabytes-per-s", str(sizes.megabytes_per_s))
