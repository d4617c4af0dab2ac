"""The states of optimizers in checkpoints of distributed models, by the names of the parameters.

Torch's own functions take a step with gradients of zero where an optimizer has no state yet, which is a step too many,
and then ask for the state of each parameter. Here an optimizer has after a load what it had when it was saved.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning.fabric.storage.strategies.load_targets import clean_name, entries_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata
    from torch.distributed.checkpoint.state_dict import StateDictOptions

State = dict[str, Any]


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    """The names that a module's parameters have in checkpoints."""
    return {parameter: clean_name(name) for name, parameter in module.named_parameters()}


def state_of(module: nn.Module, optimizer: Optimizer, options: "StateDictOptions") -> State:
    """As torch's ``get_optimizer_state_dict``, but does not change the optimizer; a collective call.

    Raises:
        ValueError: The optimizer has a parameter that the module has not.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    names = names_of(module)
    for group in optimizer.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise ValueError("The optimizer has a parameter that is not one of the model, so that it cannot be saved")
    if optimizer.state:
        return get_optimizer_state_dict(module, optimizer, options=options)
    if options.full_state_dict and options.cpu_offload and torch.distributed.get_rank() != 0:
        return {}
    groups = [{**group, "params": [names[of] for of in group["params"]]} for group in optimizer.param_groups]
    return {"state": {}, "param_groups": groups}


def by_name(state: State, module: nn.Module) -> State:
    """A full state of an optimizer by the names of parameters, where it may be by their numbers, as of one process."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import OptimStateKeyType

    names = list(names_of(module).values())
    order = {name: at for at, name in enumerate(names)}
    groups = state["param_groups"]
    if state["state"] and isinstance(next(iter(state["state"])), int):
        numbered = {"state": state["state"], "param_groups": [{"params": group["params"]} for group in groups]}
        state = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, module)
        renamed = [sorted(group["params"], key=order.__getitem__) for group in state["param_groups"]]
    else:  # torch takes what is without any state for one by name
        renamed = [[names[of] if isinstance(of, int) else of for of in group["params"]] for group in groups]
    groups = [{**group, "params": params} for group, params in zip(groups, renamed, strict=True)]
    return {"state": state["state"], "param_groups": groups}


def room_for(module: nn.Module, optimizer: Optimizer, metadata: "Metadata", key: str) -> State:
    """What an optimizer's state in a sharded checkpoint is loaded into.

    Args:
        module: What is optimized. Its parameters are DTensors.
        optimizer: The optimizer.
        metadata: Of the checkpoint.
        key: What the optimizer is called there.

    Raises:
        KeyError: The checkpoint has nothing of that name.
    """
    from torch.distributed.checkpoint._nested_dict import set_element

    entries = entries_of(metadata, key)
    if not entries:
        raise KeyError(unknown(key))
    target = targets(module, optimizer)
    state: State = {}
    for path, thing in entries.items():
        is_tensor = path[0] == "state" and hasattr(thing, "size")
        room = target(path[1], path[2], thing.size, thing.properties.dtype) if is_tensor else None
        if path[0] != "state" and hasattr(thing, "size"):  # such as a learning rate
            room = torch.empty(thing.size, dtype=thing.properties.dtype)
        set_element(state, path, room)
    return state


def unknown(key: str) -> str:
    """What there is to say of an optimizer that a checkpoint does not have."""
    return f"The checkpoint has no optimizer {key!r}. Is it one of this model and these optimizers?"


def targets(module: nn.Module, optimizer: Optimizer) -> Callable[[str, str, torch.Size, torch.dtype], Tensor]:
    """Returns what makes a tensor that a part of an optimizer's state is loaded into.

    It takes the name of the parameter and of the part, and the part's whole size and type. What is of the size of a
    parameter is distributed as that is.
    """
    parameters = {name: parameter for parameter, name in names_of(module).items()}
    made: dict[str, Any] = {}

    def own(name: str, part: str) -> Any:
        if parameters[name] in optimizer.state:
            return optimizer.state[parameters[name]].get(part)
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        if not made:
            states: Any = get_optimizer_state_dict(module, optimizer)["state"]
            made.update(states)
        return made.get(name, {}).get(part)

    def target(name: str, part: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        parameter = parameters.get(name)
        if parameter is not None and parameter.size() == size:
            return torch.empty_like(parameter.detach(), dtype=dtype)
        if parameter is not None and size:  # an optimizer that keeps less than all values, say of each row
            value = own(name, part)
            if isinstance(value, Tensor) and value.size() == size:
                return torch.empty_like(value, dtype=dtype)
        return torch.empty(size, dtype=dtype)

    return target


def place(module: nn.Module, optimizer: Optimizer, state: State, strict: bool = True) -> None:
    """Gives an optimizer a state, which has been loaded, and nothing beside it.

    A group of parameters takes its settings from the one that the checkpoint has for its first parameter. Where the
    checkpoint has the same groups and others after them, these are added, for a callback did so before the save.

    Args:
        module: What is optimized.
        optimizer: The optimizer.
        state: By the names of parameters; the tensors are this rank's.
        strict: Whether it is an error if the checkpoint does not know a parameter.

    Raises:
        KeyError: It is.
    """
    names = names_of(module)
    add_groups(module, optimizer, state["param_groups"])
    saved = {name: group for group in state["param_groups"] for name in group["params"]}
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer.param_groups:
        own = [names[parameter] for parameter in group["params"]]
        unknown = [name for name in own if name not in saved]
        if unknown and strict:
            raise KeyError(
                f"The checkpoint's optimizer has no parameter {unknown[0]!r}, and lacks {len(unknown)} of a group in"
                " all. Is it one of these optimizers?"
            )
        for name in own:
            numbers[name] = len(numbers)
        options = next((saved[name] for name in own if name in saved), group)
        groups.append({**options, "params": [numbers[name] for name in own]})
    states = {numbers[name]: value for name, value in state.get("state", {}).items() if name in numbers}
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def place_flat(module: nn.Module, optimizer: Optimizer, state: State) -> None:
    """As :func:`place`, for the parameters of FSDP; in the context that says whether ``state`` is full or sharded."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    add_groups(module, optimizer, state["param_groups"])
    flat = FSDP.optim_state_dict_to_load(optim_state_dict=state, model=module, optim=optimizer)
    optimizer.load_state_dict(flat)


def add_groups(module: nn.Module, optimizer: Optimizer, groups: list[Mapping[str, Any]]) -> None:
    """Adds to an optimizer the groups that were added to it before it was saved, and makes their parameters trainable.

    Args:
        module: What is optimized.
        optimizer: The optimizer.
        groups: All that were saved, with the names of parameters.
    """
    names = names_of(module)
    own = [{names.get(parameter) for parameter in group["params"]} for group in optimizer.param_groups]
    if len(groups) <= len(own) or [set(group["params"]) for group in groups[: len(own)]] != own:
        return
    parameters = {name: parameter for parameter, name in names.items()}
    for group in groups[len(own) :]:
        added = [parameters[name] for name in group["params"]]
        _unfreeze(module, added)
        optimizer.add_param_group({**group, "params": added})


def _unfreeze(module: nn.Module, parameters: list[nn.Parameter]) -> None:
    for part in module.modules():
        own = [parameter for parameter in part.parameters(recurse=False) if any(parameter is one for one in parameters)]
        for parameter in own:
            parameter.requires_grad_(True)
        if own and isinstance(part, _BatchNorm) and part.running_mean is not None:
            part.track_running_stats = True  # which BaseFinetuning stops while it is frozen
