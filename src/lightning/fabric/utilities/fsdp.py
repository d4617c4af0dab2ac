"""What Lightning's FSDP strategies need to know about where FSDP computes."""

from typing import Any

import torch
from torch.nn import Module


def device_id(device: torch.device) -> torch.device | int:
    """Returns what FSDP takes for the device that it computes on."""
    return device if device.type == "cpu" else device.index


def offload_if_needed(module: Module, *configs: Any) -> None:
    """Has state offloaded to the CPU if the FSDP modules inside ``module`` compute elsewhere, and else not.

    They do so too when parameters rest on the CPU between computations (``cpu_offload``).

    Args:
        module: The module.
        configs: Settings for the state of a module or optimizer.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    devices = [part.compute_device for part in FullyShardedDataParallel.fsdp_modules(module)]
    for config in configs:
        config.offload_to_cpu = any(device is not None and device.type != "cpu" for device in devices)
