"""The changes of a ModelCheckpoint's fields by its saves, so that those of a save that fails can be taken back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning.fabric.storage.background.submissions import Save

if TYPE_CHECKING:
    from lightning.pytorch.callbacks.model_checkpoint import ModelCheckpoint

_NAMES = (
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "_last_checkpoint_saved",
    "_last_global_step_saved",
)
_SET_BY_ALL = {("_last_checkpoint_saved", ""), ("_last_global_step_saved", "")}
_SCORES = "best_k_models"
#: The fields that follow from the scores, where there are any.
_RANKED = ("best_model_path", "best_model_score", "kth_best_model_path", "kth_value")
_ABSENT = object()

#: The name of a field, and, of the scores, the path of one.
Key = tuple[str, str]

#: The fields that follow from the scores in a new callback.
_UNRANKED: dict[Key, Any] = {(name, ""): "" if name.endswith("path") else None for name in _RANKED}


def fields_of(callback: "ModelCheckpoint") -> dict[Key, Any]:
    """Returns the fields of ``callback`` that a save may change."""
    fields = {(name, ""): getattr(callback, name) for name in _NAMES}
    return {**fields, **{(_SCORES, path): score for path, score in callback.best_k_models.items()}}


def paths_in(callback: "ModelCheckpoint") -> set[str]:
    """Returns the checkpoints that ``callback`` knows of."""
    return {callback.best_model_path, callback.last_model_path, *callback.best_k_models}


def changes_since(before: dict[Key, Any], callback: "ModelCheckpoint") -> dict[Key, tuple[Any, Any]]:
    """Returns the fields of ``callback`` that have changed, and those that every save sets, with both values."""
    after = fields_of(callback)
    pairs = {key: (before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in {**before, **after}}
    return {key: pair for key, pair in pairs.items() if key in _SET_BY_ALL or not _is_same(*pair)}


def _is_same(one: Any, other: Any) -> bool:
    return one is other or not (isinstance(one, Tensor) or isinstance(other, Tensor) or one != other)


@dataclass
class Entry:
    """A save, until all ranks know whether it succeeded.

    Attributes:
        path: The path of the checkpoint.
        changes: The fields that it has changed in the callback: the values before and after. Once a save before it has
            been taken back, the values before that.
        saves: The saves of this rank in the background; none on ranks that only wait for the others.
        failed: Whether it failed before it got to the background.
        outcome: Whether it succeeded, once all ranks know.
        link: The path of a link that is to lead to it once it is durable.
        is_linked: Whether the link does.
        evicted: The scores that are left out of the best ones unless it fails, beside those that it replaced by itself.
        removals: The checkpoints to remove once it is durable.
    """

    path: str
    changes: dict[Key, tuple[Any, Any]]
    saves: list[Save] = field(default_factory=list)
    failed: bool = False
    outcome: bool | None = None
    link: str = ""
    is_linked: bool = False
    evicted: dict[str, Any] = field(default_factory=dict)
    removals: list[str] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether it has come to its end, as far as this rank knows."""
        return self.was_not_begun or all(save.done for save in self.saves)

    @property
    def was_not_begun(self) -> bool:
        """Whether it failed or was skipped before it got to the background."""
        return self.failed or any(save.skipped for save in self.saves)

    @property
    def is_durable(self) -> bool:
        """Whether it has succeeded, as far as this rank knows."""
        return not self.failed and all(save.succeeded for save in self.saves)


