"""Copies of states: what they hold, and the memory that they are in."""

import gc
import io
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map

from lightning.fabric.storage.archives import tensor_bytes
from lightning.fabric.storage.background import host_memory, slot, staged_shard, staging
from lightning.fabric.storage.background.host_memory import HostMemory
from lightning.fabric.storage.background.staging import Staging
from lightning.fabric.storage.collectives.rank_group import RankGroup
from lightning.fabric.storage.sharded.save_planner import Shard as RankShard
from tests.storage.states import Raising, serialized

MIB = 2**20


def reloaded(state: Any) -> Any:
    """What a checkpoint file of the state is loaded as."""
    return torch.load(io.BytesIO(serialized(state)), map_location="cpu", weights_only=False)


class Pair(torch.Tensor):
    """A tensor without memory, made of two that have some."""

    left: torch.Tensor
    right: torch.Tensor

    @staticmethod
    def __new__(cls, left: torch.Tensor, right: torch.Tensor, device: str = "cpu") -> "Pair":
        pair = torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype, device=device)
        pair.left, pair.right = left, right
        return pair

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        left, right = (
            func(*tree_map(lambda x, side=side: getattr(x, side) if isinstance(x, Pair) else x, args), **kwargs or {})
            for side in ("left", "right")
        )
        return cls(left, right) if isinstance(left, torch.Tensor) else left


class Named(torch.Tensor):
    """A tensor of another class, whose memory is its own."""


class Outer:
    class Inner:
        def __init__(self) -> None:
            self.tensor = torch.arange(5)

    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner = self.Inner()


def annotated() -> torch.Tensor:
    tensor = torch.rand(3)
    tensor.note = ["a note", torch.rand(2)]  # type: ignore[attr-defined]
    return tensor


def tied() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.rand(4, 5))
    whole = torch.rand(1000)
    part = whole[10:20]
    return {"a": weight, "b": weight, "data": weight.data, "rows": weight.detach()[1:], "part": part, "again": [part]}


def trained() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


class Recursive(list[Any]):
    pass


def recursive() -> Any:
    items = Recursive([torch.rand(2)])
    items.append({"self": items})
    return items


STATES: dict[str, Callable[[], Any]] = {
    "what training saves": trained,
    "a module": lambda: torch.nn.Linear(2, 3),
    "tied": tied,
    "other objects": lambda: OrderedDict(
        a=[1, 2.5, None, True, "text", b"x" * 200_000], s={1, 2}, t=(1, (2,)), o=Outer()
    ),
    "arrays": lambda: {
        "a": np.arange(7)[::2],
        "large": np.random.default_rng(0).random(50_000),
        "scalar": np.float32(3),
    },
    "random states": lambda: {"torch": torch.get_rng_state(), "numpy": np.random.get_state()},
    "dtypes": lambda: (
        [
            torch.ones(3).to(dtype)
            for dtype in (torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64)
        ]
        + [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3).to(torch.uint16), torch.ones(3, dtype=torch.complex64)]
    ),
    "parameter": lambda: torch.nn.Parameter(torch.rand(7), requires_grad=False),
    "requires grad": lambda: torch.rand(3, requires_grad=True),
    "uninitialized": lambda: [torch.nn.UninitializedParameter(), torch.nn.UninitializedBuffer()],
    "transposed": lambda: torch.rand(3, 4).t(),
    "channels last": lambda: torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.tensor([1.5]).expand(1000),
    "scalar": lambda: torch.tensor(3),
    "empty": lambda: [torch.empty(0, 3), torch.empty(0)],
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "sparse": lambda: [torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc()],
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(5), 0.1, 0, torch.qint8),
    "quantized per channel": lambda: torch.quantize_per_channel(
        torch.rand(2, 5), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]),
    "wrapper": lambda: Pair(torch.rand(3), torch.rand(3)),
    "wrapper on another device": lambda: Pair(torch.rand(3), torch.rand(3), device="cuda"),
    "subclass": lambda: torch.rand(3).as_subclass(Named),  # type: ignore[arg-type]
    "annotated": annotated,
    "storages": lambda: [torch.rand(3).untyped_storage(), torch.rand(3).storage()],
    "recursive": recursive,
    "nothing": lambda: None,
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:torch.quantize", "ignore:Sparse invariant")
@pytest.mark.parametrize("name", STATES)
def test_a_copy_is_what_a_file_would_be_loaded_as(name: str) -> None:
    state = STATES[name]()
    staged = Staging().stage_object(state)
    staged.wait()
    # the content of a file tells types, devices, strides, which memory is shared, and how much there is
    expected = serialized(reloaded(state))
    assert serialized(staged.object()) == expected
    assert serialized(staged.object()) == expected, "it can be made more than once"
    staged.release()


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_distributed_tensor_stays_one() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    state = {"weight": torch.nn.Parameter(distribute_tensor(torch.rand(4, 3), mesh, [Shard(0)]))}
    staged = Staging().stage_object(state)
    expected = state["weight"].detach().full_tensor().clone()
    with torch.no_grad():
        state["weight"].zero_()
    staged.wait()
    copy = staged.object()["weight"]
    assert isinstance(copy, DTensor)
    assert isinstance(copy, torch.nn.Parameter)
    assert (copy.placements, copy.device_mesh) == (state["weight"].placements, mesh)
    assert torch.equal(copy.full_tensor(), expected)


