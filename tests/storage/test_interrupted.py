"""Processes that get a signal while they overwrite a checkpoint on S3."""

import io
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.servers import Bucket
from tests.storage.saver import NEW, PARAMETERS
from tests.storage.states import checkpoint, serialized, value_of

#: How long the store keeps the process waiting for its second part, if the process does not end before.
HELD_S = 2


def signal_in_the_middle_of_a_save(bucket: Bucket, saver: str, number: int) -> int:
    """Overwrites ``x.ckpt`` in a process that gets the signal when its first part is stored and its second is not.

    Returns:
        What the process returned.
    """
    is_in_the_middle, goes_on = threading.Event(), threading.Event()

    def hold_second_part(method: str, path: str) -> None:
        if "partNumber=2" in path:
            is_in_the_middle.set()
            goes_on.wait(60)

    command = [sys.executable, "-m", "tests.storage.saver", saver, f"{bucket.url}/x.ckpt"]
    with (
        bucket.refusing(hold_second_part),
        subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            while not is_in_the_middle.wait(0.05):
                assert process.poll() is None, process.communicate()
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(HELD_S)
            goes_on.set()
            process.communicate(timeout=60)
        finally:
            goes_on.set()
            process.kill()
    return process.returncode


def load(bucket: Bucket) -> Any:
    return torch.load(io.BytesIO(bucket.get("x.ckpt")), weights_only=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_old_checkpoint_survives_a_process_that_is_ended_while_it_saves(bucket: Bucket, number: int) -> None:
    bucket.put("x.ckpt", serialized(checkpoint(1)))
    assert signal_in_the_middle_of_a_save(bucket, "plugin", number) == -number
    assert bucket.names() == ["x.ckpt"]
    assert value_of(load(bucket)) == 1
    if number == signal.SIGINT:  # after the other, there is nobody who could
        assert bucket.unfinished_uploads() == []


def test_a_trainer_that_is_asked_to_terminate_finishes_the_save_and_ends(bucket: Bucket) -> None:
    bucket.put("x.ckpt", serialized(checkpoint(1)))
    assert signal_in_the_middle_of_a_save(bucket, "trainer", signal.SIGTERM) == 0
    assert bucket.names() == ["x.ckpt"]
    assert torch.equal(load(bucket)["state_dict"]["w"], torch.full((PARAMETERS,), NEW))
    assert bucket.unfinished_uploads() == []
