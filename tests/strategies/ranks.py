"""What the ranks do that :mod:`tests.strategies.forks` forks: save and load a small state which is one number all over.

So a state that is not all of one save shows. A job says where (``path``), how (``strategy``, ``kind``), which ``value``
to save, and for each rank what its environment has beside the server's (``environments``).
"""

import inspect
import itertools
import logging
import os
import resource
import runpy
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiobotocore.session  # noqa: F401  # here and not in every rank
import s3fs  # noqa: F401
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch import nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed._tensor import DTensor  # its name in PyTorch 2.4 too
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import pytorch_lightning  # noqa: F401
from lightning.fabric import Fabric
from lightning.fabric.plugins import AsyncCheckpointIO
from lightning.fabric.storage import save_report
from lightning.fabric.storage.background.pending import drain
from lightning.fabric.storage.paths import replace
from lightning.fabric.storage.sharded import commit
from lightning.fabric.storage.transport import multipart, sink
from lightning.fabric.storage.transport.backends import obstore_config
from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tests.strategies import flat_loads, flat_saves, resumes, slowness
from tests.strategies.forks import Forks, Job, kill, numbered

WIDTH = 160
#: Trains, see there.
WORKER = Path(__file__).with_name("worker.py")
_OF_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
#: After which collectives fail.
PATIENCE = timedelta(seconds=30)


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.ReLU())


class CPUFSDPStrategy(FSDPStrategy):
    """Lightning accepts FSDP on the CPU for a subclass only."""


def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
    for block in [m for m in module.modules() if isinstance(m, Block)]:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(module, mesh=mesh["data_parallel"])


class Files:
    """Counts what this rank does to the files of a folder, and calls ``reached`` with the number before each act.

    With ``reads``, also what it only looks at. Opening, renaming and removing are what the interpreter tells audit
    hooks; writes, fsync and the exchange of names it does not.
    """

    _CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate")
    _READS = ("os.listdir", "os.scandir")

    def __init__(self, folder: str, reached: Callable[[int], None], reads: bool = False) -> None:
        self.acts: list[str] = []
        self._reads = reads
        self._folder = os.path.realpath(folder)
        self._reached = reached
        self._lock = threading.Lock()

    def count(self) -> None:
        sys.addaudithook(self._hear)
        os.fsync = self._counted("fsync", os.fsync)
        replace.exchange = self._counted("exchange", replace.exchange)
        sink.Sink.write = self._counted("write", sink.Sink.write)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            counts = self._reads or arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            counts = event in self._CHANGES or (self._reads and event in self._READS)
        if not counts:
            return
        names = [os.fspath(name) for name in arguments[:2] if isinstance(name, (str, os.PathLike))]
        below = [name for name in names if os.path.realpath(name).startswith(self._folder)]
        relative = event in ("os.remove", "os.rmdir") and arguments[1] != -1  # by shutil.rmtree
        if below or relative:
            self._act(f"{event.removeprefix('os.')} {' '.join(os.path.basename(name) for name in names)}")

    def _counted(self, name: str, function: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            self._act(name)
            return function(*arguments)

        return counted

    def _act(self, what: str) -> None:
        with self._lock:
            self.acts.append(what)
            self._reached(len(self.acts))


def run(job: Job, rank: int, listener: socket.socket, ids: Sequence[int]) -> dict[str, Any]:
    """What a rank tells at its end. Errors of the task are told, too."""
    if "part_size" in job:
        multipart.SMALLEST_LEAN_PART = multipart.SMALLEST_PART = multipart._MIB = job["part_size"]
    world = len(ids)
    os.environ["LOCAL_RANK"] = str(rank)
    host, port = listener.getsockname()
    store = torch.distributed.TCPStore(
        host, port, world, is_master=rank == 0, wait_for_workers=False, timeout=PATIENCE,
        master_listen_fd=listener.detach() if rank == 0 else None,
    )  # fmt: skip
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    if "folders" in job:
        os.chdir(job["folders"][rank])
        commit.LAG_S = job["lag_s"]
    if job["task"] == "train":
        return train(job, rank, world)
    if job["task"] == "fit":
        return fit(job, world)
    if job["task"] == "resume":
        os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        return RESUMES[job.get("how", "run")](job)
    if job["task"] == "flat saves":
        return flat_saves.run(job)
    if job["task"] == "flat_loads":
        told: dict[str, Any] = {}
        return {**_attempt(lambda: told.update(flat_loads.run({**job, "world": world}))), **told}
    plugins = [AsyncCheckpointIO()] if job.get("async") else []
    fabric = Fabric(accelerator="cpu", devices=world, strategy=_strategy(job, world), plugins=plugins)
    fabric.launch()
    return {**TASKS[job["task"]](job, fabric, ids), "native": bool(obstore_config._stores)}


RESUMES = {"run": resumes.run, "continued": resumes.continued, "alone": resumes.alone}


def train(job: Job, rank: int, world: int) -> dict[str, Any]:
    """Runs ``worker.py`` in a folder of its own as Lightning's launcher would have started it."""
    os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.chdir(job["folder"])
    sys.argv = [str(WORKER), job["folder"]]
    return _attempt(lambda: runpy.run_path(str(WORKER), run_name="__main__"))


def fit(job: Job, world: int) -> dict[str, Any]:
    """Trains with DDP on a storage that is slow, see :mod:`tests.strategies.slowness`."""
    saved: list[str] = []
    told = _attempt(lambda: saved.extend(slowness.fit(job, world)))
    return {**told, "saved": saved}


def _strategy(job: Job, world: int) -> Any:
    if job["strategy"] == "ddp":
        return DDPStrategy()
    sharded = job["kind"] == "sharded"
    if job["strategy"] == "fsdp":
        return CPUFSDPStrategy(state_dict_type=job["kind"], auto_wrap_policy={Block})
    return ModelParallelStrategy(
        parallelize, data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=sharded
    )


def state_of(fabric: Fabric, value: float) -> dict[str, Any]:
    """Model, optimizer and loop state, all of them ``value``."""
    network = nn.Sequential(Block(), nn.Linear(WIDTH, 2, bias=False))
    model = fabric.setup_module(network)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters(), lr=value))
    for parameter in model.parameters():  # as a step would, which takes longer
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    state = {"model": model, "optimizer": optimizer, "epoch": value, "note": ""}
    fill(state, value)
    return state


