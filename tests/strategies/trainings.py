"""Training runs with two ranks, and how their end states differ."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.strategies.forks import Forks

WORKER = Path(__file__).with_name("worker.py")
#: For each, what it has in the end.
Ranks = list[dict[str, Any]]


class Runs:
    """Runs of ``worker.py``, each in a folder of its own that is its working directory too."""

    def __init__(self, root: Path, forks: Forks) -> None:
        self.root = root
        self.forks = forks
        self.count = itertools.count()

    def folder(self, **case: Any) -> Path:
        folder = self.root / f"run-{next(self.count)}"
        folder.mkdir()
        (folder / "case.json").write_text(json.dumps(case))
        return folder

    def start(self, env: dict[str, str], **case: Any) -> tuple[Path, subprocess.CompletedProcess[str]]:
        """As a user does, with Lightning's launcher for the second rank."""
        folder = self.folder(**case)
        command = [sys.executable, str(WORKER), str(folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        return folder, subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
        )

    def launch(self, env: dict[str, str] | None = None, **case: Any) -> Ranks:
        """The end states of both ranks of a run that :meth:`start` starts and that succeeds."""
        folder, result = self.start(env or {}, **case)
        assert result.returncode == 0, result.stdout + result.stderr
        return self.ends(folder)

    def train(self, environments: Sequence[dict[str, str]] = ({}, {}), **case: Any) -> Ranks:
        """The same with ranks that are forked, which takes a fraction of the time.

        Args:
            environments: What each rank has beside this process's environment.
            case: For the worker.
        """
        folder = self.folder(**case)
        own = [{**os.environ, **environment} for environment in environments]
        job = {"task": "train", "folder": str(folder), "environments": own}
        errors = [outcome["error"] for outcome in self.forks.run(job)]
        assert errors == [None, None], errors
        return self.ends(folder)

    def ends(self, folder: Path) -> Ranks:
        assert sorted(os.listdir(folder)) == ["case.json", "rank-0.pt", "rank-1.pt"]  # and no folder called `s3:`
        return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Where two states are not the same bit for bit; DCP gives a tuple back as a list."""
    sequences = isinstance(left, (list, tuple)) and isinstance(right, (list, tuple))
    if type(left) is not type(right) and not sequences:
        return [where]
    if isinstance(left, torch.Tensor):
        return [] if torch.equal(left, right) else [where]
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f"{where}: keys"]
        return [d for key in left for d in differences(left[key], right[key], f"{where}/{key}")]
    if sequences:
        if len(left) != len(right):
            return [f"{where}: length"]
        return [d for i in range(len(left)) for d in differences(left[i], right[i], f"{where}/{i}")]
    return [] if left == right else [where]
