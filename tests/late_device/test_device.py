"""The promises of the device itself: a test that runs on it shows nothing unless they hold."""

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.late_device
MIB = 2**20
ROOT = Path(__file__).parents[2]


def in_thread(work: Callable[[], object]) -> int:
    """Runs something in a thread of its own, whose native id it returns."""
    ids: list[int] = []
    errors: list[BaseException] = []

    def run() -> None:
        ids.append(threading.get_native_id())
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return ids[0]


class TestMemory:
    @pytest.mark.usefixtures("late")
    @pytest.mark.parametrize("touch", ["ctypes.string_at(address, 1)", "ctypes.memset(address, 0, 1)"])
    def test_the_host_dies_of_touching_it(self, touch: str) -> None:
        script = (
            "import ctypes, torch; from tests.late_device.late import load; load();"
            f"values = torch.ones(3, device='late'); print(values.sum().item()); address = values.data_ptr(); {touch}"
        )
        died = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (died.stdout, died.returncode) == ("3.0\n", -signal.SIGSEGV), died.stderr

    def test_what_is_freed_is_used_again_in_the_order_of_its_stream_only(self, late: ModuleType) -> None:
        values = torch.empty(1000, device="late")
        address = values.data_ptr()
        del values
        with torch.Stream("late"):
            assert torch.empty(1000, device="late").data_ptr() != address
        assert torch.empty(1000, device="late").data_ptr() == address

    @pytest.mark.parametrize("is_told", [False, True])
    def test_what_is_freed_while_another_stream_reads_it_holds_garbage_unless_the_allocator_was_told(
        self, is_told: bool, late: ModuleType
    ) -> None:
        source, target, other = (
            torch.ones(1000, device="late"),
            torch.empty(1000, pin_memory=True),
            torch.Stream("late"),
        )
        other.wait_stream(late.current_stream())
        late.hold_copies()
        with other:
            target.copy_(source, non_blocking=True)
        if is_told:
            source.record_stream(other)
        del source
        replaced = torch.full((1000,), 2.0, device="late")
        late.settle()
        late.release()
        late.synchronize()
        assert target.eq(1).all() == is_told
        assert replaced.eq(2).all()

    def test_a_limit_is_kept_and_freed_memory_counts_no_more(self, late: ModuleType) -> None:
        before = late.memory_allocated(1)
        late.set_memory_limit(before + 4 * MIB, 1)
        block = torch.empty(3 * MIB, dtype=torch.uint8, device="late:1")
        with pytest.raises(torch.OutOfMemoryError, match="late device 1 is out of memory"):
            torch.empty(2 * MIB, dtype=torch.uint8, device="late:1")
        torch.empty(2 * MIB, dtype=torch.uint8, device="late:0")
        assert late.memory_allocated(1) - before == 3 * MIB
        del block
        assert late.memory_allocated(1) == before
        assert late.max_memory_allocated(1) - before == 3 * MIB
        torch.empty(2 * MIB, dtype=torch.uint8, device="late:1")

    def test_a_forked_process_can_let_go_of_tensors_but_not_use_the_device(self, late: ModuleType) -> None:
        values = [torch.ones(3, device="late")]
        child = os.fork()
        if child == 0:
            values.clear()
            try:
                torch.ones(3, device="late")
            except RuntimeError as error:
                os._exit("in forked subprocess" not in str(error))
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert values[0].sum().item() == 3