def test_a_class_of_the_main_module_is_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    of_main = type("OfMain", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "OfMain", of_main, raising=False)
    assert type(Staging().stage_object([of_main()]).object()[0]) is of_main


def test_what_changes_afterwards_is_in_the_copy_as_it_was() -> None:
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.Adam(model.parameters())
    array = np.zeros(3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": [1], "array": array}

    def train() -> None:
        model(torch.rand(5, 20)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        state["optimizer"] = optimizer.state_dict()
        state["seen"].append(2)
        array[:] += 1

    train()
    expected = serialized(reloaded(state))
    staged = Staging().stage_object(state)
    items = [*model.parameters(), optimizer.state[model.weight]["step"]]
    before = [item.detach().clone() for item in items]
    one_by_one = Staging().stage_tensors(items)
    train()
    assert serialized(staged.object()) == expected
    assert all(map(torch.equal, one_by_one.tensors, before))
    assert not any(map(torch.equal, one_by_one.tensors, items))


ITEMS: dict[str, torch.Tensor] = {
    "contiguous": torch.rand(3, 4),
    "a part": torch.rand(30, 40)[3:9, 5:],
    "transposed": torch.rand(3, 4).t(),
    "expanded": torch.tensor([1.5]).expand(1000),
    "parameter": torch.nn.Parameter(torch.rand(7)),
    "half": torch.rand(3).bfloat16(),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
}


def test_tensors_are_copied_each_into_a_storage_of_its_own() -> None:
    staged = Staging().stage_tensors(list(ITEMS.values()), obj={"step": 3, "loss": torch.tensor(2.5)})
    staged.wait()
    for copy, item in zip(staged.tensors, ITEMS.values(), strict=True):
        assert type(copy) is torch.Tensor
        assert (copy.dtype, copy.shape, copy.requires_grad) == (item.dtype, item.shape, False)
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == copy.nbytes
        assert copy.data_ptr() % 64 == 0
        assert torch.equal(copy, item)
    assert staged.object() == {"step": 3, "loss": torch.tensor(2.5)}
    assert staged.size == sum(item.nbytes for item in ITEMS.values()) + 4


def test_a_tensor_that_comes_twice_is_copied_once() -> None:
    weight = torch.rand(1000)
    staged = Staging().stage_tensors([weight, weight[:10], weight.view(10, 100), weight.detach()])
    assert staged.size == 4000 + 40 + 4000
    assert staged.tensors[0] is staged.tensors[3]
    assert staged.tensors[1].equal(weight[:10])


@pytest.mark.parametrize("name", ["conjugated", "negated", "sparse", "quantized", "nested", "wrapper"])
@pytest.mark.filterwarnings("ignore:Sparse CS", "ignore:torch.quantize", "ignore:The PyTorch API of nested tensors")
def test_a_tensor_that_is_more_than_values_is_copied_as_it_is(name: str) -> None:
    made = STATES[name]()
    items = made if isinstance(made, list) else [made]
    expected = [serialized(item.clone()) for item in items]
    staged = Staging().stage_tensors(items)
    copies = [serialized(copy) for copy in staged.tensors]
    assert copies == expected
    for item in items:
        values = item._values() if item.is_sparse else item if item.layout == torch.strided else item.values()
        values.detach().fill_(0)
    assert [serialized(copy) for copy in staged.tensors] == copies


@pytest.mark.parametrize("shape", [(64, 65), (3, 5, 7, 9), (1, 1, 4000), (2, 1000)])
def test_pieces_make_up_what_is_not_contiguous(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_bytes, "_PIECE", 256)
    values = torch.rand(shape)
    for source in (
        values.t() if len(shape) == 2 else values.transpose(0, -1),
        values[..., ::2],
        values[:1].expand(shape),
    ):
        target = torch.empty(source.shape)
        for rows, into in tensor_bytes.rows_of(source, target):
            assert rows.is_contiguous() or rows.nbytes <= 256
            into.copy_(rows)
        assert torch.equal(target, source)


def test_the_same_memory_is_used_again_and_replaced_by_more_when_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    alive: weakref.WeakSet[HostMemory] = weakref.WeakSet()

    class Observed(HostMemory):
        def __init__(self, size: int, device: torch.device | None) -> None:
            assert not alive, "there is never more than one"
            super().__init__(size, device)
            sizes.append(size)
            alive.add(self)

    monkeypatch.setattr(slot, "HostMemory", Observed)
    memory = Staging()
    for size in (1600, 16, 1600, 1601, 1800, 1801):
        staged = memory.stage_object(torch.full((size * 64,), size, dtype=torch.int16))
        assert (staged.object() == size).all()
        staged.release()
        del staged
    # what has grown once is given room for an eighth more
    assert sizes == [1600 * 128, 1601 * 144]


def test_copies_keep_apart_and_no_more_memory_is_kept_than_for_as_many_as_there_are_slots() -> None:
    memory = Staging(slots=2)
    staged = [memory.stage_object(torch.full((1000,), value)) for value in (1.0, 2.0, 3.0)]
    assert [copy.object()[0] for copy in staged] == [1.0, 2.0, 3.0]
    for copy in (*staged, staged[0]):
        copy.release()
    with pytest.raises(AssertionError, match="has been released"):
        staged[0].object()
    assert len(memory._free) == 2


def test_a_copy_can_be_used_and_released_by_another_thread() -> None:
    memory = Staging()
    values = []

    def use(staged: staging.Staged) -> None:
        staged.wait()
        values.append(staged.object()["w"][0].item())
        staged.release()

    for value in range(3):
        thread = threading.Thread(target=use, args=[memory.stage_object({"w": torch.full((5,), value)})])
        thread.start()
        thread.join()
    assert values == [0, 1, 2]


@pytest.mark.parametrize(
    ("part", "reason"),
    [(lambda: 0, "<lambda>"), (threading.Lock(), "lock"), (Raising(AttributeError("no way")), "no way")],
    ids=["function", "lock", "an error of its own"],
)
def test_what_cannot_be_pickled_is_named(part: Any, reason: str) -> None:
    memory = Staging()
    state: dict[str, Any] = {"w": torch.zeros(3)}
    state |= {"self": state, "callbacks": {"Mine{'x': 1}": [1, (part, 2)]}}
    with pytest.raises(pickle.PicklingError, match="cannot be saved") as raised:
        memory.stage_object(state)
    assert """state['callbacks']["Mine{'x': 1}"][1][0]: """ in str(raised.value)
    assert reason in str(raised.value)
    assert memory.stage_object(torch.ones(1)).object() == 1, "the slot is free again"


def test_errors_of_the_objects_themselves_reach_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        Staging().stage_object({"a": Raising(ZeroDivisionError())})


def test_memory_that_is_shared_by_types_is_refused_as_in_a_file() -> None:
    tensor = torch.zeros(4)
    state = {"a": tensor, "b": tensor.view(torch.int32)}
    with pytest.raises(RuntimeError, match="view the same data"):
        serialized(state)
    with pytest.raises(RuntimeError, match=r"torch\.float32 and torch\.int32 that share memory"):
        Staging().stage_object(state)


def test_a_state_that_is_larger_than_the_host_is_refused_with_what_to_do() -> None:
    with pytest.raises(MemoryError, match=r"Cannot allocate 4194304\.0 GiB of host memory .* Save synchronously"):
        HostMemory(2**52)


def test_copies_can_be_made_in_inference_mode_and_for_another_default_device() -> None:
    with torch.inference_mode(), torch.device("meta"):
        values = torch.ones(3, device="cpu")
        staged = Staging().stage_tensors([values, torch.nn.Parameter(values.clone())], [values])
    assert serialized([*staged.tensors, *staged.object()]) == serialized([torch.ones(3) for _ in range(3)])


def test_torch_keeps_nothing_of_an_object_that_was_made() -> None:
    copy = Staging().stage_object(torch.eye(3).to_sparse()).object()
    reference = weakref.ref(copy)
    del copy
    assert reference() is None


def _resident_mib() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / MIB


linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at what Linux tells of a process's memory")


@linux
def test_the_first_copy_finds_the_memory_that_was_warmed() -> None:
    """In a process of its own, for what other tests have left takes and frees memory meanwhile."""
    script = "from tests.storage.background.test_staging import first_copy; first_copy()"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], check=True, timeout=120)


