"""Processes that get a signal while they overwrite a checkpoint on S3."""

import io
import re
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


def signal_in_the_middle_of_a_save(bucket: Bucket, number: int, held_s: float, *saver: str) -> int:
    """Overwrites ``x.ckpt`` in a process that gets a signal while all parts but the first are held up.

    These are more parts than are on their way at a time, so that there is something left to stop.

    Args:
        bucket: Where to.
        number: The signal.
        held_s: For how many seconds after it the parts are held up, if the process does not end before.
        saver: How :mod:`tests.storage.saver` is to save.

    Returns:
        What the process returned.
    """
    is_in_the_middle, goes_on = threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        number = re.search(r"partNumber=(\d+)", path)
        if number is not None and number[1] != "1":
            is_in_the_middle.set()
            goes_on.wait(60)

    command = [sys.executable, "-m", "tests.storage.saver", f"{bucket.url}/x.ckpt", *saver]
    with (
        bucket.refusing(hold),
        subprocess.Popen(command, cwd=Path(__file__).parents[3], stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            while not is_in_the_middle.wait(0.05):
                assert process.poll() is None, process.communicate()
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(held_s)
            goes_on.set()
            process.communicate(timeout=60)
        finally:
            goes_on.set()
            process.kill()
    return process.returncode


def load(bucket: Bucket) -> Any:
    return torch.load(io.BytesIO(bucket.get("x.ckpt")), weights_only=False)


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_ctrl_c_in_the_middle_of_a_save_takes_it_back(bucket: Bucket, engine: str) -> None:
    if engine == "obstore":
        pytest.importorskip("obstore")
    bucket.put("x.ckpt", serialized(checkpoint(1)))
    assert signal_in_the_middle_of_a_save(bucket, signal.SIGINT, 5, "plugin", engine) == -signal.SIGINT
    assert value_of(load(bucket)) == 1
    assert bucket.names() == ["x.ckpt"]
    assert bucket.unfinished_uploads() == []


def test_the_old_checkpoint_survives_a_process_that_is_killed_while_it_saves(bucket: Bucket) -> None:
    bucket.put("x.ckpt", serialized(checkpoint(1)))
    assert signal_in_the_middle_of_a_save(bucket, signal.SIGKILL, 5, "plugin") == -signal.SIGKILL
    assert value_of(load(bucket)) == 1
    assert bucket.names() == ["x.ckpt"]


def test_a_trainer_that_is_asked_to_terminate_finishes_the_save_and_ends(bucket: Bucket) -> None:
    bucket.put("x.ckpt", serialized(checkpoint(1)))
    assert signal_in_the_middle_of_a_save(bucket, signal.SIGTERM, 0.5, "trainer") == 0
    assert torch.equal(load(bucket)["state_dict"]["w"], torch.full((PARAMETERS,), NEW))
    assert bucket.names() == ["x.ckpt"]
    assert bucket.unfinished_uploads() == []
