"""Training runs in processes of their own, which a test sends signals.

``python -m tests.pytorch.interruptible`` imports everything once. For each line of JSON it forks a process for a job,
and tells its id; for an id that it reads, it waits for the end of that process and tells its exit status.
"""

import gc
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed._composable.fsdp import fully_shard

from lightning.fabric.storage.background.queue import Queue
from lightning.fabric.storage.sharded.writer import ShardWriter
from lightning.fabric.utilities.cloud_io import _is_object_storage
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from tests.pytorch.background_runs import PATIENCE_S, HeldIO, Model, Pace, make_trainer, wait_for

Job = dict[str, Any]


class Processes:
    """Starts jobs. What they print is in ``output.txt`` in their folders."""

    def __init__(self, server: "subprocess.Popen[str]") -> None:
        self._server = server

    def start(self, task: str, folder: Path, **job: Any) -> int:
        return int(self._ask(json.dumps({"task": task, "folder": str(folder), **job})))

    def wait(self, pid: int) -> int:
        """The exit status, negative for a signal."""
        return int(self._ask(str(pid)))

    def _ask(self, line: str) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()


@contextmanager
def running() -> Iterator[Processes]:
    """Starts the process that forks, and ends it with all that it has forked."""
    command = [sys.executable, "-m", __name__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Processes(server)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path}"
        time.sleep(0.01)


def until_signalled(job: Job) -> None:
    """Saves at the second step, and then waits for a signal; alone or, as ``rank`` says, as one of two.

    The first save goes on when there is a file ``release``, the others when there is one ``release all``.
    """
    folder = Path(job["folder"])
    io = HeldIO(job["failing"])
    number = job.get("rank")

    def release() -> None:
        wait_for_file(folder / "release")
        io.release(1)
        wait_for_file(folder / "release all")
        io.release()

    threading.Thread(target=release, daemon=True).start()

    def act(step: int) -> None:
        if step == 2:
            if not number:
                io.wait_for_begin(1)
            (folder / ("waiting" if number is None else f"waiting-{number}")).touch()
            deadline = time.monotonic() + PATIENCE_S
            while not trainer.received_sigterm and not (folder / "requeued").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)

    checkpoint = ModelCheckpoint(dirpath=folder, every_n_train_steps=2)
    options = {} if number is None else _joined(folder, number)
    trainer = make_trainer(AsyncCheckpointIO(io, **job["options"]), folder, checkpoint, **options)
    trainer.fit(Model([4.0, 3.0, 2.0, 1.0], act))


