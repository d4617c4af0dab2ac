"""What the saves of a ModelCheckpoint have changed in it, so that one that fails can be taken back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning.fabric.storage.background.queue import Save

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
#: What follows from the scores, where there are any.
_RANKED = ("best_model_path", "best_model_score", "kth_best_model_path", "kth_value")
_ABSENT = object()

#: The name of a field, and of the scores, which are a field, the path of one.
Key = tuple[str, str]


def fields_of(callback: "ModelCheckpoint") -> dict[Key, Any]:
    """What a save may change in ``callback``."""
    fields = {(name, ""): getattr(callback, name) for name in _NAMES}
    return {**fields, **{(_SCORES, path): score for path, score in callback.best_k_models.items()}}


def paths_in(callback: "ModelCheckpoint") -> set[str]:
    """The checkpoints that ``callback`` knows of."""
    return {callback.best_model_path, callback.last_model_path, *callback.best_k_models}


def changes_since(before: dict[Key, Any], callback: "ModelCheckpoint") -> dict[Key, tuple[Any, Any]]:
    """The fields of ``callback`` that are not as they were, and those that every save sets, with both values."""
    after = fields_of(callback)
    pairs = {key: (before.get(key, _ABSENT), after.get(key, _ABSENT)) for key in {**before, **after}}
    return {key: pair for key, pair in pairs.items() if key in _SET_BY_ALL or not _is_same(*pair)}


def _is_same(one: Any, other: Any) -> bool:
    return one is other or not (isinstance(one, Tensor) or isinstance(other, Tensor) or one != other)


@dataclass
class Record:
    """A save, until all ranks know what became of it.

    Attributes:
        path: Where to.
        changes: What it has changed in the callback: the values before and after. Once a save before it has been taken
            back, what was before that.
        saves: What this rank does in the background; nothing on ranks that only wait for the others.
        failed: Whether it failed before it got to the background.
        outcome: Whether it succeeded, once all ranks know.
        link: What is to lead to it once it is durable.
        is_linked: Whether it does.
        evicted: The scores that are left out of the best ones unless it fails, beside what it replaced by itself.
        removals: What is to be removed once it is durable.
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
    """The saves of a ModelCheckpoint of which not all ranks know yet what became of them.

    Attributes:
        pending: Them, by their numbers, which are the same on all ranks, in order.
        number: Of the last save.
        last: The save, or the save that was linked to, that comes before what is removed next.
        before: The fields before the save that is being prepared.
        unranked: The fields that follow from the scores, from when there were none.
        is_saving: Whether one is being submitted, so that the fields must be left alone.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Record] = {}
        self.number = 0
        self.last: Record | None = None
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
        """Whether each save up to the first that is on its way succeeded, as far as this rank knows.

        And those after it that were not even begun.
        """
        outcomes: dict[int, bool] = {}
        is_next = True
        for number, record in self.pending.items():
            is_next = is_next and record.is_done
            if is_next or record.was_not_begun:
                outcomes[number] = record.is_durable
        return outcomes


@contextmanager
def only_durable(callback: "ModelCheckpoint", history: History) -> Iterator[None]:
    """For a body that is to see the fields without what saves on their way have changed: it may open what they name."""
    now, scores = fields_of(callback), dict(callback.best_k_models)
    then = dict(now if history.before is None else history.before)
    for record in reversed(history.pending.values()):
        if not record.is_done:
            then |= {key: before for key, (before, _) in record.changes.items()}
    for key in now:
        _set(callback, key, then.get(key, _ABSENT))
    for key in then.keys() - now.keys():
        _set(callback, key, then[key])
    try:
        yield
    finally:
        callback.best_k_models.clear()
        for key, value in now.items():
            if key[0] != _SCORES:
                _set(callback, key, value)
        callback.best_k_models.update(scores)


@contextmanager
def undone_if_it_fails(callback: "ModelCheckpoint", history: History) -> Iterator[None]:
    """For a body that saves at once: if it fails, the fields are as they were before they were changed for that."""
    before = fields_of(callback) if history.before is None else history.before
    try:
        yield
    except BaseException:
        callback.best_k_models.clear()
        for key, value in before.items():
            _set(callback, key, value)
        raise
    finally:
        history.before = None


def undo(callback: "ModelCheckpoint", history: History, number: int) -> list[str]:
    """Takes back what a save that failed has changed, as if it had not been tried.

    What later saves have changed once more stays, and what they are found to have replaced is added to what goes when
    they are durable.

    Args:
        callback: What holds the fields.
        history: The saves of ``callback``.
        number: Of the save.

    Returns:
        What is to be removed now, for there are more than ``save_top_k`` without it.
    """
    record = history.pending.pop(number)
    record.outcome = False
    later = [other for other_number, other in history.pending.items() if other_number > number]
    for key, (before, after) in record.changes.items():
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
    if callback.monitor is None or (_SCORES, record.path) not in record.changes:
        return []
    _, own = record.changes[_SCORES, record.path]
    for other in history.pending.values():
        if other.evicted.get(record.path) is own:
            del other.evicted[record.path]
    _readmit(callback, record, later)
    evicted = _evict(callback, list(history.pending.values()))
    _rank(callback, history.unranked)
    return evicted


def _sets(record: Record, key: Key, value: Any) -> bool:
    """Whether a field has its value from a save, which may have found it so, if that is to the same path."""
    return key in record.changes or (isinstance(value, str) and value in (record.path, record.link))


def _set(callback: "ModelCheckpoint", key: Key, value: Any) -> None:
    name, path = key
    if name != _SCORES:
        setattr(callback, name, value)
    elif value is _ABSENT:
        callback.best_k_models.pop(path, None)
    else:
        callback.best_k_models[path] = value


def _replaces_one_by_one(callback: "ModelCheckpoint", key: Key) -> bool:
    """Whether a new value of a field means that the checkpoint of the old one goes."""
    name, _ = key
    return name == "last_model_path" or (
        name == "best_model_path" and callback.monitor is None and callback.save_top_k == 1
    )


def _readmit(callback: "ModelCheckpoint", record: Record, later: list[Record]) -> None:
    """Counts again what was left out because of a save that failed."""
    for path, score in record.evicted.items():
        key = (_SCORES, path)
        again = next((other for other in later if other.changes.get(key, (_ABSENT, score))[1] is not score), None)
        if again is None:
            callback.best_k_models[path] = score
        else:  # under the same name
            again.changes[key] = (score, again.changes[key][1])


def _evict(callback: "ModelCheckpoint", pending: list[Record]) -> list[str]:
    """Leaves out the worst scores beyond ``save_top_k``; returns those to be removed now.

    Where one of the others is on its way, that is what has to be durable before.
    """
    scores, evicted = callback.best_k_models, []
    worst = max if callback.mode == "min" else min
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


def _rank(callback: "ModelCheckpoint", unranked: dict[Key, Any]) -> None:
    """Finds the best and the worst score again."""
    scores = callback.best_k_models
    if not scores:
        for key, value in unranked.items():
            _set(callback, key, value)
        return
    best, worst = (min, max) if callback.mode == "min" else (max, min)
    callback.best_model_path = best(scores, key=lambda path: scores[path])
    callback.best_model_score = scores[callback.best_model_path]
    if len(scores) >= callback.save_top_k or callback.kth_best_model_path not in scores:
        callback.kth_best_model_path = worst(scores, key=lambda path: scores[path])
        callback.kth_value = scores[callback.kth_best_model_path]
