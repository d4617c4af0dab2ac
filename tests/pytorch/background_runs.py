"""Small training runs whose checkpoints are saved in the background when the test lets them, or fail.

A module of its own, since the processes of ``test_interrupted_saves.py`` use it too.
"""

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.storage.background.submissions import Save, watching
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

PATIENCE_S = 30.0


class HeldIO(TorchCheckpointIO):
    """Holds each save until the test releases it; those of some numbers, which count from zero, fail then."""

    def __init__(self, failing: Collection[int] = ()) -> None:
        super().__init__()
        self.failing = failing
        self.begun = 0
        self._released: float = 0
        self._changed = threading.Condition()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        with self._changed:
            number = self.begun
            self.begun += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: number < self._released, PATIENCE_S)
        if number in self.failing:
            raise OSError(f"no room for {path}")
        super().save_checkpoint(checkpoint, path, storage_options)

    def release(self, saves: float = float("inf")) -> None:
        """Lets the first ``saves`` saves go on; by default all."""
        with self._changed:
            self._released = saves
            self._changed.notify_all()

    def hold(self) -> None:
        """Holds all saves that have not begun yet."""
        self.release(self.begun)

    def wait_for_begin(self, saves: int) -> None:
        """Returns when that many saves have been begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.begun >= saves, PATIENCE_S)


def wait_for(saves: Collection[Save]) -> None:
    """Returns when ``saves`` are done, and not settled yet."""
    patience = threading.Event()
    for _ in range(int(PATIENCE_S / 0.002)):
        if all(save.done for save in saves):
            return
        patience.wait(0.002)
    raise AssertionError("the saves do not end")


class Model(LightningModule):
    """Logs one of ``scores`` a step, and calls ``act`` in each with the number of steps that are done."""

    def __init__(self, scores: Collection[float], act: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.scores = scores
        self.act = act

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.act(self.trainer.global_step)
        self.log("score", self.scores[batch_idx])
        return self.layer(batch).sum()

    def test_step(self, batch: torch.Tensor) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(len(self.scores), 2))

    test_dataloader = train_dataloader


def step_of(path: str) -> int:
    """The step in the name of a checkpoint."""
    return int(path.split("step=")[1].split(".")[0])


def make_trainer(io: Any, root: Path | str, *callbacks: Callback, **options: Any) -> Trainer:
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(plugins=[io], callbacks=list(callbacks), default_root_dir=root, **{**defaults, **quiet, **options})


class Pace(Callback):
    """Lets saves go on while training does, and calls ``look`` before each step and at the end of the last.

    Args:
        io: What saves.
        lag: How many saves are still on their way then; None to leave all to themselves.
        look: What to call.
        late: Whether they go on in the midst of the next save, when ModelCheckpoint has set its fields for that.
    """

    def __init__(
        self, io: HeldIO, lag: int | None, look: Callable[[], None] = lambda: None, late: bool = False
    ) -> None:
        self.io = io
        self.lag = lag
        self.look = look
        self.late = late

    def on_fit_start(self, *_: Any) -> None:
        self._watching = watching()
        self.saves = self._watching.__enter__()

    def on_train_batch_start(self, *_: Any) -> None:
        self.look()
        if not self.late:
            self._let_go()

    def on_save_checkpoint(self, *_: Any) -> None:
        if self.late:
            self._let_go()

    def _let_go(self) -> None:
        if self.lag is None:
            self.io.release()
            return
        ready = max(0, len(self.saves) - self.lag)
        self.io.release(ready)
        wait_for(self.saves[:ready])

    def on_train_epoch_end(self, *_: Any) -> None:
        self.look()
        self.io.release()

    def on_fit_end(self, *_: Any) -> None:
        self._watching.__exit__(None, None, None)