def fill(state: dict[str, Any], value: float) -> None:
    """Makes all of a state one number."""
    with torch.no_grad():
        for tensor in _tensors(state["model"], state["optimizer"]):
            tensor.fill_(value)
    for group in state["optimizer"].param_groups:
        group["lr"] = value
    state.update(epoch=value, note=f"save {value}")


def values_of(state: dict[str, Any]) -> list[float]:
    """All different numbers in a state: one, if it is of one save."""
    found = {state["epoch"], *(float(group["lr"]) for group in state["optimizer"].param_groups)}
    found.add(float(state["note"].removeprefix("save ")))
    for tensor in _tensors(state["model"], state["optimizer"]):
        found.update(tensor.unique().tolist())
    return sorted(found)


def _tensors(model: nn.Module, optimizer: Any = None) -> list[torch.Tensor]:
    tensors: list[Any] = list(model.parameters())
    if optimizer is not None:
        tensors += [value for values in optimizer.state.values() for value in values.values()]
    return [_local(tensor) for tensor in tensors]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def save(job: Job, fabric: Fabric, ids: Sequence[int]) -> dict[str, Any]:
    """Saves. At an act of one rank (``actor``) others or itself (``victims``) get a signal if the job says so."""
    state = state_of(fabric, job["value"])
    if job.get("part"):
        state["part"] = next(iter(state["model"].parameters())).detach().clone()
    if job.get("unpicklable"):
        state["note"] = lambda: None
    fabric.barrier()
    if job.get("full_disk") == fabric.global_rank:  # as far as its files are concerned
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    files = _files(job, fabric, ids)
    slowness.begin(job, fabric.global_rank)

    def save_and_train() -> None:
        fabric.save(job["path"], state)
        if job.get("async"):
            fill(state, -1.0)  # as a step would
            drain()
        if job.get("async") and job["kind"] == "full":
            fabric.barrier()  # of a rank that has nothing to wait for

    with _lines_logged() as lines:
        told = _attempt(save_and_train)
    return {**told, "acts": files.acts, "lines": lines}


