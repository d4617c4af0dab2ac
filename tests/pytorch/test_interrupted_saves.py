"""Runs with saves in the background that are ended by a signal, and those of several processes."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pytorch.background_runs import step_of
from tests.pytorch.interruptible import PATIENCE_S, Processes, running, wait_for_file
from tests.servers import Bucket


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with running() as started:
        yield started


CHECKPOINT = "epoch=0-step=2.ckpt"


def start(processes: Processes, folder: Path, failing: tuple[int, ...] = (), **job: Any) -> int:
    """A run that has a save in the background, and waits for a signal."""
    pid = processes.start("until_signalled", folder, failing=failing, **{"options": {}, **job})
    wait_for_file(folder / "waiting")
    return pid


def wait_for_output(folder: Path, text: str, name: str = "output.txt") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while text not in (folder / name).read_text():
        assert time.monotonic() < deadline, (folder / name).read_text()
        time.sleep(0.01)


def release_later(folder: Path, name: str = "release", before: str = CHECKPOINT) -> None:
    """Lets a save go on when a run that does not wait for it would have ended."""
    time.sleep(0.3)
    assert not {before, "requeued"} & set(os.listdir(folder))
    (folder / name).touch()


def test_ctrl_c_waits_for_the_save_that_is_on_its_way(processes: Processes, tmp_path: Path) -> None:
    pid = start(processes, tmp_path)
    os.kill(pid, signal.SIGINT)
    wait_for_output(tmp_path, "graceful shutdown")
    release_later(tmp_path)
    assert processes.wait(pid) == 1  # as Lightning ends after Ctrl-C
    assert torch.load(tmp_path / CHECKPOINT, weights_only=False)["global_step"] == 2


def test_a_second_ctrl_c_gives_up_at_once_and_says_what_was_not_saved(processes: Processes, tmp_path: Path) -> None:
    pid = start(processes, tmp_path)
    os.kill(pid, signal.SIGINT)
    wait_for_output(tmp_path, "graceful shutdown")
    began = time.monotonic()
    while "not saved" not in (tmp_path / "output.txt").read_text():  # the first may come before it waits
        assert time.monotonic() < began + PATIENCE_S / 2, (tmp_path / "output.txt").read_text()
        os.kill(pid, signal.SIGINT)
        time.sleep(0.05)
    assert processes.wait(pid) != 0
    assert time.monotonic() < began + PATIENCE_S / 2
    assert f"{tmp_path / CHECKPOINT} was not saved" in (tmp_path / "output.txt").read_text()
    assert not (tmp_path / CHECKPOINT).exists()


def test_sigterm_waits_for_the_save_that_is_on_its_way(processes: Processes, tmp_path: Path) -> None:
    pid = start(processes, tmp_path)
    os.kill(pid, signal.SIGTERM)
    wait_for_output(tmp_path, "Received SIGTERM")
    release_later(tmp_path)
    processes.wait(pid)
    assert torch.load(tmp_path / CHECKPOINT, weights_only=False)["global_step"] == 2


def slurm(folder: Path, tasks: int) -> dict[str, str]:
    """The environment of a job that is asked to be requeued by what leaves files in a folder."""
    command = folder / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked; ls {folder} > {folder}/requeued\n')
    command.chmod(0o755)
    names = {"NTASKS": str(tasks), "NTASKS_PER_NODE": str(tasks), "JOB_NAME": "train", "JOB_ID": "7", "NODEID": "0"}
    environment = {f"SLURM_{name}": value for name, value in names.items()}
    return {**environment, "PATH": f"{command.parent}:{os.environ['PATH']}"}


def test_slurm_is_asked_to_requeue_when_the_checkpoint_for_it_is_durable_even_if_an_earlier_save_failed(
    processes: Processes, tmp_path: Path
) -> None:
    environment = {**slurm(tmp_path, 1), "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    # a save that comes now would be skipped, if the one before were not waited for
    options = {"when_busy": "skip"}
    pid = start(processes, tmp_path, failing=(0,), environment=environment, options=options)
    os.kill(pid, signal.SIGUSR1)
    wait_for_output(tmp_path, "Handling auto-requeue")
    release_later(tmp_path)
    wait_for_output(tmp_path, "no room for")
    release_later(tmp_path, "release all")
    assert processes.wait(pid) == 0
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert "hpc_ckpt_1.ckpt" in (tmp_path / "requeued").read_text().split()


def start_ranks(processes: Processes, task: str, folder: Path, environment: dict[str, str], **job: Any) -> list[int]:
    def start(rank: int) -> int:
        own = {**environment, "LOCAL_RANK": str(rank)}
        if environment:
            own.update(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
        return processes.start(task, folder, environment=own, rank=rank, output=f"output-{rank}.txt", **job)

    return [start(rank) for rank in (0, 1)]


def run_ranks(processes: Processes, folder: Path, **job: Any) -> tuple[list[int], list[dict[str, Any]]]:
    """The exit statuses of two ranks, and what they tell."""
    job = {"options": {}, "lag": 1, "late": False, **job}
    pids = start_ranks(processes, "rank", folder, {}, **job)
    return [processes.wait(pid) for pid in pids], [json.loads((folder / f"rank-{n}.json").read_text()) for n in (0, 1)]


def test_slurm_is_asked_to_requeue_two_processes_when_the_checkpoint_for_them_is_durable(
    processes: Processes, tmp_path: Path
) -> None:
    job = {"failing": (), "options": {"when_busy": "skip"}}
    pids = start_ranks(processes, "until_signalled", tmp_path, slurm(tmp_path, 2), **job)
    for rank, pid in enumerate(pids):
        wait_for_file(tmp_path / f"waiting-{rank}")
        os.kill(pid, signal.SIGUSR1)
    wait_for_output(tmp_path, "Handling auto-requeue", "output-0.txt")
    release_later(tmp_path)
    wait_for_file(tmp_path / CHECKPOINT)
    release_later(tmp_path, "release all", before="requeued")
    assert [processes.wait(pid) for pid in pids] == [0, 0], (tmp_path / "output-0.txt").read_text()
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert "hpc_ckpt_1.ckpt" in (tmp_path / "requeued").read_text().split()


def test_a_rank_that_gets_sigterm_twice_does_not_hang_the_others(processes: Processes, tmp_path: Path) -> None:
    """So it is where a launcher passes on the signal that the whole process group has got."""
    pids = start_ranks(processes, "until_signalled", tmp_path, {}, failing=(), options={})
    for rank in (1, 0):
        wait_for_file(tmp_path / f"waiting-{rank}")
    for _ in range(2):
        os.kill(pids[1], signal.SIGTERM)
        time.sleep(0.2)
    os.kill(pids[0], signal.SIGTERM)
    wait_for_output(tmp_path, "Received SIGTERM", "output-0.txt")
    release_later(tmp_path)
    for pid in pids:
        processes.wait(pid)
    assert torch.load(tmp_path / CHECKPOINT, weights_only=False)["global_step"] == 2


@pytest.mark.parametrize(
    ("checkpoint", "more"),
    [
        ({"save_top_k": 2, "monitor": "score", "save_last": "link"}, {}),
        ({"save_top_k": 1, "monitor": "score", "save_last": True}, {"late": True}),
        ({"save_top_k": 2, "monitor": "score"}, {"is_sharded": True}),
    ],
)
def test_ranks_agree_on_what_was_saved_at_every_step(
    checkpoint: dict[str, Any], more: dict[str, Any], processes: Processes, tmp_path: Path
) -> None:
    job = {"checkpoint": checkpoint, "options": {"on_error": "warn"}, "failing": [0, 3, 6], **more}
    scores = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0] if "late" in more else [5.0, 3.0, 4.0, 2.0, 6.0, 2.5, 7.0]
    statuses, (one, other) = run_ranks(processes, tmp_path, scores=scores, **job)
    first, second = one["known"], other["known"]
    assert statuses == [0, 0], (tmp_path / "output-0.txt").read_text()
    assert first == second
    best, fields = first[-1]
    kept = {str(path) for path in (tmp_path / "kept").iterdir() if path.is_file() or any(path.iterdir())}
    assert {fields["best_model_path"], fields["last_model_path"], *best} - {""} == kept
    assert len(first) == len(scores) + 2


@pytest.mark.parametrize("is_sharded", [False, True])
def test_ranks_leave_out_the_same_saves_that_come_too_early(
    is_sharded: bool, processes: Processes, tmp_path: Path
) -> None:
    checkpoint = {"save_top_k": -1, "monitor": "score"}
    job = {"checkpoint": checkpoint, "options": {"when_busy": "skip", "max_in_flight": 1}, "is_sharded": is_sharded}
    late = {"late_rank": 0, "late_step": 2, "failing": [], "lag": None}
    statuses, (one, other) = run_ranks(processes, tmp_path, scores=[4.0, 3.0, 2.0, 1.0], **job, **late)
    assert statuses == [0, 0], (tmp_path / "output-0.txt").read_text()
    assert one == other
    best, _ = one["known"][-1]
    assert [step_of(path) for path in best][:1] == [1]
    assert 2 not in {step_of(path) for path in best}
    assert {os.path.basename(path) for path in best} == set(os.listdir(tmp_path / "kept"))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_save_that_failed_stops_all_ranks_at_the_same_step(
    is_sharded: bool, processes: Processes, tmp_path: Path
) -> None:
    job = {"checkpoint": {"every_n_train_steps": 5}, "failing": [0], "lag": None, "is_sharded": is_sharded}
    scores = [float(score) for score in range(12)]
    statuses, told = run_ranks(processes, tmp_path, scores=scores, late_rank=0, late_step=7, **job)
    assert statuses == [1, 1], [(tmp_path / f"output-{rank}.txt").read_text() for rank in (0, 1)]
    assert [one["step"] for one in told] == [7, 7]
    assert [one["known"][-1][1]["_last_checkpoint_saved"] for one in told] == ["", ""]
    reason = r"OSError: Could not save .*{}: rank 1: OSError: no room" if is_sharded else r"OSError: .*no room for .*{}"
    for one in told:
        assert re.match(reason.format("epoch=0-step=5.ckpt"), one["error"]), one["error"]


@pytest.mark.parametrize(
    "checkpoint", [{"every_n_train_steps": 3}, {"every_n_train_steps": 100, "save_last": True}], ids=["step", "end"]
)
def test_a_save_that_failed_fails_all_ranks_at_the_end_of_training(
    checkpoint: dict[str, Any], processes: Processes, tmp_path: Path
) -> None:
    statuses, told = run_ranks(processes, tmp_path, scores=[3.0, 2.0, 1.0], checkpoint=checkpoint, failing=[0])
    assert statuses == [1, 1], [(tmp_path / f"output-{rank}.txt").read_text() for rank in (0, 1)]
    for one, reason in zip(told, ["OSError: no room for", "OSError: rank 0: OSError: no room for"], strict=True):
        assert one["error"].startswith(reason)
        assert one["known"][-1] == told[0]["known"][-1]
        assert one["known"][-1][1]["_last_checkpoint_saved"] == ""


@pytest.mark.parametrize("in_background", [False, True])
def test_every_rank_ends_with_its_exception_when_the_save_after_it_fails(
    in_background: bool, processes: Processes, bucket: Bucket, tmp_path: Path
) -> None:
    url = "s3://there-is-no-such-bucket/run"
    job = {"url": url, "in_background": in_background}
    pids = start_ranks(processes, "failing", tmp_path, bucket.server.environment, **job)
    assert [processes.wait(pid) for pid in pids] == [0, 0], (tmp_path / "output-0.txt").read_text()
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["error"] for one in told] == ["ValueError: boom"] * 2
    assert url in told[0]["shown"]
