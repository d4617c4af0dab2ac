"""What is measured, how often, and how it is shown: every figure by name."""

from dataclasses import dataclass, field, replace
from typing import Any

#: The ranks of a sharded checkpoint, all on this machine.
RANKS = 2
#: Paths of checkpoints that are discarded, of one that is loaded again, and of one on a disk.
FILE, FOLDER = "s3://sink/x.ckpt", "s3://sink/{release}-{run}.ckpt"
SAVED, DISK = "s3://store/{release}.ckpt", "checkpoints/x.ckpt"
#: How often a figure is measured: the more it has varied between runs, the more often; less than a tenth is little.
OFTEN, SOMETIMES, TWICE = 5, 3, 2


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and how often."""

    mib: int = 1024
    tensor_mib: int = 64
    large_mib: int = 4096
    latency_ms: int = 20
    megabytes_per_s: int = 100
    epochs: int = 3
    small_tensors: int = 2000
    small_kib: int = 64
    kinds: int = 8
    state_mib: int = 2048
    saves: int = 4
    steps: int = 300
    slow_megabytes_per_s: int = 25
    most_runs: int = OFTEN


QUICK = Sizes(mib=32, tensor_mib=8, large_mib=48, small_tensors=40, state_mib=32, saves=2, steps=10, most_runs=1)
#: The ways of torch to save in the background, as columns, with what asks for them. The second does not take FSDP1's.
TORCH = {"dcp.async_save": {"way": "torch"}}
TORCH_KEPT = {"dcp.async_save, memory kept": {"way": "torch, kept"}}


@dataclass(frozen=True)
class Row:
    """A number to show."""

    key: str  #: its name in each run
    label: str  #: its name in the table
    unit: str
    is_drawn: bool = False  #: whether it has a panel in the plot
    is_compared: bool = True  #: whether it says something about a release
    percentile: int | None = None  #: what is shown of all numbers, in percent, for the median and the extremes


@dataclass(frozen=True)
class Figure:
    """One measurement of ``client.py``, what it needs, and what is shown of it."""

    measure: str  #: its name there
    place: str  #: the checkpoint's path; in ``{release}`` and ``{run}`` goes what is different in each
    arguments: dict[str, Any]  #: more of its arguments
    runs: int  #: how often each release is measured, unless all are measured less often
    rows: tuple[Row, ...] = ()
    timing: str = ""  #: its name in the table of what limits it, if it has a place there
    is_signed: bool = False  #: whether bodies are signed
    link: dict[str, float] = field(default_factory=dict)  #: what lies before the server
    prepare: str = ""  #: the measurement that makes the object which this one loads, once for each place
    ranks: int = 1  #: how many processes measure together
    is_ours_alone: bool = False  #: whether stock Lightning cannot do it on a CPU
    #: Columns beside the releases: what this Lightning's environment measures as well, with other arguments.
    others: dict[str, dict[str, Any]] = field(default_factory=dict)


def amount(mib: int) -> str:
    return f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib} MiB"


def all_figures(sizes: Sizes) -> dict[str, dict[str, Figure]]:
    """The figures of each part by name."""
    parts = {"files": of_files(sizes), "sharded": of_shards(sizes), "async": in_background(sizes)}
    return {
        part: {name: replace(figure, runs=min(figure.runs, sizes.most_runs)) for name, figure in figures.items()}
        for part, figures in parts.items()
    }


def of_files(sizes: Sizes) -> dict[str, Figure]:
    """Checkpoints that are one file."""
    size, tensors = amount(sizes.mib), {"mib": sizes.mib, "tensor_mib": sizes.tensor_mib}
    saves = (
        Row("cpu_s", f"Save of {size} to S3, body unsigned: processor time", "s", True),
        Row("wall_s", "... wall time", "s", True),
        Row("memory_mib", "... extra memory", "MiB", True),
    )
    signed = (
        Row("cpu_s", f"Save of {size} to S3, body signed: processor time", "s", True),
        Row("wall_s", "... wall time", "s"),
    )
    large = Row("memory_mib", f"Save of {amount(sizes.large_mib)} to S3: extra memory", "MiB", True)
    delays = (
        Row("longest_ms", f"Longest delay of the main thread while another saves {size}", "ms", True),
        Row("p99_ms", "... 99th percentile", "ms"),
        Row("idle_longest_ms", "... longest while the other is idle (control)", "ms", is_compared=False),
        Row("idle_p99_ms", "... 99th percentile of the control", "ms", is_compared=False),
    )
    restores = (
        Row("wall_s", f"Restore of {size}, {describe_link(sizes)}: wall time", "s", True),
        Row("cpu_s", "... processor time", "s"),
        Row("memory_mib", "... extra memory", "MiB"),
    )
    resumes = (
        Row("restore_mib", f"Training state of {size} restored: extra memory until then", "MiB"),
        Row("step_mib", "... and during the first step after that", "MiB", True),
    )
    requests = Row("requests", f"Requests of a fit of {sizes.epochs} epochs", "", True)
    local = (
        Row("wall_s", f"Save of {size} to a local disk: wall time of the call", "s"),
        Row("durable_s", "... wall time until it is on the disk", "s", True),
        Row("cpu_s", "... processor time of the call", "s"),
    )
    imports = Row("cpu_s", "`import lightning`: processor time", "s")
    large_tensors, fits, saved = {**tensors, "mib": sizes.large_mib}, {"epochs": sizes.epochs}, "s3://store/x.ckpt"
    return {
        "save": Figure("save", FILE, tensors, SOMETIMES, saves, "save, unsigned"),
        "signed": Figure("save", FILE, tensors, TWICE, signed, "save, signed", is_signed=True),
        "large": Figure("save", FILE, large_tensors, TWICE, (large,)),
        "hold_up": Figure("hold_up", FILE, tensors, OFTEN, delays),
        "load": Figure("load", saved, tensors, TWICE, restores, "restore", link=far(sizes), prepare="save"),
        "resume": Figure("resume", saved, {"mib": sizes.mib}, TWICE, resumes, prepare="save_training"),
        "fit": Figure("fit", "s3://store/{release}-{run}", fits, TWICE, (requests,)),
        "local": Figure("save_local", DISK, tensors, OFTEN, local),
        "import": Figure("import", "", {}, SOMETIMES, (imports,)),
    }


def of_shards(sizes: Sizes) -> dict[str, Figure]:
    """Checkpoints that every rank has a part of; each release loads what it has saved."""
    size, memory, processors = amount(sizes.mib), "... extra memory of a rank", "... processor time of both ranks"
    small = f"{sizes.small_tensors} tensors of {sizes.small_kib} KiB a rank, {sizes.latency_ms} ms"
    saves = (
        Row("cpu_s_per_gib", f"FSDP2, save of {size} a rank to S3: processor time per GiB", "s", True),
        Row("wall_s", "... wall time", "s"),
        Row("memory_mib", memory, "MiB", True),
    )
    trainer_saves = Row("memory_mib", f"{memory} in `Trainer.save_checkpoint`", "MiB")
    fsdp1_saves = (
        Row("cpu_s_per_gib", "FSDP1, the same save: processor time per GiB", "s", True),
        Row("wall_s", "... wall time", "s"),
        Row("memory_mib", memory, "MiB", True),
    )
    in_order = (Row("requests", f"Restore of {small}: requests", ""), Row("wall_s", "... wall time", "s", True))
    in_another = (
        Row("requests", f"The same, saved in the order of {sizes.kinds} kinds of tensors: requests", "", True),
        Row("wall_s", "... wall time", "s", True),
    )
    restores, fsdp1_restores = (
        (
            Row("wall_s", f"{what}: wall time", "s", True),
            Row("cpu_s", processors, "s"),
            Row("memory_mib", memory, "MiB"),
        )
        for what in (f"FSDP2, restore of {size} a rank, {describe_link(sizes)}", "FSDP1, the same restore")
    )
    full = (
        Row("save_wall_s", f"FSDP1, full save of {size} a rank to a local disk: wall time", "s"),
        Row("save_memory_mib", "... extra memory of rank zero", "MiB"),
        Row("save_least_memory_mib", "... and of the other", "MiB"),
        Row("load_wall_s", "Restore of it: wall time", "s"),
        Row("load_memory_mib", memory, "MiB"),
    )
    local = (
        Row("save_wall_s", f"Save of {size} a rank to a local disk: wall time", "s", True),
        Row("save_cpu_s", processors, "s"),
        Row("save_memory_mib", memory, "MiB"),
        Row("load_wall_s", "Restore of it: wall time", "s", True),
        Row("load_cpu_s", processors, "s"),
        Row("load_memory_mib", memory, "MiB"),
    )
    fsdp2, fsdp1, in_full = ({"strategy": name, "mib": sizes.mib} for name in ("fsdp2", "fsdp1", "fsdp1, full"))
    ordered = {"tensors": sizes.small_tensors, "kib": sizes.small_kib, "kinds": 1}
    mixed, near = {**ordered, "kinds": sizes.kinds}, {"latency_ms": float(sizes.latency_ms)}
    order, another = "small tensors in the order of the file", "small tensors in another order"
    figures = {
        "sharded_save": Figure("save_shards", FOLDER, fsdp2, SOMETIMES, saves, "save, FSDP2"),
        "sharded_trainer": Figure("save_shards_by_trainer", FOLDER, {"mib": sizes.mib}, TWICE, (trainer_saves,)),
        "sharded_fsdp1": Figure("save_shards", FOLDER, fsdp1, TWICE, fsdp1_saves, "save, FSDP1"),
        "sharded_small": Figure("load_small", SAVED, ordered, SOMETIMES, in_order, order, False, near, "save_small"),
        "sharded_mixed": Figure("load_small", SAVED, mixed, TWICE, in_another, another, False, near, "save_small"),
        "sharded_load": Figure(
            "load_shards", SAVED, fsdp2, SOMETIMES, restores, "restore, FSDP2", False, far(sizes), "save_shards"
        ),
        "sharded_fsdp1_load": Figure(
            "load_shards", SAVED, fsdp1, TWICE, fsdp1_restores, "restore, FSDP1", False, far(sizes), "save_shards"
        ),
        "sharded_full": Figure("shards_on_disk", DISK, in_full, TWICE, full, is_ours_alone=True),
        "sharded_local": Figure("shards_on_disk", DISK, fsdp2, SOMETIMES, local),
    }
    return {name: replace(figure, ranks=RANKS) for name, figure in figures.items()}


def in_background(sizes: Sizes) -> dict[str, Figure]:
    """Saves that go on while training does."""
    state = amount(sizes.state_mib)
    file_stalls = stall_rows(f"State of {state} in one file", " (at most 1.5 is aimed at)", memory_is_drawn=True)
    fsdp2_stalls = stall_rows(f"FSDP2, {amount(sizes.mib)} a rank, sharded", " (at most 2 is aimed at)")
    fsdp1_stalls = stall_rows("FSDP1, the same", " (at most 1.5 is aimed at)")
    steps = (
        Row("without_ms", "A step of training in one thread, no save", "ms", is_compared=False),
        Row("during_ms", f"... while {state} are uploaded", "ms"),
        Row("ratio", "... with / without (at most 1.1 is aimed at)", "", True),
        Row("idle_ratio", "... without, again / without (control)", "", is_compared=False),
        Row("steps_ms", "... 99th percentile, during the upload", "ms", percentile=99),
        Row("idle_steps_ms", "... 99th percentile, no save (control)", "ms", is_compared=False, percentile=99),
        Row("longest_ms", "... longest, during the upload", "ms"),
        Row("idle_longest_ms", "... longest, no save (control)", "ms", is_compared=False),
        Row("uploaded_s", "... time from the save to its end", "s"),
    )
    whole = {"mib": sizes.state_mib, "tensor_mib": sizes.tensor_mib, "way": "plugin"}
    stalling, stepping = {**whole, "saves": sizes.saves}, {**whole, "steps": sizes.steps}
    fsdp2 = {"mib": sizes.mib, "saves": sizes.saves, "way": "plugin", "strategy": "fsdp2"}
    fsdp1, slow = {**fsdp2, "strategy": "fsdp1"}, {"megabytes_per_s": float(sizes.slow_megabytes_per_s)}
    both, name = TORCH | TORCH_KEPT, "stall_of_shards"
    return {
        "stall": Figure("stall_of_file", FOLDER, stalling, SOMETIMES, file_stalls, others=both),
        "stall_fsdp2": Figure(name, FOLDER, fsdp2, SOMETIMES, fsdp2_stalls, ranks=RANKS, others=both),
        "stall_fsdp1": Figure(name, FOLDER, fsdp1, TWICE, fsdp1_stalls, ranks=RANKS, others=TORCH),
        "steps": Figure("steps_beside_a_save", FOLDER, stepping, TWICE, steps, link=slow, others=TORCH),
    }


def stall_rows(what: str, aim: str, memory_is_drawn: bool = False) -> tuple[Row, ...]:
    return (
        Row("first_s", f"{what}: stall of the first save", "s"),
        Row("stalls_s", "... of the later ones", "s"),
        Row("stalls_s", "... 99th percentile of these", "s", percentile=99),
        Row("copies_s", "... `copy_` of the state in one thread (control)", "s", is_compared=False),
        Row("ratio", f"... stall of the later ones / copy{aim}", "", True),
        Row("saved_s", "... until a later one is saved", "s"),
        Row("memory_mib", "... extra memory while saving", "MiB", memory_is_drawn),
        Row("kept_mib", "... and after it", "MiB", is_compared=False),
    )


def far(sizes: Sizes) -> dict[str, float]:
    """Has the server be far away."""
    return {"latency_ms": sizes.latency_ms, "megabytes_per_s": sizes.megabytes_per_s}


def describe_link(sizes: Sizes) -> str:
    return f"{sizes.latency_ms} ms and {sizes.megabytes_per_s} MB/s a connection"