def _files(job: Job, fabric: Fabric, ids: Sequence[int]) -> Files:
    stop = job.get("stop")

    def reached(number: int) -> None:
        if stop and stop["event"] == number:
            for victim in stop["victims"]:
                kill(ids[victim], stop["signal"])

    files = Files(os.path.dirname(job["path"]), reached)
    if not job["path"].startswith("s3:") and (stop is None or stop["actor"] == fabric.global_rank):
        files.count()
    return files


def save_many(job: Job, fabric: Fabric, ids: Sequence[int]) -> dict[str, Any]:
    """Saves one value after the other, each at a path of its own, and has the one before removed. ``stop`` as above."""
    state = state_of(fabric, 0.0)
    fabric.barrier()
    files = _files(job, fabric, ids)

    def save_all() -> None:
        for before, value in itertools.pairwise(job["values"]):
            fill(state, value)
            fabric.save(numbered(job["path"], value), state)
            fill(state, -1.0)
            if fabric.global_rank == 0:
                fabric.strategy.checkpoint_io.remove_checkpoint(numbered(job["path"], before))
        drain()

    return {**_attempt(save_all), "acts": files.acts}


@contextmanager
def _lines_logged() -> Iterator[list[str]]:
    """Of saves, however short they are."""
    save_report._LONG_S = 0.0
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    save_report.log.addHandler(handler)
    try:
        yield lines
    finally:
        save_report.log.removeHandler(handler)


def load(job: Job, fabric: Fabric, ids: Sequence[int]) -> dict[str, Any]:
    """Loads. Before an act (``event``) of it, others do a job of their own (``meanwhile``)."""
    state = state_of(fabric, 0.0)

    def reached(number: int) -> None:
        if number == job.get("event"):
            outcomes = Forks(Path(job["server"])).run(job["meanwhile"])
            assert [outcome["error"] for outcome in outcomes] == [None, None]

    files = Files(os.path.dirname(job["path"]), reached, reads=True)
    if not job["path"].startswith("s3:"):
        files.count()
    slowness.begin(job, fabric.global_rank)
    told = _attempt(lambda: fabric.load(job["path"], state))
    return {**told, "found": values_of(state) if told["error"] is None else None, "acts": files.acts}


def talk(job: Job, fabric: Fabric, ids: Sequence[int]) -> dict[str, Any]:
    """Saves and loads, and names the functions that sent an object through the process group of training."""
    state = state_of(fabric, job["value"])
    fabric.barrier()
    with _objects_in_training() as names:
        fabric.save(job["path"], state)
        drain()
        state = state_of(fabric, 0.0)
        fabric.load(job["path"], state)
    return {"found": values_of(state), "names": names}


@contextmanager
def _objects_in_training() -> Iterator[list[str]]:
    names: list[str] = []
    modules = torch.distributed, torch.distributed.distributed_c10d
    functions = [getattr(torch.distributed, name) for name in _OF_OBJECTS]
    for function in functions:
        watched = _watched(function, names)
        for module in modules:
            setattr(module, function.__name__, watched)
    try:
        yield names
    finally:
        for function in functions:
            for module in modules:
                setattr(module, function.__name__, function)


def _watched(function: Any, names: list[str]) -> Any:
    signature = inspect.signature(function)

    def watched(*arguments: Any, **options: Any) -> Any:
        if signature.bind(*arguments, **options).arguments.get("group") in (None, torch.distributed.group.WORLD):
            names.append(function.__name__)
        return function(*arguments, **options)

    return watched


def spread(job: Job, fabric: Fabric, ids: Sequence[int]) -> dict[str, Any]:
    """Saves parameters that differ everywhere, with moments that are twice and three times as large, or loads them."""
    network = nn.Sequential(Block(), nn.Linear(WIDTH, 2, bias=False))
    with torch.no_grad():
        for parameter in network.parameters():
            values = torch.zeros(parameter.shape) if "load" in job else torch.arange(parameter.numel() * 1.0)
            parameter.copy_(values.view_as(parameter))
    model = fabric.setup_module(network)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters()))
    for parameter in model.parameters():
        moments = {"exp_avg": parameter.detach() * 2, "exp_avg_sq": parameter.detach() * 3}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    state = {"model": model, "optimizer": optimizer}
    if "save" in job:
        fabric.save(job["save"], state)
    else:
        fabric.load(job["load"], state)
    for parameter in model.parameters():
        if not _local(parameter).numel():  # FSDP gives such a parameter no state
            continue
        for name, factor in (("exp_avg", 2), ("exp_avg_sq", 3)):
            assert torch.equal(_local(optimizer.state[parameter][name]), _local(parameter) * factor)
    whole = FSDP.summon_full_params(model._forward_module) if job["strategy"] == "fsdp" else nullcontext()
    with whole:
        parameters = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
        flat = [parameter.detach().flatten() for parameter in parameters]
        return {"right": [bool(torch.equal(values, torch.arange(len(values) * 1.0))) for values in flat]}


