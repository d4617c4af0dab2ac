"""The states of optimizers in checkpoints of distributed models, by the names of the parameters.

Torch's own functions take a step with gradients of zero where an optimizer has no state yet, which is a step too many,
and then ask for the state of each parameter. Here an optimizer has after a load what it had when it was saved.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning.fabric.storage.sharded.describable import is_distributed
from lightning.fabric.storage.strategies.load_targets import clean_name, entries_of, is_writable

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata

State = dict[str, Any]


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    """Returns the names that a module's parameters have in checkpoints."""
    return {parameter: clean_name(name) for name, parameter in module.named_parameters()}


def state_of(module: nn.Module, optimizer: Optimizer, full: bool) -> State:
    """Returns the state that torch's ``get_optimizer_state_dict`` does, without changing the optimizer.

    It is a collective call. Shards stay on their device until the writer asks for them.

    Args:
        module: The module that is optimized.
        optimizer: The optimizer.
        full: Whether to gather all of the state on rank zero, in host memory.

    Raises:
        ValueError: The optimizer has a parameter that the module has not.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    names = names_of(module)
    for group in optimizer.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise ValueError("The optimizer has a parameter that is not one of the model, so that it cannot be saved")
    if optimizer.state:
        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        return get_optimizer_state_dict(module, optimizer, options=options)
    if full and torch.distributed.get_rank() != 0:
        return {}
    groups = [{**group, "params": [names[of] for of in group["params"]]} for group in optimizer.param_groups]
    return {"state": {}, "param_groups": groups}


def by_name(state: State, module: nn.Module) -> State:
    """Returns a full state of an optimizer by the names of parameters, from one by their numbers or names.

    Raises:
        ValueError: It is by numbers, and FSDP has made one flat parameter of several.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import OptimStateKeyType

    names = list(names_of(module).values())
    order = {name: at for at, name in enumerate(names)}
    groups = state["param_groups"]
    if state["state"] and isinstance(next(iter(state["state"])), int):
        if any(len(getattr(parameter, "_fqns", ())) > 1 for parameter in module.parameters()):
            raise ValueError(
                "The checkpoint's optimizer has numbers for parameters, as those of DDP and of one device do, which"
                " FSDP does not know with `use_orig_params=False`. Load it with `use_orig_params=True`."
            )
        numbered = {"state": state["state"], "param_groups": [{"params": group["params"]} for group in groups]}
        state = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, module)
        renamed = [sorted(group["params"], key=order.__getitem__) for group in state["param_groups"]]
    else:  # torch takes what is without any state for one by name
        renamed = [[names[of] if isinstance(of, int) else of for of in group["params"]] for group in groups]
    groups = [{**group, "params": params} for group, params in zip(groups, renamed, strict=True)]
    return {"state": state["state"], "param_groups": groups}


def empty_state(module: nn.Module, optimizer: Optimizer, metadata: "Metadata", key: str) -> State:
    """Returns empty tensors for all of an optimizer's state in a sharded checkpoint.

    Args:
        module: The module that is optimized, whose parameters are DTensors.
        optimizer: The optimizer.
        metadata: The checkpoint's metadata.
        key: The optimizer's key in the checkpoint.

    Raises:
        KeyError: The checkpoint has nothing of that name.
    """
    from torch.distributed.checkpoint._nested_dict import set_element

    entries = entries_of(metadata, key)
    if not entries:
        raise unknown_optimizer(key)
    target = target_factory(module, optimizer)
    state: State = {}
    for path, entry in entries.items():
        empty = None
        if hasattr(entry, "size"):
            dtype = entry.properties.dtype
            if path[0] == "state":
                empty = target(path[1], path[2], entry.size, dtype)
            else:  # it is such as a learning rate
                empty = torch.empty(entry.size, dtype=dtype, device="cpu")
        set_element(state, path, empty)
    return state


def unknown_optimizer(key: str) -> KeyError:
    """Returns the error for an optimizer that a checkpoint does not have."""
    return KeyError(f"The checkpoint has no optimizer {key!r}. Is it one of this model and these optimizers?")