def _joined(folder: Path, number: int) -> dict[str, Any]:
    """What a Trainer takes in one of two processes, which have found each other."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    return {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}


class ShardedModel(Model):
    """The same, of which each of two ranks has a half."""

    def configure_model(self) -> None:
        self.layer = fully_shard(torch.nn.Linear(2, 2), mesh=self.device_mesh["data_parallel"])


def _shards_fail(numbers: list[int]) -> None:
    """Lets the shards of this rank fail at some saves, which count from zero."""
    write, count = ShardWriter._write, itertools.count()

    def failing(*arguments: Any) -> Any:
        if next(count) in numbers:
            raise OSError("no room for a shard")
        return write(*arguments)

    ShardWriter._write = failing  # type: ignore[method-assign]


def _first_end_is_noticed_late(may_end: threading.Event) -> None:
    """Lets the training thread of this rank see the end of the first save when the event is set."""
    end = Queue._end

    def late(*arguments: Any) -> None:
        assert may_end.wait(PATIENCE_S)
        end(*arguments)

    Queue._end = late  # type: ignore[method-assign]


def rank(job: Job) -> None:
    """Trains in two processes, and writes what ModelCheckpoint knows at each step and at the end.

    One of them (``late_rank``) notices the end of the first save at step ``late_step``, the other one a step earlier.
    """
    number, folder = job["rank"], Path(job["folder"])
    options = _joined(folder, number)
    io = HeldIO(job["failing"])
    known: list[Any] = []
    told: dict[str, Any] = {"known": known, "error": None}
    may_end = threading.Event()
    if number == job.get("late_rank"):
        _first_end_is_noticed_late(may_end)

    def act(step: int) -> None:
        told["step"] = step
        if step == job.get("late_step", 0) - (number != job.get("late_rank")):
            may_end.set()
            wait_for(pace.saves[:1])

    def look() -> None:
        scores = {path: score.item() for path, score in checkpoint.best_k_models.items()}
        fields = {name: value for name, value in vars(checkpoint).items() if isinstance(value, str | int)}
        known.append([scores, fields])

    checkpoint = ModelCheckpoint(folder / "kept", **{"every_n_train_steps": 1, **job["checkpoint"]})
    plugin = AsyncCheckpointIO(io, **{"max_in_flight": 2, **job["options"]})
    model = Model(job["scores"], act)
    if job.get("is_sharded"):
        options["strategy"] = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        model = ShardedModel(job["scores"], act)
        if number == 1:
            _shards_fail(job["failing"])
    pace = Pace(io, job["lag"], look, job["late"])
    trainer = make_trainer(plugin, folder, checkpoint, pace, **options)
    try:
        trainer.fit(model)
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        look()
        (folder / f"rank-{number}.json").write_text(json.dumps(told))


def failing(job: Job) -> None:
    """Fails at the second step as one of two processes, cannot save then, and writes what was raised."""
    number, folder = job["rank"], Path(job["folder"])

    def act(step: int) -> None:
        if step == 1:
            raise ValueError("boom")

    plugin = AsyncCheckpointIO() if job["in_background"] else TorchCheckpointIO()
    trainer = make_trainer(plugin, folder, OnExceptionCheckpoint(job["url"]), **_joined(folder, number))
    try:
        trainer.fit(Model([2.0, 1.0], act))
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}", "shown": "".join(traceback.format_exception(error))}
        (folder / f"rank-{number}.json").write_text(json.dumps(told))


def logged_at_nowhere(job: Job) -> None:
    """Trains with logs, and checkpoints, in a bucket that is missing: at the root of the run, or as loggers have it."""
    url = "s3://no-such-bucket/run"
    loggers: dict[str, Any] = {"logger": [CSVLogger(url), TensorBoardLogger(url)]}
    io, callbacks = TorchCheckpointIO(), [] if job["kind"] == "root" else [ModelCheckpoint(url)]
    given = {"root": url, "logger": None} if job["kind"] == "root" else {"root": job["folder"], **loggers}
    make_trainer(io, given.pop("root"), *callbacks, **given).fit(Model([2.0, 1.0]))


def saved_at_nowhere(job: Job) -> None:
    """Trains as one of two processes which cannot save, and tells the steps that were done."""
    steps: list[int] = []
    checkpoint = ModelCheckpoint("s3://no-such-bucket/run")
    folder = Path(job["folder"])
    trainer = make_trainer(TorchCheckpointIO(), folder, checkpoint, **_joined(folder, job["rank"]))
    try:
        trainer.fit(Model([2.0, 1.0], steps.append))
    except FileNotFoundError as error:
        print(f"steps: {len(steps)}, error: {error}")


def _serve() -> None:
    _is_object_storage(LocalFileSystem())  # which imports what is installed for object stores
    gc.freeze()  # at its end a fork would look through all that it shares, which takes longer than most of the jobs
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            _, status = os.waitpid(asked, 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _run(asked)
            return
        print(pid, flush=True)


def _run(job: Job) -> None:
    output = os.open(Path(job["folder"]) / job.get("output", "output.txt"), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(job.get("environment", {}))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    getattr(importlib.import_module("tests.pytorch.interruptible"), job["task"])(job)


if __name__ == "__main__":
    _serve()
