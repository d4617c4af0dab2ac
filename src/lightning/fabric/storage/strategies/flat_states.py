"""The states of optimizers of FSDP's parameters, made in the layout that these have on a rank, to be loaded into."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning.fabric.storage.strategies import optimizer_state
from lightning.fabric.storage.strategies.flat_parts import FlatPart
from lightning.fabric.storage.strategies.optimizer_state import Numbered

#: The entries of a checkpoint, or of a part of one, by the path to each.
Entries = Mapping[tuple[Any, ...], Any]
#: Those of each part of the state of a parameter, by the path with its key.
_Saved = dict[tuple[Any, ...], dict[tuple[Any, ...], Any]]


def add_whole(tree: dict[str, Any], entries: Entries) -> None:
    """Adds to a tree all that a checkpoint has at some paths, with empty tensors in host memory."""
    from torch.distributed.checkpoint._nested_dict import set_element

    for path, entry in entries.items():
        is_tensor = hasattr(entry, "size")
        empty = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu") if is_tensor else None
        set_element(tree, path, empty)


class LocalStates:
    """The states of an optimizer's parameters on this rank.

    A state of the shape of its parameter is sharded like that: parameters that are one flat parameter have theirs in
    one tensor. Anything else is loaded as it was saved.

    Args:
        optimizer: The optimizer. Its own tensors are loaded into, where they fit.
        numbered: Its parameters and groups as they are to be.
        parts: This rank's parts of the model's parameters that are sharded.
        names: The names of all parameters that a parameter of the optimizer is made of.
        entries: The optimizer's entries in the checkpoint.

    Attributes:
        targets: The tensors to load into, and places for other objects, by names and the keys of states.

    Raises:
        ValueError: The checkpoint has a state that flat parameters cannot have.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        numbered: Numbered,
        parts: Iterable[FlatPart],
        names: Mapping[Tensor, list[str]],
        entries: Entries,
    ) -> None:
        self.targets: dict[str, Any] = {}
        self._optimizer = optimizer
        self._numbered = numbered
        #: The tensors of parameters that have a state here, and the names of those parameters.
        self._local: dict[Tensor, tuple[dict[str, Tensor], list[str]]] = {}
        saved: dict[str, _Saved] = {}
        for (first, *path), entry in entries.items():
            if path and first == "state":  # there is one without a path if all are empty
                saved.setdefault(path[0], {}).setdefault(tuple(path[1:2]), {})[tuple(path)] = entry
        of: dict[Tensor, list[FlatPart]] = {}
        for part in parts:
            of.setdefault(part.parameter, []).append(part)
        for parameter in numbered.numbers:
            own = {name: saved[name] for name in names[parameter] if name in saved}
            if own:
                self._add(parameter, own, of.get(parameter))
        #: What the optimizer keeps beside the states of parameters.
        self._others = [name for name in saved if name not in numbered.saved]
        for name in self._others:
            for those in saved[name].values():
                add_whole(self.targets, those)

    def put_in(self) -> None:
        """Makes what has been loaded the optimizer's state.

        Raises:
            ValueError: Parameters that are one flat parameter have different states.
        """
        states: dict[Any, Any] = {name: self.targets[name] for name in self._others}
        for parameter, (local, names) in self._local.items():
            states[self._numbered.numbers[parameter]] = state = dict(local)
            for key in self.targets[names[0]].keys() - local.keys():
                state[key], *others = [self.targets[name][key] for name in names]
                if any(not _is_equal(state[key], other) for other in others):
                    raise _different(names, key)
        self._optimizer.load_state_dict({"state": states, "param_groups": self._numbered.groups})

    def _add(self, parameter: Tensor, states: dict[str, _Saved], parts: list[FlatPart] | None) -> None:
        """Adds targets for the states of the parameters that one is made of; ``parts`` are theirs, if it is sharded."""
        shapes = {part.name: part.shape for part in parts} if parts else dict.fromkeys(states, parameter.shape)
        if parts and not parts[0].is_replicated:
            _refuse_other_shapes(states, shapes)
        if parts and not parts[0].held:  # an optimizer keeps nothing of it on this rank
            return
        local: dict[str, Tensor] = {}
        self._local[parameter] = local, list(states)
        keys = next(iter(states.values())).keys()
        for path in keys:
            if any(state.keys() != keys for state in states.values()):
                raise _different(list(states), *path)
            entries = {name: state[path].get((name, *path)) for name, state in states.items()}
            is_partial = len(entries) < len(shapes)
            if all(_is_like(entry, shapes[name]) for name, entry in entries.items()):
                dtype: torch.dtype = next(iter(entries.values())).properties.dtype  # type: ignore[union-attr]
                local[path[0]] = tensor = self._room(parameter, path[0], dtype, is_partial)
                places = {part.name: part.state(tensor) for part in parts or ()} or dict.fromkeys(states, tensor)
                for name in states:
                    self.targets.setdefault(name, {})[path[0]] = places[name]
                continue
            if is_partial:
                raise _different(list(shapes), *path)
            for state in states.values():
                add_whole(self.targets, state[path])

    def _room(self, parameter: Tensor, key: str, dtype: torch.dtype, is_partial: bool) -> Tensor:
        """Returns the optimizer's own tensor, or an empty one; one with zeros if not all of it is to be loaded."""
        if is_partial:
            return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        own = optimizer_state.reusable(self._optimizer, parameter, key, dtype)
        return torch.empty(parameter.shape, dtype=dtype, device=parameter.device) if own is None else own


def _refuse_other_shapes(states: Mapping[str, _Saved], shapes: Mapping[str, torch.Size]) -> None:
    for name, state in states.items():
        for entry in (entry for entries in state.values() for entry in entries.values()):
            if getattr(entry, "size", ()) and entry.size != shapes[name]:
                raise ValueError(
                    f"The checkpoint's optimizer has a state of the shape {list(entry.size)} of {name!r}, which has the"
                    f" shape {list(shapes[name])}. FSDP shards only states of the shapes of their parameters."
                )


def _is_like(entry: Any, shape: torch.Size) -> bool:
    return bool(shape) and getattr(entry, "size", None) == shape


def _is_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)


def _different(names: list[str], key: str = "the parts") -> ValueError:
    return ValueError(
        f"The checkpoint's optimizer has another {key!r} of {names[0]!r} than of one of {names[1:]}, or none. FSDP"
        " keeps one state of them all, for they are one flat parameter: load it with `use_orig_params=True`."
    )
