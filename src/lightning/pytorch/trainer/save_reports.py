"""The stages of a Trainer's saves in the report of its profiler, and in its progress bar."""

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from lightning.fabric.storage import save_report
from lightning.fabric.storage.save_report import SaveReport
from lightning.pytorch.callbacks.progress.save_progress import SaveProgress, making_way
from lightning.pytorch.profilers.checkpoint_rows import row_of
from lightning.pytorch.profilers.profiler import Profiler
from lightning.pytorch.profilers.simple import SimpleProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def follow(trainer: "Trainer") -> None:
    """Makes ``trainer`` the one whose profiler and progress bar show the saves of this process from now on.

    Call it in the thread that trains: saves of other threads are not shown.
    """
    global _followed
    if _followed is not None:
        if _followed.active() is trainer:
            return
        _followed.stop()
    _followed = _Saves(trainer)


class _Saves:
    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = weakref.ref(trainer)
        self._thread = threading.get_ident()
        #: The stages that go on, outermost first, each with the profiler that has a row for it.
        self._stages: list[tuple[str, Profiler | None]] = []
        self._progress = SaveProgress()
        self.stop = save_report.listen(self)

    def active(self) -> "Trainer | None":
        return self._trainer() if self._thread == threading.get_ident() else None

    def begin(self, report: SaveReport, name: str) -> None:
        if (trainer := self.active()) is None:
            return
        if not self._stages:
            self._progress.begin(trainer, report)
        profiler = None
        if name not in (other for other, _ in self._stages) and _notified(_profiler_of(trainer).start, row_of(name)):
            profiler = _profiler_of(trainer)
        self._stages.append((name, profiler))

    def end(self, report: SaveReport, name: str) -> None:
        if self._thread != threading.get_ident() or not self._stages:
            return
        _, profiler = self._stages.pop()
        if profiler is not None:
            _notified(profiler.stop, row_of(name))
        if not self._stages:
            self._progress.end()

    def finished(self, report: SaveReport) -> AbstractContextManager[None]:
        if (trainer := self.active()) is None:
            return nullcontext()
        profiler = _profiler_of(trainer)
        if isinstance(profiler, SimpleProfiler):  # others cannot be given a duration
            for name, seconds in report.background.items():
                profiler.recorded_durations[row_of(name, background=True)].append(seconds)
        return making_way(trainer)


def _profiler_of(trainer: "Trainer") -> Profiler:
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]  # a function sets it
    return profiler


def _notified(notify: Callable[[str], None], action: str) -> bool:
    """Notifies a profiler; warns if that fails, for its report is not worth the checkpoint."""
    try:
        notify(action)
    except Exception as error:
        rank_zero_warn(f"The profiler does not show {action!r}: {type(error).__name__}: {error}")
        return False
    return True


_followed: _Saves | None = None