def target_factory(module: nn.Module, optimizer: Optimizer) -> Callable[[str, str, torch.Size, torch.dtype], Tensor]:
    """Returns a factory of the tensors that the parts of an optimizer's state are loaded into.

    Its arguments are the name of the parameter, the name of the part, and the part's whole size and type. A part of the
    size of its parameter is distributed like that, and in the optimizer's own memory where that fits.
    """
    parameters = {name: parameter for parameter, name in names_of(module).items()}

    @cache
    def states() -> Any:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return get_optimizer_state_dict(module, optimizer)["state"]

    def own(name: str, part: str) -> Any:
        if parameters[name] in optimizer.state:
            return optimizer.state[parameters[name]].get(part)
        return states().get(name, {}).get(part)

    def target(name: str, part: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        parameter = parameters.get(name)
        if parameter is not None and parameter.size() == size:
            own_part = reusable(optimizer, parameter, part, dtype)
            return torch.empty_like(parameter.detach(), dtype=dtype) if own_part is None else own_part
        if parameter is not None and size:  # an optimizer that keeps less than all values, say of each row
            value = own(name, part)
            if isinstance(value, Tensor) and value.size() == size:
                return torch.empty_like(value, dtype=dtype)
        return torch.empty(size, dtype=dtype, device="cpu")

    return target


def reusable(optimizer: Optimizer, parameter: Tensor, part: str, dtype: torch.dtype) -> Tensor | None:
    """Returns a part of an optimizer's state that can be loaded into: one of a parameter's shape, device and kind.

    Args:
        optimizer: The optimizer.
        parameter: One of its parameters.
        part: The name of the part.
        dtype: The type of what is loaded.
    """
    own = optimizer.state.get(parameter, {}).get(part)
    if type(own) is not type(parameter.detach()) or own.size() != parameter.size():
        return None
    if (own.dtype, own.device) != (dtype, parameter.device) or not (is_distributed(own) or is_writable(own)):
        return None
    return own.detach()


def load_by_name(module: nn.Module, optimizer: Optimizer, state: State, strict: bool = True) -> None:
    """Loads into an optimizer a state by the names of parameters, and nothing beside it.

    A group of parameters takes its settings from the one that the checkpoint has for its first parameter. Where the
    checkpoint has the same groups and others after them, these are added, for a callback did so before the save.

    Args:
        module: The module that is optimized.
        optimizer: The optimizer.
        state: The state, whose tensors are this rank's.
        strict: Whether it is an error if the checkpoint does not know a parameter.

    Raises:
        KeyError: The checkpoint does not know a parameter, and ``strict`` is set.
    """
    names = {parameter: [name] for parameter, name in names_of(module).items()}
    add_groups(module, optimizer, state["param_groups"], names)
    numbered = Numbered.of(optimizer, state["param_groups"], names, strict)
    numbers = {name: numbered.numbers[of] for of, (name,) in names.items() if of in numbered.numbers}
    states = {numbers[name]: value for name, value in state.get("state", {}).items() if name in numbers}
    optimizer.load_state_dict({"state": states, "param_groups": numbered.groups})


class Numbered(NamedTuple):
    """An optimizer's parameters by numbers, as its own method loads them.

    Attributes:
        numbers: The number of each parameter.
        groups: The groups of these numbers, with the settings that were saved.
        saved: The names of all parameters that the checkpoint knows.
    """

    numbers: dict[Tensor, int]
    groups: list[State]
    saved: set[str]

    @classmethod
    def of(
        cls, optimizer: Optimizer, groups: Iterable[Mapping[str, Any]], names: Mapping[Any, list[str]], strict: bool
    ) -> "Numbered":
        """Returns an optimizer's parameters, each group with the settings of its first parameter that was saved.

        Args:
            optimizer: The optimizer.
            groups: All groups that were saved, with the names of parameters.
            names: For each parameter of the optimizer, the names of all that it is made of.
            strict: Whether it is an error if a parameter was not saved.

        Raises:
            KeyError: One was not, and ``strict`` is set.
        """
        saved = {name: group for group in groups for name in group["params"]}
        numbers: dict[Tensor, int] = {}
        own_groups = []
        for group in optimizer.param_groups:
            own = [name for parameter in group["params"] for name in names[parameter]]
            unknown = [name for name in own if name not in saved]
            if unknown and strict:
                raise KeyError(
                    f"The checkpoint's optimizer has no parameter {unknown[0]!r}, and lacks {len(unknown)} of a group"
                    " in all. Is it one of these optimizers?"
                )
            for parameter in group["params"]:
                numbers[parameter] = len(numbers)
            options = next((saved[name] for name in own if name in saved), group)
            own_groups.append({**options, "params": [numbers[parameter] for parameter in group["params"]]})
        return cls(numbers, own_groups, set(saved))


def load_flat(module: nn.Module, optimizer: Optimizer, state: State) -> None:
    """Loads a state into an optimizer of FSDP's parameters, in the context of a full or a sharded ``state``."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    add_groups(module, optimizer, state["param_groups"], {of: [name] for of, name in names_of(module).items()})
    flat = FSDP.optim_state_dict_to_load(optim_state_dict=state, model=module, optim=optimizer)
    optimizer.load_state_dict(flat)


def add_groups(
    module: nn.Module, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], names: Mapping[Any, list[str]]
) -> None:
    """Adds to an optimizer the groups that were added to it before it was saved, and makes their parameters trainable.

    Args:
        module: The module that is optimized.
        optimizer: The optimizer.
        groups: All groups that were saved, with the names of parameters.
        names: For each parameter of the module, the names of all that it is made of.
    """
    own = [{name for parameter in group["params"] for name in names[parameter]} for group in optimizer.param_groups]
    if len(groups) <= len(own) or [set(group["params"]) for group in groups[: len(own)]] != own:
        return
    parameters = {name: parameter for parameter, those in names.items() for name in those}
    for group in groups[len(own) :]:
        added = list(dict.fromkeys(parameters[name] for name in group["params"]))
        _unfreeze(module, added)
        optimizer.add_param_group({**group, "params": added})


def _unfreeze(module: nn.Module, parameters: list[nn.Parameter]) -> None:
    for part in module.modules():
        own = [parameter for parameter in part.parameters(recurse=False) if any(parameter is one for one in parameters)]
        for parameter in own:
            parameter.requires_grad_(True)
        if own and isinstance(part, _BatchNorm) and part.running_mean is not None:
            part.track_running_stats = True  # which BaseFinetuning stops while it is frozen
