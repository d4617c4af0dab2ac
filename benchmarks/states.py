"""States to save and to load: models whose tensors have a number each, so that what was loaded can be compared."""

from typing import Any

import torch
from figures import RANKS
from measuring import MIB, rank
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor


class Layer(torch.nn.Module):
    """Parameters of float32 by number, each of so many bytes of every rank."""

    def __init__(self, sizes: dict[int, int]) -> None:
        super().__init__()
        for number, size in sizes.items():
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.zeros(RANKS, size // 4)))


def one_huge(mib: int) -> torch.nn.Module:
    """A model that takes ``mib`` MiB of a rank with its momenta, three quarters of that for one parameter."""
    sizes = [mib * MIB * 3 // 8, mib * MIB // 16, mib * MIB // 16]
    return torch.nn.Sequential(*(Layer({number: size}) for number, size in enumerate(sizes)))


def many_small(tensors: int, kib: int, kinds: int = 1) -> torch.nn.Module:
    """A model of parameters of ``kib`` KiB a rank; of several kinds in turn, all of a kind before those of the next."""
    return Layer({number: kib * 1024 for number in sorted(range(tensors), key=lambda number: number % kinds)})


def whole(mib: int, tensor_mib: int) -> torch.nn.Module:
    """A model of ``mib`` MiB with its momenta, in tensors of ``tensor_mib``."""
    return Layer(dict.fromkeys(range(mib // tensor_mib // 2), tensor_mib * MIB // RANKS))


def shard(model: torch.nn.Module, strategy: str, mesh: Any = None) -> torch.nn.Module:
    """Shards a model for ``"fsdp2"``, on a mesh, or for ``"fsdp1"``; for ``""`` it stays as it is."""
    if strategy == "fsdp2":
        fully_shard(model, mesh=mesh["data_parallel"])
    elif strategy == "fsdp1":  # wrapped here, for stock Lightning would pass a device that torch refuses
        policy = ModuleWrapPolicy({Layer})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        )
    return model


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


class State:
    """What this rank has of a model and of its optimizer, whose momenta are made here.

    Args:
        model: The model, sharded or not.
        optimizer: It keeps a momentum of every parameter; ``None`` if the checkpoint has none.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._parameters = [parameter for _, parameter in sorted(model.named_parameters())]
        self._optimizer = optimizer
        if optimizer is not None:
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters and their momenta, which may be others after a load."""
        found = list[torch.Tensor](self._parameters)
        if self._optimizer is not None:
            found += (self._optimizer.state[parameter]["momentum_buffer"] for parameter in self._parameters)
        return [(one.to_local() if isinstance(one, DTensor) else one).detach() for one in found]

    def fill(self) -> None:
        """Gives each tensor a number of its own, which is another one on each rank."""
        for number, tensor in enumerate(self.tensors):
            tensor.fill_(_value(number))

    def clear(self) -> None:
        """Forgets the numbers."""
        for tensor in self.tensors:
            tensor.zero_()

    def check(self) -> None:
        """Compares them with what :meth:`fill` gave.

        Raises:
            ValueError: One is different.
        """
        for number, tensor in enumerate(self.tensors):
            if not bool((tensor == _value(number)).all()):
                raise ValueError(f"rank {rank()} has not loaded the {_value(number)} that was saved")


def _value(number: int) -> float:
    return number + 1 + rank() / RANKS
