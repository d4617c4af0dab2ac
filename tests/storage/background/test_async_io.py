"""The plugin that saves in the background: what it takes, waits for, skips and leaves alone."""

import multiprocessing
import os
import pickle
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed._tensor import Replicate, Shard  # their name in PyTorch 2.4 too
from torch.distributed.fsdp import ShardingStrategy

from lightning.fabric import Fabric
from lightning.fabric.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.fabric.storage.background import pending
from lightning.fabric.storage.background import saver as saver_module
from lightning.fabric.storage.background.saver import saver_of
from lightning.fabric.storage.background.submissions import watching
from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.strategies.checkpoint_save import saving_full
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


@pytest.mark.parametrize("is_relative", [False, True])
def test_a_slash_at_the_end_is_no_name_for_a_file(
    is_relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    io = AsyncCheckpointIO()
    io.save_checkpoint({}, "run/" if is_relative else f"{tmp_path}/run/")
    with pytest.raises(IsADirectoryError, match="ends with a slash"):
        io.drain()
    assert os.listdir(tmp_path) == []


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
    io.saver._queue.wait()
    assert saves[0].error is not None
    with pytest.raises(OSError, match="file"):
        io.save_checkpoint({}, tmp_path / "y.ckpt")
    assert not (tmp_path / "y.ckpt").exists()


def test_it_reaches_other_processes_and_wrappers(tmp_path: Path) -> None:
    io = AsyncCheckpointIO(max_in_flight=2)
    io.save_checkpoint({}, tmp_path / "x.ckpt")
    copy = pickle.loads(pickle.dumps(io))
    assert copy.saver is not io.saver
    assert saver_of(_WrappingCheckpointIO(TrainersAsyncCheckpointIO())) is not None
    assert saver_of(TorchCheckpointIO()) is None
    pending.drain()


def test_a_process_that_is_forked_while_a_save_goes_on_ends_and_can_save(tmp_path: Path) -> None:
    base = Held()
    io = AsyncCheckpointIO(base)
    io.save_checkpoint({"epoch": 1}, tmp_path / "parents.ckpt")

    def saves() -> None:
        base.goes_on.set()  # of this process
        io.save_checkpoint({"epoch": 2}, tmp_path / "childs.ckpt")

    child = multiprocessing.get_context("fork").Process(target=saves)
    child.start()
    child.join(10)
    child.kill()
    assert child.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["childs.ckpt"]
    base.goes_on.set()
    io.drain()
    assert io.load_checkpoint(tmp_path / "parents.ckpt") == {"epoch": 1}


def test_a_signal_handler_and_other_threads_can_save_while_a_state_is_being_copied(tmp_path: Path) -> None:
    io = AsyncCheckpointIO()
    other = threading.Thread(target=io.save_checkpoint, args=({"epoch": 3}, tmp_path / "threads.ckpt"))

    class Signalling:
        def __reduce__(self) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            other.start()
            other.join()
            return str, ()

    before = signal.signal(signal.SIGUSR1, lambda *_: io.save_checkpoint({"epoch": 2}, tmp_path / "handlers.ckpt"))
    try:
        io.save_checkpoint({"epoch": 1, "part": Signalling()}, tmp_path / "x.ckpt")
    finally:
        signal.signal(signal.SIGUSR1, before)
    io.drain()
    saved = {path.name: io.load_checkpoint(path)["epoch"] for path in tmp_path.iterdir()}
    assert saved == {"x.ckpt": 1, "handlers.ckpt": 2, "threads.ckpt": 3}


def test_memory_is_given_back_by_saves_that_were_given_up(tmp_path: Path) -> None:
    base = Held()
    io = AsyncCheckpointIO(base, max_in_flight=2)
    for number in range(2):
        io.save_checkpoint({}, tmp_path / f"{number}.ckpt")
    io.saver._queue.give_up()
    base.goes_on.set()
    io.saver._queue.wait_for_room(locate(tmp_path / "2.ckpt"))
    io.save_checkpoint({}, tmp_path / "2.ckpt")
    io.drain()
    assert len(io.saver._staging._free) == 2


def test_a_plugin_that_waits_for_its_own_save_is_told_so(tmp_path: Path) -> None:
    class Verifying(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
            super().save_checkpoint(checkpoint, path, storage_options)
            io.load_checkpoint(path)

    io = AsyncCheckpointIO(Verifying())
    io.save_checkpoint({}, tmp_path / "x.ckpt")
    with pytest.raises(RuntimeError, match="the plugin that it was made with"):
        io.drain()


def test_a_relative_path_is_that_of_the_time_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Held()
    io = AsyncCheckpointIO(base)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("x.ckpt", "y.ckpt"):
        (tmp_path / name).touch()
        (tmp_path / "elsewhere" / name).touch()
    io.save_checkpoint({"epoch": 1}, "x.ckpt")
    io.remove_checkpoint("y.ckpt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    base.goes_on.set()
    io.drain()
    assert io.load_checkpoint(tmp_path / "x.ckpt") == {"epoch": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "x.ckpt"]
    assert sorted(os.listdir()) == ["x.ckpt", "y.ckpt"]


def test_a_full_state_that_is_on_its_way_is_expected_at_its_path(tmp_path: Path) -> None:
    base = Held()
    io = AsyncCheckpointIO(base)
    with saving_full(locate(tmp_path / "x.ckpt"), io, {}):
        io.save_checkpoint({}, tmp_path / "x.ckpt")
    assert pending.will_exist(tmp_path / "x.ckpt")
    base.goes_on.set()
    io.drain()


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
    fabric.strategy.checkpoint_io.saver._queue.wait()
    with pytest.raises(OSError, match="below-a-file"):
        optimizer.step()


def test_memory_for_the_first_save_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    saver = AsyncCheckpointIO().saver
    sizes: list[int] = []
    monkeypatch.setattr(saver._staging, "warm", lambda size, device: sizes.append(size))
    saver.warm([torch.ones(2**20), torch.ones(2**20)], None)
    assert saver.is_warm
    assert 8 * 2**20 < sizes[0] < 10 * 2**20


class Part(torch.Tensor):
    """A tensor of which this rank has a quarter, on an accelerator."""

    def to_local(self) -> torch.Tensor:
        return torch.ones(2**18)


class Replica(Part):
    """A tensor of which another rank has the same part."""

    device_mesh = SimpleNamespace(size=(2, 4).__getitem__)
    placements = (Replicate(), Shard(0))

    def to_local(self) -> torch.Tensor:
        return torch.ones(2**20)


@pytest.mark.parametrize(
    ("tensor", "strategy", "mib", "is_pinned"),
    [
        (torch.ones(2**20), SimpleNamespace(), 4, True),
        (torch.ones(2**20).as_subclass(Part), SimpleNamespace(_save_distributed_checkpoint=True), 1, True),
        (torch.ones(2**20).as_subclass(Part), SimpleNamespace(_save_distributed_checkpoint=False), 4, False),
        (torch.ones(2**22).as_subclass(Replica), SimpleNamespace(_save_distributed_checkpoint=True), 2, True),
        (torch.ones(2**20), SimpleNamespace(sharding_strategy=ShardingStrategy.FULL_SHARD, world_size=4), 16, False),
        (torch.ones(2**20), SimpleNamespace(sharding_strategy=ShardingStrategy.NO_SHARD, world_size=4), 4, True),
        (
            torch.ones(2**20),
            SimpleNamespace(_state_dict_type="sharded", sharding_strategy=ShardingStrategy.FULL_SHARD, world_size=4),
            4,
            True,
        ),
    ],
    ids=[
        "DDP",
        "FSDP2 sharded",
        "FSDP2 full",
        "FSDP2 with replicas",
        "FSDP1 full",
        "FSDP1 without shards",
        "FSDP1 sharded",
    ],
)
def test_memory_is_prepared_for_what_the_rank_copies_of_a_state(
    tensor: torch.Tensor, strategy: Any, mib: int, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "has_streams", lambda device: True)
    size, device = saver_module._expected([tensor], strategy)
    assert mib < size / 2**20 < mib + 1.1
    assert device == (tensor.device if is_pinned else None)
