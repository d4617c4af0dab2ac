"""Describes the machine beside the figures of its GPU.

``python benchmarks/gpu/machine.py`` prints a line of JSON, and fails where there is no CUDA device.
"""

import json
import os
import platform
import subprocess
import sys
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Returns names and versions of all that figures depend on; without a device those of the device are missing."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    machine = {
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if not torch.cuda.is_available():
        return machine
    properties = torch.cuda.get_device_properties(0)
    return machine | {
        "devices": torch.cuda.device_count(),
        "device": properties.name,
        "device_memory_gib": round(properties.total_memory / 2**30),
        "cuda": torch.version.cuda or f"ROCm {torch.version.hip}",
        "driver": driver(),
    }


def driver() -> str:
    """The driver's version as its own tool says it, which is not everywhere."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not known ({error})"


def require_device() -> None:
    """Ends the process with a message where there is no CUDA device."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = f"which is built for {built} and finds none" if built else "which is built for CPUs only"
        sys.exit(
            f"There is no CUDA device for torch {torch.__version__}, {why}. Run this on a machine with a GPU, with a"
            " Python whose torch is built for it: tests/gpu/offline.sh brings all else along."
        )


if __name__ == "__main__":
    require_device()
    print(json.dumps(describe()))
