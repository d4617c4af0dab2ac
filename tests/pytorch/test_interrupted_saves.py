"""Runs with saves in the background that are ended by a signal, and those of several processes."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pytorch.interruptible import PATIENCE_S, Processes, running, wait_for_file


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


def wait_for_output(folder: Path, text: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while text not in (folder / "output.txt").read_text():
        assert time.monotonic() < deadline, (folder / "output.txt").read_text()
        time.sleep(0.01)


def release_later(folder: Path, name: str = "release") -> None:
    """Lets a save go on when a run that does not wait for it would have ended."""
    time.sleep(0.3)
    assert not {CHECKPOINT, "requeued"} & set(os.listdir(folder))
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


def test_slurm_is_asked_to_requeue_when_the_checkpoint_for_it_is_durable_even_if_an_earlier_save_failed(
    processes: Processes, tmp_path: Path
) -> None:
    command = tmp_path / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked; ls {tmp_path} > {tmp_path}/requeued\n')
    command.chmod(0o755)
    slurm = {"NTASKS": "1", "NTASKS_PER_NODE": "1", "JOB_NAME": "train", "JOB_ID": "7", "PROCID": "0", "LOCALID": "0"}
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    environment["PATH"] = f"{command.parent}:{os.environ['PATH']}"
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


def run_ranks(processes: Processes, folder: Path, **job: Any) -> tuple[list[int], list[Any]]:
    """The exit statuses of two ranks, and what they knew."""
    pids = [
        processes.start("rank", folder, environment={"LOCAL_RANK": str(rank)}, output=f"output-{rank}.txt", **job)
        for rank in (0, 1)
    ]
    return [processes.wait(pid) for pid in pids], [json.loads((folder / f"rank-{n}.json").read_text()) for n in (0, 1)]


@pytest.mark.parametrize(
    ("checkpoint", "late"),
    [
        ({"save_top_k": 2, "monitor": "score", "save_last": "link"}, False),
        ({"save_top_k": 1, "monitor": "score", "save_last": True}, True),
    ],
)
def test_ranks_agree_on_what_was_saved_at_every_step(
    checkpoint: dict[str, Any], late: bool, processes: Processes, tmp_path: Path
) -> None:
    job = {"checkpoint": checkpoint, "options": {"on_error": "warn"}, "failing": [0, 3, 6], "lag": 1, "late": late}
    scores = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0] if late else [5.0, 3.0, 4.0, 2.0, 6.0, 2.5, 7.0]
    statuses, (first, second) = run_ranks(processes, tmp_path, scores=scores, **job)
    assert statuses == [0, 0], (tmp_path / "output-0.txt").read_text()
    assert first == second
    best, fields = first[-1]
    kept = {str(tmp_path / "kept" / name) for name in os.listdir(tmp_path / "kept")}
    assert {fields["best_model_path"], fields["last_model_path"], *best} == kept
    assert len(first) == len(scores) + 2


@pytest.mark.parametrize(
    "checkpoint", [{"every_n_train_steps": 3}, {"every_n_train_steps": 100, "save_last": True}], ids=["step", "end"]
)
def test_a_save_that_failed_fails_all_ranks_at_the_end_of_training(
    checkpoint: dict[str, Any], processes: Processes, tmp_path: Path
) -> None:
    job = {"checkpoint": checkpoint, "options": {}, "failing": [0], "lag": 1, "late": False}
    statuses, known = run_ranks(processes, tmp_path, scores=[3.0, 2.0, 1.0], **job)
    assert statuses == [1, 1]
    for rank, output in enumerate(["OSError: no room for", "OSError: rank 0: OSError: no room for"]):
        assert output in (tmp_path / f"output-{rank}.txt").read_text()
    assert known[0][-1] == known[1][-1]
    assert known[0][-1][1]["_last_checkpoint_saved"] == ""