class History:
    """The saves of a ModelCheckpoint whose outcome not all ranks know yet.

    Attributes:
        pending: The entries by their numbers, which are the same on all ranks, in order.
        number: The number of the last save.
        last: The save, or the save that was linked to, that comes before what is removed next.
        before: The fields before the save that is being prepared.
        unranked: The fields that follow from the scores, from when there were none.
        is_saving: Whether one is being submitted, so that the fields must be left alone.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Entry] = {}
        self.number = 0
        self.last: Entry | None = None
        self.before: dict[Key, Any] | None = None
        self.unranked: dict[Key, Any] = {}
        self.is_saving = False

    def __reduce__(self) -> Any:
        return History, ()  # saves do not go on in a copy, nor in another process

    def begin(self, callback: "ModelCheckpoint") -> None:
        """Remembers the fields before they are changed for a save."""
        self.before = fields_of(callback)
        if not callback.best_k_models:
            self.unranked = {(name, ""): self.before[name, ""] for name in _RANKED}

    def outcomes(self) -> dict[int, bool]:
        """Returns whether the saves have succeeded, as far as this rank knows, by their numbers.

        There are those up to the first that is in flight, and those after it that were not even begun.
        """
        outcomes: dict[int, bool] = {}
        is_next = True
        for number, entry in self.pending.items():
            is_next = is_next and entry.is_done
            if is_next or entry.was_not_begun:
                outcomes[number] = entry.is_durable
        return outcomes


@contextmanager
def only_durable(callback: "ModelCheckpoint", history: History) -> Iterator[None]:
    """Shows a body the fields without the changes of saves in flight, since it may open what they name."""
    now = fields_of(callback)
    then = dict(now if history.before is None else history.before)
    for entry in reversed(history.pending.values()):
        if not entry.is_done:
            then |= {key: before for key, (before, _) in entry.changes.items()}
    _restore(callback, then)
    try:
        yield
    finally:
        _restore(callback, now)


@contextmanager
def undone_if_it_fails(callback: "ModelCheckpoint", history: History) -> Iterator[None]:
    """Restores the fields from before they were changed for a save, if the body, which saves at once, fails."""
    before = fields_of(callback) if history.before is None else history.before
    try:
        yield
    except BaseException:
        _restore(callback, before)
        raise
    finally:
        history.before = None


def _restore(callback: "ModelCheckpoint", fields: dict[Key, Any]) -> None:
    callback.best_k_models.clear()
    for key, value in fields.items():
        _set(callback, key, value)


def undo(callback: "ModelCheckpoint", history: History, number: int) -> list[str]:
    """Takes back the changes of a save that failed, as if it had not been tried.

    Fields that later saves have changed once more stay, and the checkpoints that they are found to have replaced are
    removed when they are durable.

    Args:
        callback: The callback that holds the fields.
        history: The saves of ``callback``.
        number: The number of the save.

    Returns:
        The checkpoints to remove now, for there are more than ``save_top_k`` without it.
    """
    entry = history.pending.pop(number)
    entry.outcome = False
    later = [other for other_number, other in history.pending.items() if other_number > number]
    for key, (before, after) in entry.changes.items():
        if callback.monitor is not None and key[0] in _RANKED:
            continue
        heir = next((other for other in later if _sets(other, key, after)), None)
        if heir is None:
            _set(callback, key, before)
            continue
        _, after = heir.changes.get(key, (before, after))
        heir.changes[key] = (before, after)
        if _replaces_one_by_one(callback, key) and before not in ("", after):
            heir.removals.append(before)
    if callback.monitor is None or (_SCORES, entry.path) not in entry.changes:
        return []
    _, own = entry.changes[_SCORES, entry.path]
    for other in history.pending.values():
        if other.evicted.get(entry.path) is own:
            del other.evicted[entry.path]
    _readmit(callback, entry, later)
    evicted = _evict(callback, list(history.pending.values()))
    rank(callback, history.unranked)
    return evicted


def _sets(entry: Entry, key: Key, value: Any) -> bool:
    """Returns whether a save has set a field, which may have had the value already if that is the same path."""
    return key in entry.changes or (isinstance(value, str) and value in (entry.path, entry.link))


def _set(callback: "ModelCheckpoint", key: Key, value: Any) -> None:
    name, path = key
    if name != _SCORES:
        setattr(callback, name, value)
    elif value is _ABSENT:
        callback.best_k_models.pop(path, None)
    else:
        callback.best_k_models[path] = value


def _replaces_one_by_one(callback: "ModelCheckpoint", key: Key) -> bool:
    """Returns whether a new value of a field means that the checkpoint of the old one goes."""
    is_only_one = callback.monitor is None and callback.save_top_k == 1
    return key[0] == "last_model_path" or (key[0] == "best_model_path" and is_only_one)


def _readmit(callback: "ModelCheckpoint", entry: Entry, later: list[Entry]) -> None:
    """Counts again what was left out because of a save that failed."""
    for path, score in entry.evicted.items():
        key = (_SCORES, path)
        again = next((other for other in later if other.changes.get(key, (_ABSENT, score))[1] is not score), None)
        if again is None:
            callback.best_k_models[path] = score
        else:  # under the same name
            again.changes[key] = (score, again.changes[key][1])


def _evict(callback: "ModelCheckpoint", pending: list[Entry]) -> list[str]:
    """Leaves out the worst scores beyond ``save_top_k``; returns the paths to remove now.

    Where one of the others is in flight, that has to be durable before.
    """
    scores, evicted = callback.best_k_models, []
    _, worst = _extremes(callback)
    while 0 < callback.save_top_k < len(scores):
        path = worst(scores, key=lambda path: scores[path])
        score = scores.pop(path)
        last = next((other for other in reversed(pending) if other.path in scores), None)
        if last is None:
            evicted.append(path)
        else:
            last.evicted[path] = score
            last.removals.append(path)
    return evicted


def rank(callback: "ModelCheckpoint", unranked: dict[Key, Any] = _UNRANKED) -> None:
    """Finds the best and the worst score again.

    Args:
        callback: The callback that holds the scores.
        unranked: The fields that follow from the scores, if there are none.
    """
    scores = callback.best_k_models
    if not scores:
        for key, value in unranked.items():
            _set(callback, key, value)
        return
    best, worst = _extremes(callback)
    callback.best_model_path = best(scores, key=lambda path: scores[path])
    callback.best_model_score = scores[callback.best_model_path]
    if len(scores) >= callback.save_top_k or callback.kth_best_model_path not in scores:
        callback.kth_best_model_path = worst(scores, key=lambda path: scores[path])
        callback.kth_value = scores[callback.kth_best_model_path]


def _extremes(callback: "ModelCheckpoint") -> tuple[Callable[..., str], Callable[..., str]]:
    """Returns the functions that find the best and the worst."""
    return (min, max) if callback.mode == "min" else (max, min)