def first_copy() -> None:
    state = torch.ones(64 * MIB // 4)
    memory = Staging()
    before = _resident_mib()
    memory.warm(state.nbytes)
    memory.warm(state.nbytes)  # there is one slot, so this does nothing
    memory.stage_object(torch.zeros(1)).release()  # waits for it
    warmed = _resident_mib()
    assert 60 < warmed - before < 80
    staged = memory.stage_object(state)
    assert _resident_mib() - warmed < 4
    assert torch.equal(staged.object(), state)


def test_the_first_copy_waits_until_all_of_the_memory_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    touch, allocated = HostMemory.touch, threading.Event()

    def touch_late(memory: HostMemory) -> None:
        allocated.set()
        time.sleep(0.2)
        touch(memory)

    monkeypatch.setattr(HostMemory, "touch", touch_late)
    memory = Staging()
    memory.warm(MIB)
    (warming,) = (thread for thread in threading.enumerate() if thread.name == "warm-checkpoint-memory")
    allocated.wait()
    staged = memory.stage_object(torch.full((MIB,), 255, dtype=torch.uint8))
    warming.join()
    assert staged.object().eq(255).all()


def test_warming_for_too_little_or_too_much_does_no_harm() -> None:
    memory = Staging()
    for size in (1, 2**52):
        memory.warm(size)
        assert memory.stage_object(torch.arange(1000)).object().equal(torch.arange(1000))
        memory = Staging()


@linux
def test_a_copy_while_a_fork_is_alive_does_not_double_the_memory() -> None:
    state = torch.ones(64 * MIB // 4)
    memory = Staging()
    memory.stage_object(state).release()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # as the worker of a data loader, which outlives saves
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        memory.stage_object(state).release()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 64 * MIB // resource.getpagesize() // 4
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(child, 0)


def test_other_threads_get_their_turn_while_an_object_is_made() -> None:
    state = {
        "numbers": [float(number) for number in range(300_000)],
        "array": np.zeros(64 * MIB, dtype=np.uint8),
        "bytes": b"x" * (64 * MIB),
        "tensors": [torch.zeros(3) for _ in range(1000)],
    }
    longest = last = 0.0

    def chance(frame: FrameType, event: str, argument: Any) -> None:
        """Called where Python's interpreter runs, which is where it changes to another thread."""
        nonlocal longest, last
        now = time.thread_time()
        longest, last = max(longest, now - last), now

    collections = sum(generation["collections"] for generation in gc.get_stats())
    staged = Staging().stage_object(state)
    last = time.thread_time()
    try:
        sys.setprofile(chance)
        obj = staged.object()
    finally:
        sys.setprofile(None)
    assert longest < 0.02
    assert sum(generation["collections"] for generation in gc.get_stats()) - collections <= 3
    assert obj["bytes"] == state["bytes"]
    assert (obj["numbers"], len(obj["tensors"])) == (state["numbers"], 1000)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_looked_for_again_after_a_copy_if_it_was_before(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        memory = Staging()
        with pytest.raises(pickle.PicklingError):
            memory.stage_object(lambda: 0)
        memory.stage_object([torch.zeros(1)]).object()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


class Late:
    """Copies from a device that arrive, or fail, when a test says so. Host memory stands for that of the device."""

    has_arrived = threading.Event()
    error: Exception | None = None
    error_of_begin: Exception | None = None

    def __init__(self, device: torch.device, sources: list[torch.Tensor]) -> None:
        self._sources = sources

    def begin(self, pairs: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)
        if Late.error_of_begin is not None:
            raise Late.error_of_begin

    def arrived(self) -> bool:
        if Late.error is not None:
            raise Late.error
        if Late.has_arrived.is_set():
            self._sources = []
        return Late.has_arrived.is_set()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Late]]:
    monkeypatch.setattr(staging, "DeviceCopies", Late)
    monkeypatch.setattr(staging, "has_streams", lambda device: True)
    monkeypatch.setattr(slot, "has_streams", lambda device: True)
    monkeypatch.setattr(host_memory, "pinned_memory", lambda size, device: None)
    Late.has_arrived.clear()
    yield Late
    Late.error = Late.error_of_begin = None
    Late.has_arrived.set()
    for watcher in watchers():
        watcher.join(10)


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "checkpoint-copies"]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_tensors_are_let_go_as_soon_as_their_copies_have_arrived(late: type[Late]) -> None:
    memory = Staging(2)
    sources = [torch.ones(3), torch.ones(4)]
    references = [weakref.ref(source.untyped_storage()) for source in sources]
    first, second = memory.stage_object({"ema": sources.pop(0)}), memory.stage_tensors([sources.pop()])
    assert all(reference() is not None for reference in references)
    (watcher,) = watchers()
    late.has_arrived.set()
    watcher.join(10)
    assert all(reference() is None for reference in references), "though nobody has asked for the copies"
    assert first.object()["ema"].equal(torch.ones(3))
    assert second.tensors[0].equal(torch.ones(4))