class TestCopies:
    def test_to_pinned_memory_they_read_and_write_only_when_they_run(self, late: ModuleType) -> None:
        source, target = torch.ones(1000, device="late"), torch.zeros(1000, pin_memory=True)
        late.hold_copies()
        target.copy_(source, non_blocking=True)
        late.settle()
        assert target.eq(0).all()
        late.release()
        late.synchronize()
        assert target.eq(1).all()

    def test_from_pinned_memory_they_read_only_when_they_run(self, late: ModuleType) -> None:
        source, target = torch.ones(1000, pin_memory=True), torch.zeros(1000, device="late")
        late.hold_copies()
        target.copy_(source, non_blocking=True)
        source.fill_(2)
        late.release()
        assert target.eq(2).all()

    def test_from_other_memory_the_bytes_are_put_aside(self, late: ModuleType) -> None:
        source, target = torch.ones(1000), torch.zeros(1000, device="late")
        late.hold_copies()
        target.copy_(source, non_blocking=True)
        source.fill_(2)
        late.release()
        assert target.eq(1).all()

    @pytest.mark.parametrize(("pinned", "non_blocking"), [(False, True), (True, False), (False, False)])
    def test_to_other_memory_the_host_waits_and_so_it_does_for_blocking_ones(
        self, pinned: bool, non_blocking: bool, late: ModuleType
    ) -> None:
        source, target = torch.ones(1000, device="late"), torch.zeros(1000, pin_memory=pinned)
        late.set_delay(0.05)
        start = time.monotonic()
        target.copy_(source, non_blocking=non_blocking)
        assert time.monotonic() - start >= 0.05
        assert target.eq(1).all()

    def test_who_holds_them_up_gets_an_error_for_waiting(self, late: ModuleType) -> None:
        source = torch.ones(3, device="late")
        late.hold_copies()
        with pytest.raises(RuntimeError, match="the host waits for work that is held up"):
            source.cpu()

    def test_pinned_memory_is_used_again_only_when_its_copies_have_ended(self, late: ModuleType) -> None:
        source, target = torch.ones(1000, device="late"), torch.zeros(1000, pin_memory=True)
        late.hold_copies()
        address = target.data_ptr()
        target.copy_(source, non_blocking=True)
        del target
        assert torch.empty(1000, pin_memory=True).data_ptr() != address
        late.release()
        late.synchronize()
        assert address in [block.data_ptr() for block in [torch.empty(1000, pin_memory=True) for _ in range(2)]]

    @pytest.mark.parametrize(
        "source",
        [
            torch.arange(24.0).view(4, 6).t(),
            torch.arange(24.0).view(4, 6)[::2, 1:5],
            torch.arange(5.0).expand(3, 5),
            torch.tensor(3.0),
            torch.empty(0, 3),
            torch.tensor([1 + 2j, 3j]).conj(),
            torch.tensor([1 + 2j, 3j]).conj().imag,
        ],
        ids=["transposed", "sliced", "expanded", "scalar", "empty", "conjugate", "negative"],
    )
    @pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16, torch.uint8])
    @pytest.mark.filterwarnings("ignore:Casting complex values to real")
    def test_any_values_go_there_between_devices_and_back(
        self, source: Tensor, dtype: torch.dtype, late: ModuleType
    ) -> None:
        there = source.to("late")
        assert there.cpu().equal(source)
        assert there.to("late:1").cpu().equal(source)
        assert there.clone().cpu().equal(source)
        assert there.to(dtype).cpu().equal(source.to(dtype))
        assert torch.empty_like(source, dtype=dtype).copy_(there).equal(source.to(dtype))
        target = torch.zeros(*source.size(), 2, dtype=dtype, device="late:1").select(-1, 0)
        assert target.copy_(source).cpu().equal(source.to(dtype))

    def test_views_that_only_stand_for_other_values_are_copied_as_those(self, late: ModuleType) -> None:
        values = torch.tensor([1 + 2j, 3j], device="late").conj()
        for view in (values, values.imag):
            assert view.is_conj() or view.is_neg()
            assert view.clone().tolist() == view.cpu().tolist() == view.to("late:1").tolist()
        assert values.cpu().resolve_conj().equal(torch.tensor([1 - 2j, -3j]))
        assert values.imag.cpu().equal(torch.tensor([-2.0, -3.0]))

    def test_between_devices_both_streams_wait(self, late: ModuleType) -> None:
        source, target = torch.ones(1000, device="late:0"), torch.zeros(1000, device="late:1")
        late.hold_stream(late.current_stream(0))
        source.add_(1)
        target.copy_(source)
        seen = target.clone()
        source.zero_()
        late.settle()
        late.release()
        assert seen.eq(2).all()


class TestOrder:
    def test_the_host_goes_on_while_operations_wait_for_their_turn(self, late: ModuleType) -> None:
        values, weight = torch.ones(10, 10, device="late"), torch.nn.Linear(10, 10).to("late")
        late.hold_stream(late.current_stream())
        output = weight(values.mul_(2)).relu().sum()
        output.backward()
        values.zero_()
        late.release()
        expected = torch.nn.functional.linear(torch.full((10, 10), 2.0), weight.weight.cpu(), weight.bias.cpu()).relu()
        assert torch.allclose(output.cpu(), expected.sum())

    def test_streams_do_not_wait_for_each_other_unless_told(self, late: ModuleType) -> None:
        first, second = late.current_stream(), torch.Stream("late")
        values = torch.zeros(3, device="late")
        seen = []
        for waits in (False, True):
            late.synchronize()
            late.hold_stream(first)
            values.add_(1)
            if waits:
                second.wait_stream(first)
            with second:
                seen.append(values.clone())
            late.settle()
            late.release()
        assert [value.cpu().tolist() for value in seen] == [[0.0] * 3, [2.0] * 3]

    def test_events_stand_for_the_work_so_far(self, late: ModuleType) -> None:
        event = torch.Event("late")
        assert event.query()
        late.hold_stream(late.current_stream())
        event.record()
        late.settle()
        assert not event.query()
        with pytest.raises(RuntimeError, match="held up"):
            event.synchronize()
        late.release()
        event.synchronize()
        assert event.query()
        late.hold_stream(late.current_stream())
        torch.zeros(3, device="late")
        assert event.query(), "what comes later does not matter"

    def test_a_failure_shows_where_the_host_waits(self, late: ModuleType) -> None:
        values = torch.arange(3, device="late")
        values.index_fill_(0, torch.tensor([7], device="late"), 0)
        with pytest.raises(RuntimeError, match="late device: index 7 is out of bounds"):
            late.synchronize()
        assert values.tolist() == [0, 1, 2]

    def test_a_stream_can_be_delayed_without_being_held(self, late: ModuleType) -> None:
        values, target = torch.ones(3, device="late"), torch.zeros(3, pin_memory=True)
        late.set_delay(0.1)
        start = time.monotonic()
        target.copy_(values, non_blocking=True)
        assert time.monotonic() - start < 0.1
        late.synchronize()
        assert time.monotonic() - start >= 0.1


