"""The devices that FSDP computes on, for Lightning's FSDP strategies."""

from typing import Any

import torch
from torch.nn import Module


def fsdp_device_id(device: torch.device) -> torch.device | int:
    """Returns FSDP's ``device_id`` for the device that it computes on."""
    return device if device.type == "cpu" else device.index


def offload_if_needed(module: Module, *configs: Any) -> None:
    """Lets state be offloaded to the CPU only if the FSDP modules inside ``module`` compute elsewhere.

    They do so too when parameters rest on the CPU between computations (``cpu_offload``).

    Args:
        module: The module.
        configs: The settings for the states of the module and its optimizers, which are changed.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    devices = [part.compute_device for part in FullyShardedDataParallel.fsdp_modules(module)]
    for config in configs:
        config.offload_to_cpu = any(device is not None and device.type != "cpu" for device in devices)