def test_the_tensors_of_a_shard_are_let_go_as_soon_as_their_copies_have_arrived(late: type[Late]) -> None:
    weight = torch.ones(5)
    reference, made = weakref.ref(weight.untyped_storage()), RankShard.of({"w": weight}, {"step": 1}, RankGroup())
    _, arrived = staged_shard.stage(made, made.plan.items, Staging())
    del weight, made
    late.has_arrived.set()
    until(lambda: reference() is None)
    shard = arrived()
    (item,) = shard.plan.items
    assert shard.resolve(item).equal(torch.ones(5))


def test_who_uses_a_copy_waits_for_its_bytes(late: type[Late]) -> None:
    staged = Staging().stage_tensors([torch.ones(3)])
    threading.Timer(0.1, late.has_arrived.set).start()
    start = time.monotonic()
    assert staged.tensors[0].equal(torch.ones(3))
    assert time.monotonic() - start > 0.08


def test_memory_is_not_given_back_before_the_bytes_have_arrived(late: type[Late]) -> None:
    memory = Staging()
    late.error_of_begin = RuntimeError("out of memory")
    given_up = threading.Event()

    def stage() -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            memory.stage_tensors([torch.ones(3)])
        given_up.set()

    threading.Thread(target=stage).start()
    assert not given_up.wait(0.1)
    assert not memory._free
    late.has_arrived.set()
    assert given_up.wait(10)
    assert len(memory._free) == 1