class TestCurrentDevice:
    def test_operations_run_on_the_stream_of_their_tensors_device(self, late: ModuleType) -> None:
        values = torch.zeros(3, device="late:1")
        late.hold_stream(late.current_stream(1))
        values.add_(1)
        seen = torch.zeros(3, device="late:0").add_(1)
        assert seen.tolist() == [1] * 3
        with pytest.raises(RuntimeError, match="held up"):
            values.tolist()

    def test_an_event_is_of_one_device(self, late: ModuleType) -> None:
        event = torch.Event("late")
        event.record(late.current_stream(1))
        with pytest.raises(RuntimeError, match="does not match recording stream's device"):
            event.record(late.current_stream(0))

    def test_devices_do_not_mix(self, late: ModuleType) -> None:
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(3, device="late:0").add_(torch.ones(3, device="late:1"))

    def test_a_threads_first_use_takes_memory_of_its_current_device_though_an_event_is_of_another(
        self, late: ModuleType
    ) -> None:
        event = torch.Event("late")
        event.record(late.current_stream(1))

        def with_device() -> None:
            with late.device(1):
                event.synchronize()

        carelessly, carefully = in_thread(event.synchronize), in_thread(with_device)
        assert (carelessly, 0) in late.first_uses()
        assert {device for thread, device in late.first_uses() if thread == carefully} == {1}

    def test_streams_and_devices_are_of_a_thread(self, late: ModuleType) -> None:
        before = late.current_stream(1)
        with torch.Stream("late:1") as stream:
            assert (late.current_device(), late.current_stream()) == (1, stream)
            in_thread(lambda: late.set_device(0))
            assert torch.accelerator.current_stream() == stream
            assert torch.empty(1, device="late").device == torch.device("late", 1)
        assert (late.current_device(), late.current_stream(1)) == (0, before)