def tied(job: Job, fabric: Fabric, ids: Sequence[int]) -> dict[str, Any]:
    """Saves a model of two layers with the same weight, and loads it into another one."""
    models = []
    for value in (job["value"], 0.0):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        layers[1].weight = layers[0].weight
        nn.init.constant_(layers[0].weight, value)
        models.append(fabric.setup_module(nn.Sequential(*layers)))
    fabric.save(job["path"], {"model": models[0]})
    with torch.no_grad():
        for tensor in _tensors(models[0]):
            tensor.fill_(-1.0)  # as a step would
    drain()
    fabric.load(job["path"], {"model": models[1]})
    (weight,) = _tensors(models[1])
    return {"found": weight.unique().tolist(), "nbytes": weight.nbytes}


def stateless(job: Job, fabric: Fabric, ids: Sequence[int]) -> dict[str, Any]:
    """Saves optimizers, one without a state and one that has it of some parameters only, and loads them into others."""
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = fabric.setup_module(nn.Sequential(Block(), nn.Linear(WIDTH, 2, bias=False)))
        parameters = list(model.parameters())
        adam, sgd = torch.optim.Adam(parameters[:2], lr=seed), torch.optim.SGD(parameters[2:], lr=seed)
        optimizers = {"adam": fabric.setup_optimizers(adam), "sgd": fabric.setup_optimizers(sgd)}
        if seed == 1:
            # FSDP gives all parameters of a unit a gradient, or none
            for parameter in parameters[job["strategy"] != "fsdp" :]:
                parameter.grad = torch.ones_like(parameter)
            adam.step()
            sgd.step()
            adam.zero_grad()
            sgd.zero_grad()
        states.append(({"model": model, **optimizers}, (adam, sgd), parameters))
    (saved, *before), (loaded, *after) = states
    told = _attempt(lambda: (fabric.save(job["path"], saved), fabric.load(job["path"], loaded)))
    ends = []
    for optimizers, parameters in (before, after):
        numbers = {parameter: number for number, parameter in enumerate(parameters) if parameter.numel()}
        of = [
            {str(numbers[one]): value for one, value in optimizer.state.items() if one in numbers}
            for optimizer in optimizers
        ]
        groups = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        ends.append(resumes.told({"parameters": parameters, "states": of, "groups": groups}))
    return {**told, "different": resumes.differences(*ends)}


def check(job: Job, fabric: Fabric, ids: Sequence[int]) -> dict[str, Any]:
    """Loads what is in each of several places, and saves another value there, if there is one, and loads that."""
    slowness.begin(job, fabric.global_rank)
    return {"places": [_check(path, job.get("value"), fabric) for path in job["paths"]]}


def _check(path: str, value: float | None, fabric: Fabric) -> dict[str, Any]:
    state = state_of(fabric, 0.0)
    told = _attempt(lambda: fabric.load(path, state))
    told["found"] = values_of(state) if told["error"] is None else None
    if value is None:
        return told
    state = state_of(fabric, value)
    told["saved"] = _attempt(lambda: fabric.save(path, state))["error"]
    if told["saved"] is None:
        state = state_of(fabric, 0.0)
        told["saved"] = _attempt(lambda: fabric.load(path, state))["error"] or values_of(state)
    return told


def _attempt(action: Callable[[], Any]) -> dict[str, Any]:
    began = time.monotonic()
    error = None
    try:
        action()
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "seconds": time.monotonic() - began}


TASKS = {
    "save": save,
    "save_many": save_many,
    "load": load,
    "talk": talk,
    "spread": spread,
    "tied": tied,
    "stateless": stateless,
    "check": check,
}