def test_an_error_of_a_device_reaches_the_save_and_its_memory_is_not_used_again(late: type[Late]) -> None:
    memory = Staging()
    staged = memory.stage_tensors([torch.ones(3)])
    before = memory_of_slot(staged)
    late.error = RuntimeError("an illegal memory access was encountered")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            staged.wait()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _ = staged.tensors
    until(lambda: not watchers())
    staged.release()
    late.error = None
    late.has_arrived.set()
    again = memory.stage_tensors([torch.ones(3)])
    assert again.tensors[0].equal(torch.ones(3))
    assert memory_of_slot(again) != before, "bytes may still arrive there"


def memory_of_slot(staged: staging.Staged) -> list[HostMemory]:
    assert staged._slot is not None
    return list(staged._slot._blocks)


def test_memory_of_the_next_copies_is_allocated_while_the_first_is_used() -> None:
    memory = Staging(2)
    first = memory.stage_tensors([torch.ones(MIB)])
    (other,) = memory._free
    until(lambda: bool(other._blocks))
    assert other.size == 4 * MIB
    prepared = list(other._blocks)
    second = memory.stage_tensors([torch.full((MIB,), 2.0)])
    assert memory_of_slot(second) == prepared
    assert first.tensors[0].eq(1).all()
    assert second.tensors[0].eq(2).all()


