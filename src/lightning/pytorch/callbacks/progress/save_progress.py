"""A progress bar for saves that keep training waiting, in the style of the Trainer's own."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from lightning.fabric.storage import save_report
from lightning.fabric.storage.save_report import SaveReport
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, TQDMProgressBar

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks.progress.rich_progress import CustomProgress

log = logging.getLogger(__name__)

_MIB = 2**20
#: Seconds for which training waits before there is a bar.
_PATIENCE_S = 3.0
_REFRESH_S = 0.5

#: Shows the number of bytes that are written, and that there will be.
_Update = Callable[[int, int], None]
#: Opens a bar with a title and the two numbers that it shows at first.
_Bar = Callable[[str, int, int], AbstractContextManager[_Update]]


class SaveProgress:
    """Shows a bar while the training thread is in :meth:`begin` to :meth:`end`, if that takes more than a moment."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, trainer: "Trainer", report: SaveReport) -> None:
        """Starts to show the save of ``report``, or another one that it waits for: training waits from now on."""
        bar = _bar_of(trainer)
        if bar is None:
            return
        self._ended.clear()
        arguments = (bar, report, report.stalled)
        # the training thread, which saves, cannot
        thread = threading.Thread(target=self._show, args=arguments, name="checkpoint-progress", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is about to end, and a save may still be waited for
            log.debug(f"No progress bar for {report.place}: {error}")
        else:
            self._thread = thread

    def end(self) -> None:
        """Removes the bar: training goes on."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def _show(self, bar: _Bar, report: SaveReport, waited: float) -> None:
        if self._ended.wait(max(0.0, _PATIENCE_S - waited)):
            return
        while not self._ended.is_set():
            shown = _moving(report)
            with bar(f"Saving {str(shown.place).rpartition('/')[2]}", *shown.progress()) as update:
                # one that has not begun to move gives way to one that has
                while not self._ended.wait(_REFRESH_S) and (shown.progress()[1] or _moving(report) is shown):
                    update(*shown.progress())


def _moving(report: SaveReport) -> SaveReport:
    """Returns a save of which bytes are in flight, or ``report`` if there is none."""
    return next((moving for moving in save_report.in_flight() if moving.progress()[1]), report)


def _bar_of(trainer: "Trainer") -> _Bar | None:
    """Returns the way to show a bar, if the Trainer shows its own one in a terminal."""
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar) and shown.is_enabled and _prints_to_terminal():
        return partial(_tqdm_bar, shown)
    if isinstance(shown, RichProgressBar) and shown.is_enabled:
        from rich import get_console

        if get_console().is_terminal:
            return partial(_rich_bar, shown, trainer)
    return None


def _prints_to_terminal() -> bool:
    try:
        return sys.stdout is not None and sys.stdout.isatty()
    except (AttributeError, ValueError):  # what was put in its place can be no file, or is closed by now
        return False


@contextmanager
def _tqdm_bar(shown: TQDMProgressBar, title: str, written: int, expected: int) -> Iterator[_Update]:
    with Tqdm(
        desc=title,
        initial=written,
        total=expected,
        leave=False,
        dynamic_ncols=True,
        file=sys.stdout,
        bar_format=shown.BAR_FORMAT,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
    ) as bar:

        def update(written: int, expected: int) -> None:
            bar.total, bar.n = expected, written
            bar.refresh()

        yield update


@contextmanager
def _rich_bar(shown: RichProgressBar, trainer: "Trainer", title: str, written: int, expected: int) -> Iterator[_Update]:
    """Shows a line below the Trainer's, or of its own when the Trainer shows none at that moment."""
    from lightning.pytorch.callbacks.progress.rich_progress import CustomProgress

    running = _running(shown)
    progress = running or CustomProgress(*shown.configure_columns(trainer), transient=True)
    if running is None:
        progress.start()
    # one line for all saves, which is hidden and not removed, since the Trainer finds its own by their position
    task = next((task.id for task in progress.tasks if "unit" in task.fields), None)
    if task is None:
        task = progress.add_task("", visible=False, unit="MiB")
    progress.reset(task, description=title, completed=written // _MIB, total=-(-expected // _MIB), visible=True)
    progress.refresh()

    def update(written: int, expected: int) -> None:
        progress.update(task, completed=written // _MIB, total=-(-expected // _MIB), refresh=True)

    try:
        yield update
    finally:
        progress.update(task, visible=False, refresh=True)
        if running is None:
            progress.stop()


def making_way(trainer: "Trainer") -> AbstractContextManager[None]:
    """Takes the Trainer's bar away while a body writes a line to the terminal."""
    shown = trainer.progress_bar_callback
    if isinstance(shown, TQDMProgressBar) and _prints_to_terminal():
        return Tqdm.external_write_mode(file=sys.stdout)  # type: ignore[no-any-return]
    if isinstance(shown, RichProgressBar) and (running := _running(shown)) and running.console.is_terminal:
        return _rich_making_way(running)
    return nullcontext()


@contextmanager
def _rich_making_way(progress: "CustomProgress") -> Iterator[None]:
    live = progress.live
    kept = live.transient, live.vertical_overflow
    live.transient = True  # else what it shows stays there
    progress.stop()
    live.transient, live.vertical_overflow = kept
    try:
        yield
    finally:
        # it goes up again over the lines that it had before
        if (lines := sum(task.visible for task in progress.tasks)) > 1:
            progress.console.line(lines - 1)
        progress.start()


def _running(shown: RichProgressBar) -> "CustomProgress | None":
    return None if shown._progress_stopped else shown.progress
