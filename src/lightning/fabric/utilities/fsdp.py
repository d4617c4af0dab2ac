"""What Lightning's FSDP strategies need to know about where FSDP computes."""

from torch.nn import Module


def needs_offload(module: Module) -> bool:
    """Whether state has to be offloaded to the CPU, since the FSDP modules inside ``module`` compute elsewhere.

    They do so too when parameters rest on the CPU between computations (``cpu_offload``).
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    devices = [part.compute_device for part in FullyShardedDataParallel.fsdp_modules(module)]
    return any(device is not None and device.type != "cpu" for device in devices)
