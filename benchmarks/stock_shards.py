"""Sharded checkpoints at a URL with stock Lightning, which knows of local folders only.

What stock Lightning gives to torch's writer and reader of local folders goes to torch's fsspec ones, which are what can
be had without this Lightning.
"""

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measuring import rank
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

from lightning.fabric.plugins import TorchCheckpointIO

OPTIONS = state_dict.StateDictOptions(cpu_offload=True)
FSDP1_KINDS = ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)


def collect(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """What this rank has of a model's and an optimizer's state, in host memory."""
    if FSDP1.fsdp_modules(module) and optimizer is not None:
        with FSDP1.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, *FSDP1_KINDS):
            return {"model": module.state_dict(), "optimizer": FSDP1.optim_state_dict(module, optimizer)}
    state = {"model": state_dict.get_model_state_dict(module, options=OPTIONS)}
    if optimizer is not None:
        state["optimizer"] = _of_optimizer(module, optimizer)
    return state


def save(url: str, shards: dict[str, Any], rest: dict[str, Any]) -> None:
    """Saves what each rank has, and the rest from rank zero."""
    dcp.save(shards, storage_writer=FsspecWriter(url))
    if rank() == 0:
        TorchCheckpointIO().save_checkpoint(rest, f"{url}/meta.pt")


def load(url: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Loads into a model and an optimizer, one after the other."""
    if FSDP1.fsdp_modules(module) and optimizer is not None:
        _load_fsdp1(url, module, optimizer)
        return
    model = {"model": state_dict.get_model_state_dict(module, options=OPTIONS)}
    dcp.load(model, storage_reader=FsspecReader(url))
    module.load_state_dict(model["model"])
    if optimizer is not None:
        state = {"optimizer": _of_optimizer(module, optimizer)}
        dcp.load(state, storage_reader=FsspecReader(url))
        state_dict.set_optimizer_state_dict(module, optimizer, optim_state_dict=state["optimizer"], options=OPTIONS)
    TorchCheckpointIO().load_checkpoint(f"{url}/meta.pt")


def _of_optimizer(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return state_dict.get_optimizer_state_dict(module, optimizer, options=OPTIONS)


def _load_fsdp1(url: str, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with FSDP1.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, *FSDP1_KINDS):
        model = {"model": module.state_dict()}
        dcp.load(model, storage_reader=FsspecReader(url))
        module.load_state_dict(model["model"])
        saved = load_sharded_optimizer_state_dict(model["model"], "optimizer", FsspecReader(url))
        flat = FSDP1.optim_state_dict_to_load(module, optimizer, saved["optimizer"])
    optimizer.load_state_dict(flat)
    TorchCheckpointIO().load_checkpoint(f"{url}/meta.pt")
