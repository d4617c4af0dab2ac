"""Loads of states into modules of FSDP's first version without what FSDP does then: to gather and cut parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn

#: The name by which an FSDP module has the module that it wraps.
_WRAPPED = "_fsdp_wrapped_module."


def loading_hooks(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields what the user's own modules with parameters do when they load a state, which may need whole tensors.

    Yields:
        The path of a module and the name of a hook, or of a method, of it.
    """
    for path, part in module.named_modules():
        if next(part.parameters(), None) is None:
            continue
        load = type(part)._load_from_state_dict
        for hook in chain(part._load_state_dict_pre_hooks.values(), part._load_state_dict_post_hooks.values(), [load]):
            if not hook.__module__.startswith("torch."):
                yield path, getattr(hook, "__qualname__", repr(hook))


def free_gathered(module: nn.Module) -> None:
    """Frees parameters that are gathered since the last use of a module, and would be used again."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp._runtime_utils import _reshard

    for unit in FSDP.fsdp_modules(module):
        handle = unit._handle
        if handle is None or not hasattr(handle.flat_param, "_local_shard"):  # it was never used
            continue
        if handle.uses_sharded_strategy and not handle.needs_unshard():
            _reshard(unit, handle, True)


@contextmanager
def without_cutting(module: nn.Module) -> Iterator[None]:
    """Puts others in the place of the functions that FSDP has called before and after a state is loaded."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import _state_dict_utils as functions

    units = FSDP.fsdp_modules(module)
    hooks = [(unit, unit._load_state_dict_pre_hooks, unit._load_state_dict_post_hooks) for unit in units]
    try:
        for unit, before, after in hooks:
            unit._load_state_dict_pre_hooks = type(before)(
                (key, _before_load if getattr(hook, "hook", None) is functions._pre_load_state_dict_hook else hook)
                for key, hook in before.items()
            )
            unit._load_state_dict_post_hooks = type(after)(
                (key, hook) for key, hook in after.items() if hook is not functions._post_load_state_dict_hook
            )
        yield
    finally:
        for unit, before, after in hooks:
            unit._load_state_dict_pre_hooks, unit._load_state_dict_post_hooks = before, after


def _before_load(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Gives the entries of an FSDP module the names that they have in it."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[f"{prefix}{_WRAPPED}{name.removeprefix(prefix)}"] = state.pop(name)
