"""Measures whichever Lightning is installed in the environment that runs it; only what every release offers is used.

Each line of standard input asks for one measurement (see ``run.py``), and is answered by one line of JSON; before that,
``"ready"`` says that all is prepared, and an empty line starts what is measured. Lightning is imported once; a
measurement runs in a fork of that process, so that none meets the memory or the connections of another.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import background
import files
import fsspec.config
import s3fs  # noqa: F401  # here, rather than in each measurement
import sharded
import torch
from measuring import Meter, answer

import lightning

MEASUREMENTS: dict[str, Any] = {
    function.__name__: function for module in (files, sharded, background) for function in module.MEASUREMENTS
}


def describe() -> dict[str, str]:
    """Versions of what is measured."""
    versions = {"lightning": lightning.__version__, "torch": torch.__version__}
    for name in ("fsspec", "s3fs", "obstore"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def measure(request: dict[str, Any], rank: int, port: int) -> None:
    """Does what was asked for, as one of the ranks if there are several; does not return."""
    fsspec.config.conf["s3"] = request["s3"]
    if request["ranks"] > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    result = MEASUREMENTS[request["measure"]](Meter(), **request["arguments"])
    if rank == 0:
        answer(result)
    os._exit(0)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """Answers requests until standard input ends."""
    os.dup2(2, 1)  # what Lightning prints is no answer
    answer(describe())
    for line in sys.stdin:
        request = json.loads(line)
        port = free_port()
        children = set()
        for rank in range(request["ranks"]):
            child = os.fork()
            if not child:
                measure(request, rank, port)
            children.add(child)
        while children:
            ended, status = os.wait()
            children.remove(ended)
            if status:
                for child in children:  # else they would wait for the one that has failed
                    os.kill(child, signal.SIGKILL)
                sys.exit(f"{request['measure']} failed")


if __name__ == "__main__":
    main()