class TestPinning:
    @pytest.fixture
    def block(self) -> mmap.mmap:
        return mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def test_torchs_own_is_known(self, late: ModuleType) -> None:
        assert torch.empty(10, pin_memory=True).is_pinned()
        assert torch.ones(10).pin_memory()[3:].is_pinned()
        assert not torch.empty(10).is_pinned()

    def test_memory_of_others_is_pinned_while_it_is_registered(self, block: mmap.mmap, late: ModuleType) -> None:
        values = torch.frombuffer(block, dtype=torch.uint8)
        source = torch.ones(len(values), dtype=torch.uint8, device="late")
        values[: MIB // 2].fill_(1)
        with late.device(1):
            thread = in_thread(lambda: late.cudart().cudaHostRegister(values.data_ptr(), MIB, 1))
        assert values[:MIB].is_pinned()
        late.hold_copies()
        values[:MIB].copy_(source[:MIB], non_blocking=True)
        late.release()
        with pytest.raises(RuntimeError, match="beyond the end of registered memory"):
            values.copy_(source, non_blocking=True)
        assert late.cudart().cudaHostRegister(values.data_ptr() + MIB // 2, MIB, 1) == 712
        assert late.cudart().cudaHostUnregister(values.data_ptr()) == 0
        assert late.cudart().cudaHostUnregister(values.data_ptr()) == 713
        assert not values.is_pinned()
        calls = late.cudart().calls
        assert calls[0] == (values.data_ptr(), MIB, MIB // 2, thread, 0, 0, False)
        assert [(call.error, call.is_removal) for call in calls[1:]] == [(712, False), (0, True), (713, True)]

    def test_it_can_fail(self, block: mmap.mmap, late: ModuleType) -> None:
        address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
        late.fail_registering(error=2, after=1)
        register = late.cudart().cudaHostRegister
        assert [register(address + at * MIB, MIB, 1) for at in range(3)] == [0, 2, 0]
        for at in (0, 2):
            late.cudart().cudaHostUnregister(address + at * MIB)


class TestCapture:
    @pytest.fixture
    def event(self, late: ModuleType) -> torch.Event:
        event = torch.Event("late")
        event.record()
        event.synchronize()
        return event

    UNSAFE = ("query", "synchronize", "register", "pin")

    def unsafe(self, name: str, event: torch.Event, late: ModuleType) -> Callable[[], object]:
        return {
            "query": event.query,
            "synchronize": event.synchronize,
            "register": lambda: late.cudart().cudaHostRegister(4096, 4096, 1),
            "pin": lambda: torch.empty(3, pin_memory=True),
        }[name]

    @pytest.mark.parametrize("name", UNSAFE)
    def test_what_is_unsafe_fails_in_any_thread_and_spoils_the_graph(
        self, name: str, event: torch.Event, late: ModuleType
    ) -> None:
        def careless() -> None:
            if name == "register":
                assert self.unsafe(name, event, late)() == 900
                return
            with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
                self.unsafe(name, event, late)()

        with pytest.raises(RuntimeError, match="due to a previous error during capture"), late.capture():
            in_thread(careless)

    @pytest.mark.parametrize("mode", ["thread_local", "relaxed"])
    @pytest.mark.parametrize("name", UNSAFE)
    def test_a_thread_in_another_mode_does_no_harm(
        self, name: str, mode: str, event: torch.Event, late: ModuleType
    ) -> None:
        def careful() -> None:
            with late.capture_mode_guard(mode):
                self.unsafe(name, event, late)()

        with late.capture():
            in_thread(careful)
        late.cudart().cudaHostUnregister(4096)

    def test_the_mode_is_of_a_thread_and_the_capturing_one_is_not_excused(
        self, event: torch.Event, late: ModuleType
    ) -> None:
        in_thread(lambda: late.exchange_capture_mode("relaxed"))
        assert late.exchange_capture_mode("global") == "global"
        with (
            pytest.raises(RuntimeError, match="previous error"),
            late.capture(),
            late.capture_mode_guard("thread_local"),
            pytest.raises(RuntimeError, match="not permitted"),
        ):
            event.query()
        with late.capture():
            assert torch.accelerator.current_stream().is_capturing() if hasattr(torch.Stream, "is_capturing") else True


class TestTraining:
    @pytest.mark.parametrize(
        "optimizer",
        [
            lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        ],
        ids=["sgd", "adamw", "fused"],
    )
    def test_is_as_on_the_cpu(self, optimizer: Callable[..., torch.optim.Optimizer], late: ModuleType) -> None:
        results = []
        for device in ("cpu", "late:1"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(device)
            steps = optimizer(model.parameters())
            for step in range(3):
                loss = nn.functional.cross_entropy(model(torch.full((5, 4), float(step), device=device)),
                                                   torch.arange(5, device=device) % 3)  # fmt: skip
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                steps.step()
                steps.zero_grad()
            results.append([value.detach().cpu() for value in (loss, *model.parameters())])
        assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(*results, strict=True))

    def test_random_numbers_follow_the_seed(self, late: ModuleType) -> None:
        drawn = []
        for _ in range(2):
            torch.manual_seed(5)
            drawn.append([torch.randn(5, device=device).tolist() for device in ("late:0", "late:1")])
        assert drawn[0] == drawn[1]
        assert drawn[0][0] != drawn[0][1]

    def test_files_go_to_any_place(self, tmp_path: Path, late: ModuleType) -> None:
        values = torch.arange(12.0, device="late:1").view(3, 4)
        torch.save({"a": values, "tied": values.t()[1:]}, tmp_path / "x")
        for place, expected in (
            (None, "late:1"),
            ("cpu", "cpu"),
            ("late:0", "late:0"),
            ({"late:1": "late:0"}, "late:0"),
        ):
            loaded = torch.load(tmp_path / "x", map_location=place)
            assert {str(value.device) for value in loaded.values()} == {expected}
            assert loaded["a"].cpu().equal(values.cpu())
            assert loaded["tied"].data_ptr() == loaded["a"].data_ptr() + 4

    def test_nothing_is_left_of_a_tensor(self, late: ModuleType) -> None:
        gc.collect()
        before = late.memory_allocated()
        values = torch.ones(MIB, device="late")
        values.requires_grad_().sum().backward()
        assert late.memory_allocated() >= before + 8 * MIB
        del values
        gc.collect()
        late.synchronize()
        assert late.memory_allocated() == before
