"""Trains a small model with FSDP on a device, saves and resumes; ``test_ranks.py`` runs it, once for each rank.

``ranks_worker.py RANK WORLD DEVICE BACKEND FOLDER`` prints a line of JSON: for each case of :data:`CASES` what is not
as it should be. All ranks may have the same device, then with gloo.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lightning.fabric import Fabric
from lightning.fabric.plugins import AsyncCheckpointIO
from lightning.fabric.storage.background.pending import drain
from lightning.fabric.storage.strategies.checkpoint_load import load_metadata
from lightning.fabric.strategies import FSDPStrategy, ModelParallelStrategy

MIB = 1 << 20
WIDTH, STEPS = 96, 3


class Case(NamedTuple):
    """A way to train and to save."""

    strategy: str
    kind: str = "sharded"
    optimizer: str = "adam"
    offloads: bool = False
    in_background: bool = False

    def needs_accelerator(self) -> bool:
        return self.optimizer == "capturable" or (self.strategy == "fsdp" and self.offloads)


CASES = [
    case._replace(in_background=in_background)
    for case in (
        Case("fsdp"),
        Case("fsdp", kind="full"),
        Case("fsdp", optimizer="fused"),
        Case("fsdp", optimizer="capturable"),
        Case("fsdp", offloads=True),
        Case("model_parallel"),
        Case("model_parallel", kind="full"),
        Case("model_parallel", optimizer="fused"),
        Case("model_parallel", optimizer="capturable"),
        Case("model_parallel", offloads=True),
    )
    for in_background in (False, True)
]
OPTIMIZERS: dict[str, dict[str, Any]] = {"adam": {}, "fused": {"fused": True}, "capturable": {"capturable": True}}


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class AnyFSDPStrategy(FSDPStrategy):
    """Lightning accepts FSDP on the CPU for a subclass only."""


class Ranks:
    """What the cases of one rank share."""

    def __init__(self, device: str, world: int, folder: Path) -> None:
        self.device = device
        self.world = world
        self.folder = folder

    def check(self, case: Case) -> list[str]:
        """What differs between a training, one that saves in the middle, and one that goes on from there."""
        path = str(self.folder / ("-".join(str(value) for value in case) + ".ckpt"))
        straight = self.train(case, 2 * STEPS)
        saved = self.train(case, 2 * STEPS, save=path)
        resumed = self.train(case, STEPS, load=path)
        wrong = [f"saved: {name}" for name in differing(straight, saved)]
        wrong += [f"resumed: {name}" for name in differing(straight, resumed)]
        return wrong + (self.check_rest(path, straight) if case.kind == "sharded" else [])

    def train(self, case: Case, steps: int, save: str | None = None, load: str | None = None) -> dict[str, Any]:
        plugins: list[Any] = [AsyncCheckpointIO()] if case.in_background else []
        fabric = Fabric(
            accelerator=self.device, devices=1, num_nodes=self.world, strategy=self.strategy(case), plugins=plugins
        )
        fabric.launch()
        torch.manual_seed(7 if load is None else 8)
        model = fabric.setup_module(nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3)))
        self.sum_gradients(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **OPTIMIZERS[case.optimizer])
        state = {"model": model, "optimizer": fabric.setup_optimizers(optimizer), **self.rest(0)}
        if load is not None:
            fabric.load(load, state)
        first = int(state["step"])
        for step in range(first, first + steps):
            batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2 * step + fabric.global_rank))
            optimizer.zero_grad()
            fabric.backward(model(batch.to(fabric.device)).pow(2).mean())
            optimizer.step()
            state |= self.rest(step + 1)
            if save is not None and step + 1 == STEPS:
                fabric.save(save, state)
                for name in self.rest(0):  # a save in the background has what was there when it returned
                    if isinstance(state[name], Tensor):
                        state[name].zero_()
        drain()
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in ends(state, optimizer)}

    def strategy(self, case: Case) -> Any:
        if case.strategy == "fsdp":
            return AnyFSDPStrategy(
                state_dict_type=case.kind, auto_wrap_policy={Block}, cpu_offload=case.offloads, use_orig_params=True
            )
        policy = CPUOffloadPolicy(pin_memory=self.device == "cuda") if case.offloads else OffloadPolicy()

        def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
            for block in [part for part in module.modules() if isinstance(part, Block)]:
                fully_shard(block, mesh=mesh["data_parallel"], offload_policy=policy)
            return fully_shard(module, mesh=mesh["data_parallel"], offload_policy=policy)

        return ModelParallelStrategy(
            parallelize, self.world, tensor_parallel_size=1, save_distributed_checkpoint=case.kind == "sharded"
        )

    def sum_gradients(self, model: nn.Module) -> None:
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # gloo has no average of tensors on CUDA

    def rest(self, step: int) -> dict[str, Any]:
        """What is saved beside the model: the same on each rank, and on the device."""
        at = torch.device(self.device)
        return {
            "step": step,
            "average": torch.full((4 * MIB,), step / 3, device=at),
            "eighth": torch.full((1001,), step + 0.5, device=at).to(torch.float8_e4m3fn),
            "bytes": torch.arange(step, step + 301, device=at).to(torch.uint8),
        }

    def check_rest(self, path: str, straight: dict[str, Any]) -> list[str]:
        """Loads the rest as the strategies do, into host memory: nothing of it may take memory of the device."""
        before = self.most_on_device(reset=True)
        rest = load_metadata(path)
        more = self.most_on_device() - before
        wrong = [] if more == 0 else [f"the rest took {more} bytes of the device"]
        expected = {name: value for name, value in self.rest(STEPS).items()}
        for name, value in expected.items():
            if isinstance(value, Tensor):
                if rest[name].device.type != "cpu":
                    wrong.append(f"rest: {name} is not on the host")
                value = value.cpu()
            wrong += differing({name: value}, {name: rest[name]})
        return wrong

    def most_on_device(self, reset: bool = False) -> int:
        if self.device == "cpu":
            return 0
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()


def ends(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """All that this rank has, by name."""
    yield "step", state["step"]
    for at, parameter in enumerate(optimizer.param_groups[0]["params"]):
        yield f"parameter {at}", local(parameter)
        for name, value in optimizer.state[parameter].items():
            yield f"parameter {at}: {name}", local(value)
    for name in ("average", "eighth", "bytes"):
        yield name, state[name]


def local(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.detach() if isinstance(value, Tensor) else value


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    if left.keys() != right.keys():
        return [f"names: {sorted(left.keys() ^ right.keys())}"]
    return [name for name in left if not same(left[name], right[name])]


def same(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return bool(left == right)
    if (left.device, left.dtype, left.shape) != (right.device, right.dtype, right.shape):
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def main() -> None:
    rank, world, device, backend, folder = sys.argv[1:]
    os.environ.update(LOCAL_RANK="0", NODE_RANK=rank)  # each is the only one of its node, which has one device
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=int(rank), world_size=int(world))
    ranks = Ranks(device, int(world), Path(folder))
    cases = [case for case in CASES if device == "cuda" or not case.needs_accelerator()]
    print(json.dumps({str(tuple(case)): ranks.check(case) for case in cases}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
