"""Waits of ranks for each other, beside the saves and loads that use them."""

import subprocess
import sys
from pathlib import Path

#: Prints whether the rounds had ended when the interpreter did, to which functions are called last in, first out.
_INTERRUPTED = """
import atexit, sys, time
import torch
from lightning.fabric.storage.collectives.channel import Channel
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
atexit.register(lambda: print(channel._before.done()))
channel = Channel()
try:
    with channel.talking(), channel.working("save"):
        time.sleep(0.3 * rank)
        raise KeyboardInterrupt
except KeyboardInterrupt:
    pass
"""


def test_the_interpreter_ends_after_the_last_exchange_which_would_abort_it(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", _INTERRUPTED, str(rank), str(tmp_path / "store")] for rank in (0, 1)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["True\n"] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]
