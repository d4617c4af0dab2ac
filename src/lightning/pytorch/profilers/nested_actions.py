"""Profiles of actions that begin within each other, for :class:`~lightning.pytorch.profilers.AdvancedProfiler`.

Only one ``cProfile.Profile`` can be enabled at a time. So there is one for each way in which actions are nested, and an
action is shown with all ways that lead through it.
"""

import cProfile
import pstats
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

from typing_extensions import override


class ActionProfile:
    """The profile of an action, for :class:`pstats.Stats` and for whoever expects a ``cProfile.Profile``."""

    def __init__(self, parts: list[cProfile.Profile]) -> None:
        self._parts = parts
        self.stats: dict[Any, Any] = {}

    def getstats(self) -> list[Any]:
        """Returns the entries of all parts."""
        return [entry for part in self._parts for entry in part.getstats()]

    def create_stats(self) -> None:
        """Fills :attr:`stats`."""
        self.stats = pstats.Stats(*self._parts).stats  # type: ignore[attr-defined]

    def dump_stats(self, file: str | PathLike[str]) -> None:
        """Writes a file that :class:`pstats.Stats` reads."""
        pstats.Stats(*self._parts).dump_stats(file)


class NestedActions(Mapping[str, ActionProfile]):
    """The actions by name, in the order in which they were started first."""

    def __init__(self) -> None:
        self._profiles: dict[tuple[str, ...], cProfile.Profile] = {}
        #: The actions that go on, outermost first.
        self._going_on: tuple[str, ...] = ()

    @override
    def __getitem__(self, action: str) -> ActionProfile:
        parts = [profile for actions, profile in self._profiles.items() if action in actions]
        if not parts:
            raise KeyError(action)
        return ActionProfile(parts)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(actions[-1] for actions in self._profiles))

    @override
    def __len__(self) -> int:
        return len(set(self))

    def start(self, action: str) -> None:
        """Begins to record an action, which may be within others."""
        self._go_on_with((*self._going_on, action))

    def stop(self, action: str) -> None:
        """Ends the recording of an action; the actions that contain it are recorded again.

        Raises:
            ValueError: The action has never been started.
        """
        if action in self._going_on:
            last = len(self._going_on) - 1 - self._going_on[::-1].index(action)
            self._go_on_with(self._going_on[:last] + self._going_on[last + 1 :])
        elif action not in self:
            raise ValueError(f"Attempting to stop recording the action {action!r}, which was never started.")

    def clear(self) -> None:
        """Forgets all profiles."""
        self._go_on_with(())
        self._profiles.clear()

    def _go_on_with(self, actions: tuple[str, ...]) -> None:
        if self._going_on:
            self._profiles[self._going_on].disable()
        self._going_on = actions
        if actions:
            self._profiles.setdefault(actions, cProfile.Profile()).enable()