def test_a_state_that_has_more_than_was_expected_gets_memory_for_the_rest_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    class Observed(HostMemory):
        def __init__(self, size: int, device: torch.device | None) -> None:
            sizes.append(size)
            super().__init__(size, device)

    monkeypatch.setattr(slot, "HostMemory", Observed)
    memory = Staging()
    memory.warm(3 * MIB)
    tensors = [torch.full((MIB,), number, dtype=torch.uint8) for number in range(4)]
    for _ in range(2):
        staged = memory.stage_tensors(tensors)
        assert [copy.unique().tolist() for copy in staged.tensors] == [[0], [1], [2], [3]]
        staged.release()
    assert sizes == [3 * MIB, MIB + MIB // 2]
    staged = memory.stage_tensors([torch.ones(4 * MIB, dtype=torch.uint8)])
    assert staged.tensors[0].eq(1).all()
    assert sizes[2:] == [4 * MIB + MIB // 2], "not more than half as much again as is needed, in the wrong pieces"
    assert len(memory_of_slot(staged)) == 1


def test_memory_that_is_not_pinned_is_replaced_when_a_device_comes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device | None] = []

    class Observed(HostMemory):
        def __init__(self, size: int, device: torch.device | None) -> None:
            devices.append(device)
            super().__init__(size, device)

    monkeypatch.setattr(slot, "HostMemory", Observed)
    made = slot.Slot()
    for has_device in (False, True, False, True):
        monkeypatch.setattr(slot, "has_streams", lambda device, has_device=has_device: has_device)
        made.reserve([torch.ones(1000)])
    monkeypatch.setattr(slot, "has_streams", lambda device: False)
    made.reserve([torch.ones(1000), torch.ones(1000)])
    assert devices == [None, torch.device("cpu"), torch.device("cpu")]
