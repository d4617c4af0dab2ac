"""The plugin that saves in the background: what it takes, waits for, skips and leaves alone."""

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning.fabric import Fabric
from lightning.fabric.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.fabric.storage import background
from lightning.fabric.storage.engine import engine_of
from lightning.fabric.storage.save_queue import watching
from lightning.pytorch.plugins.io import AsyncCheckpointIO as TrainersAsyncCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO


class Held(TorchCheckpointIO):
    """Saves when it is let."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        assert self.goes_on.wait(20)
        super().save_checkpoint(*args, **kwargs)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"max_in_flight": 0}, "`max_in_flight` is a number of saves, 1 or more, not 0"),
        ({"when_busy": "drop"}, '`when_busy` is "wait" or "skip", not \'drop\''),
        ({"on_error": "ignore"}, '`on_error` is "raise" or "warn", not \'ignore\''),
    ],
)
@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, TrainersAsyncCheckpointIO])
def test_a_wrong_argument_is_told_with_what_is_right(plugin: Any, argument: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plugin(**argument)


@pytest.mark.parametrize("plugin", [AsyncCheckpointIO, TrainersAsyncCheckpointIO])
def test_a_checkpoint_is_the_state_at_the_time_of_the_save(plugin: Any, tmp_path: Path) -> None:
    base = Held()
    io = plugin(base)
    weights, steps = torch.ones(1000), [1]
    io.save_checkpoint({"w": weights, "same": weights, "steps": steps}, tmp_path / "x.ckpt")
    weights.zero_()
    steps.append(2)
    assert not (tmp_path / "x.ckpt").exists()
    base.goes_on.set()
    loaded = io.load_checkpoint(tmp_path / "x.ckpt")  # waits
    assert torch.equal(loaded["w"], torch.ones(1000))
    assert loaded["w"].data_ptr() == loaded["same"].data_ptr()
    assert loaded["steps"] == [1]


def test_a_save_that_comes_too_early_is_skipped_if_the_user_says_so(tmp_path: Path) -> None:
    base = Held()
    io = AsyncCheckpointIO(base, when_busy="skip")
    with watching() as saves:
        for name in ("first", "second"):
            io.save_checkpoint({}, tmp_path / name)
    base.goes_on.set()
    io.drain()
    assert [(save.skipped, save.succeeded) for save in saves] == [(False, True), (True, False)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first"]


def test_what_cannot_be_pickled_is_told_at_once_and_leaves_room_for_the_next_save(tmp_path: Path) -> None:
    io = AsyncCheckpointIO()
    with pytest.raises(pickle.PicklingError, match="hook"):
        io.save_checkpoint({"hook": lambda: None}, tmp_path / "x.ckpt")
    io.save_checkpoint({"epoch": 1}, tmp_path / "x.ckpt")
    io.drain()
    assert io.load_checkpoint(tmp_path / "x.ckpt") == {"epoch": 1}


def test_an_earlier_error_is_raised_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    io = AsyncCheckpointIO()
    with watching() as saves:
        io.save_checkpoint({}, tmp_path / "file" / "x.ckpt")
    io.engine._queue.wait()
    assert saves[0].error is not None
    with pytest.raises(OSError, match="file"):
        io.save_checkpoint({}, tmp_path / "y.ckpt")
    assert not (tmp_path / "y.ckpt").exists()


def test_it_reaches_other_processes_and_wrappers(tmp_path: Path) -> None:
    io = AsyncCheckpointIO(max_in_flight=2)
    io.save_checkpoint({}, tmp_path / "x.ckpt")
    copy = pickle.loads(pickle.dumps(io))
    assert copy.engine is not io.engine
    assert engine_of(_WrappingCheckpointIO(TrainersAsyncCheckpointIO())) is not None
    assert engine_of(TorchCheckpointIO()) is None
    background.drain()


def test_fabric_saves_in_the_background_and_tells_at_the_next_step_what_failed(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[AsyncCheckpointIO()])
    fabric.launch()
    model, optimizer = fabric.setup(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.save(tmp_path / "x.ckpt", {"model": model})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fabric.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    fabric.load(tmp_path / "x.ckpt", {"model": model})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    fabric.save(tmp_path / "x.ckpt" / "below-a-file", {"model": model})
    fabric.strategy.checkpoint_io.engine._queue.wait()
    with pytest.raises(OSError, match="below-a-file"):
        optimizer.step()


def test_memory_for_the_first_save_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = AsyncCheckpointIO().engine
    sizes: list[int] = []
    monkeypatch.setattr(engine._staging, "warm", lambda size, pinned: sizes.append(size))
    engine.warm([torch.ones(2**20), torch.ones(2**20)])
    assert engine.is_warm
    assert 8 * 2**20 < sizes[0] < 10 * 2**20
