"""The promises of copies in host memory that are in flight while both the host and a device go on.

A device joins by a subclass of each contract, and a fixture ``device``.
"""

import gc
import io
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning.fabric.storage.archives import tensor_bytes
from lightning.fabric.storage.background import cuda_memory
from lightning.fabric.storage.background.host_memory import HostMemory
from lightning.fabric.storage.background.staging import Staged, Staging
from tests.accelerators.device import MIB, Device
from tests.storage.states import serialized

PATIENCE_S = 30.0


def warm(device: Device, size: int = 0) -> Staging:
    """Memory that is pinned already, which takes time and waits for the device."""
    memory = Staging()
    memory.warm(size or int(1.2 * device.mib * MIB), device.device)
    memory.stage_object(torch.zeros(1, device=device.device)).release()
    device.synchronize()
    return memory


def as_object(memory: Staging, tensor: Tensor) -> tuple[Staged, Callable[[], Tensor]]:
    staged = memory.stage_object({"w": tensor})
    return staged, lambda: staged.object()["w"]


def as_tensors(memory: Staging, tensor: Tensor) -> tuple[Staged, Callable[[], Tensor]]:
    staged = memory.stage_tensors([tensor])
    return staged, lambda: staged.tensors[0]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def no_memory_is_registered() -> bool:
    return not any(thread.name == "pinned-checkpoint-memory" for thread in threading.enumerate())


def register_and_free(device: Device) -> None:
    memory = HostMemory(3 * MIB, device.device)
    registered = memory.registered
    assert registered is not None
    del memory
    registered.wait_if_freed()


def unregister(device: Device, address: int) -> int:
    with device.module.device(device.device):
        return int(device.module.cudart().cudaHostUnregister(address))


Stage = Callable[[Staging, Tensor], tuple[Staged, Callable[[], Tensor]]]


@pytest.mark.parametrize("stage", [as_object, as_tensors])
class OrderContract:
    """Copies have the values as of the save, in whichever order things happen after it."""

    @pytest.mark.parametrize("held", ["stream", "copies"])
    def test_changes_right_after_a_copy_was_begun_do_not_reach_it_and_those_before_do(
        self, held: str, stage: Stage, device: Device
    ) -> None:
        memory, tensor = warm(device), device.numbered()
        expected = tensor.cpu()
        (device.hold_stream if held == "stream" else device.hold_copies)()
        tensor.add_(1)
        staged, copy = stage(memory, tensor)
        tensor.fill_(-1)
        assert not staged.arrived(), "the host went on while the device was still busy"
        device.let_go()
        staged.wait()
        assert staged.arrived()
        assert torch.equal(copy(), expected + 1)
        assert tensor.eq(-1).all()

    def test_memory_that_is_freed_right_after_a_copy_was_begun_is_used_for_others_only_after_it(
        self, stage: Stage, device: Device
    ) -> None:
        memory = warm(device)
        other = device.module.Stream(device=device.device)  # whose memory comes back to it alone
        with device.on(other):
            tensor = device.numbered()
        device.synchronize()
        expected = tensor.cpu()
        device.hold_copies()
        staged, copy = stage(memory, tensor)
        assert not staged.arrived()
        del tensor
        with device.on(other):
            overwriting = torch.full((int(device.mib * MIB),), 255, dtype=torch.uint8, device=device.device)
        other.synchronize()
        device.let_go()
        staged.wait()
        assert torch.equal(copy(), expected)
        assert overwriting.eq(255).all()

    def test_a_copy_is_made_of_what_the_current_stream_has_computed(self, stage: Stage, device: Device) -> None:
        memory = warm(device)
        tensor = torch.zeros(int(device.mib * MIB) // 4, device=device.device)
        device.synchronize()
        with device.on(device.module.Stream(device=device.device)):
            device.hold_stream()
            tensor.fill_(1)
            _, copy = stage(memory, tensor)
            tensor.fill_(2)
        device.let_go()
        assert copy().eq(1).all()
        device.synchronize()
        assert tensor.eq(2).all()

    def test_a_copy_that_is_given_up_has_ended_before_its_memory_is_used_again(
        self, stage: Stage, device: Device
    ) -> None:
        memory, tensor = warm(device), device.numbered()
        device.hold_copies()
        given_up, _ = stage(memory, tensor)
        assert not given_up.arrived()
        with ThreadPoolExecutor(1) as thread:
            releasing = thread.submit(given_up.release)
            time.sleep(0.01)
            assert not memory._free
            device.let_go()
            releasing.result(PATIENCE_S)
        staged = memory.stage_tensors([torch.full((int(device.mib * MIB),), 7, dtype=torch.uint8)])  # at once
        device.synchronize()
        assert staged.tensors[0].eq(7).all()

    def test_tensors_are_let_go_when_their_copies_have_arrived_though_nobody_asks(
        self, stage: Stage, device: Device
    ) -> None:
        memory, tensor = warm(device), device.numbered()
        expected, reference = tensor.cpu(), weakref.ref(tensor.untyped_storage())
        taken = device.module.memory_allocated(device.device)
        device.hold_copies()
        _, copy = stage(memory, tensor)
        del tensor
        gc.collect()
        assert reference() is not None
        device.let_go()
        until(lambda: reference() is None)
        assert taken - device.module.memory_allocated(device.device) >= device.mib * MIB
        assert torch.equal(copy(), expected)


class StagingContract:
    """Copies are what a file would be loaded as, of tensors of any kind and size, and after errors."""

    def test_copies_follow_each_other_in_the_same_pinned_memory(self, device: Device) -> None:
        memory, addresses = warm(device), set()
        for number in range(4):
            staged = memory.stage_tensors([device.numbered(start=number)])
            (copy,) = staged.tensors
            assert copy.is_pinned()
            addresses.add(copy.data_ptr())
            assert torch.equal(copy, device.numbered(start=number).cpu())
            staged.release()
        assert len(addresses) == 1

    def test_nothing_is_cloned_on_the_device(self, device: Device) -> None:
        memory, mib = warm(device, 140 * MIB), 64
        whole, cut = device.numbered(mib), device.numbered(mib).view(1024, -1)
        device.synchronize()
        before = device.module.memory_allocated(device.device)
        device.module.reset_peak_memory_stats(device.device)
        memory.stage_object({"whole": whole, "cut": cut.t()}).release()
        memory.stage_tensors([whole, cut]).release()
        assert device.module.max_memory_allocated(device.device) == before
        staged = memory.stage_tensors([cut.t(), cut[:, ::2]])
        staged.wait()
        assert device.module.max_memory_allocated(device.device) - before <= 2 * tensor_bytes._PIECE
        assert torch.equal(staged.tensors[0], cut.t().cpu())
        assert torch.equal(staged.tensors[1], cut[:, ::2].cpu())

    def various(self, device: Device) -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.rand(300, 400).to(device.device))
        state = {
            "tied": [weight, weight, weight.detach()[1:]],
            "transposed": torch.rand(3, 4).to(device.device).t(),
            "half": torch.rand(5).bfloat16().to(device.device),
            "eighth": torch.rand(5).to(torch.float8_e4m3fn).to(device.device),
            "bytes": torch.arange(7, dtype=torch.uint8).to(device.device),
            "flags": torch.tensor([True, False], device=device.device),
            "scalar": torch.tensor(3.0, device=device.device),
            "empty": torch.empty(0, 3, device=device.device),
            "conjugated": torch.tensor([1 + 2j, 3 - 4j], device=device.device).conj(),
            "host": torch.rand(1000),
            "devices": [torch.full((1000,), of.index, device=of) for of in device.devices],
            "step": 3,
        }
        if device.can_sparse:
            state["sparse"] = torch.eye(3, device=device.device).to_sparse()
        return state

    def test_a_copy_is_what_a_file_would_be_loaded_as(self, device: Device) -> None:
        memory, state = warm(device), self.various(device)
        expected = serialized(torch.load(io.BytesIO(serialized(state)), map_location="cpu", weights_only=False))
        device.hold_copies()
        staged = memory.stage_object(state)
        for of_device in state["devices"]:
            of_device.fill_(-1)
        state["host"].fill_(-1)
        device.let_go()
        assert serialized(staged.object()) == expected

    def test_copies_of_tensors_are_contiguous_and_those_that_come_twice_are_one(self, device: Device) -> None:
        memory, state = warm(device), self.various(device)
        tensors = [*state["tied"], state["transposed"], state["eighth"], state["flags"], state["scalar"]]
        tensors += [state["empty"], state["half"], *state["devices"], state["conjugated"], state["host"]]
        expected = [tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        copies = memory.stage_tensors(tensors).tensors
        for copy, value in zip(copies, expected, strict=True):
            assert copy.dtype == value.dtype
            assert copy.is_contiguous()
            assert copy.reshape(-1).view(torch.uint8).equal(value.resolve_conj().reshape(-1).view(torch.uint8)) or (
                copy.equal(value)
            )
        assert copies[0] is copies[1]

    @pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4095, 4097, MIB + 1])
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
    def test_sizes_of_all_kinds_lie_beside_each_other(self, size: int, dtype: torch.dtype, device: Device) -> None:
        memory = warm(device, 20 * MIB)
        values = [(torch.arange(size) + number).to(dtype) for number in range(3)]
        tensors = [value.to(device.device) for value in values]
        device.hold_copies()
        staged = memory.stage_tensors(tensors, {"again": tensors})
        for tensor in tensors:
            tensor.zero_()
        device.let_go()
        for copies in (staged.tensors, staged.object()["again"]):
            assert all(copy.equal(value) for copy, value in zip(copies, values, strict=True))

    def test_memory_that_runs_out_in_the_middle_is_an_error_once_the_other_copies_have_arrived(
        self, device: Device
    ) -> None:
        memory = warm(device, 40 * MIB)
        tensor, cut = device.numbered(), device.numbered(32).view(1024, -1)
        device.synchronize()
        device.limit_memory(MIB)
        device.hold_copies()
        with ThreadPoolExecutor(1) as thread:
            staging = thread.submit(memory.stage_tensors, [tensor, cut.t()])
            time.sleep(0.05)
            assert not memory._free
            device.let_go()
            with pytest.raises(torch.OutOfMemoryError):
                staging.result(PATIENCE_S)
        assert len(memory._free) == 1
        assert torch.equal(memory.stage_tensors([tensor]).tensors[0], tensor.cpu())

    def test_an_error_in_the_middle_leaves_memory_for_the_next_copy(self, device: Device) -> None:
        memory, tensor = warm(device), device.numbered()
        device.hold_copies()
        with pytest.raises(Exception, match="cannot be saved"):
            memory.stage_tensors([tensor], {"hook": lambda: None})
        assert len(memory._free) == 1
        device.let_go()
        assert torch.equal(memory.stage_object(tensor).object(), tensor.cpu())

    def test_a_save_made_while_all_memory_is_in_use_has_memory_of_its_own(self, device: Device) -> None:
        memory = Staging(2)
        tensors = [device.numbered(start=number) for number in range(3)]
        expected = [tensor.cpu() for tensor in tensors]
        memory.stage_object(tensors[0]).release()
        device.hold_copies()
        staged = []
        for tensor in tensors:
            staged.append(memory.stage_object(tensor))
            tensor.zero_()
        device.let_go()
        for copy, value in zip(staged, expected, strict=True):
            assert torch.equal(copy.object(), value)
            copy.release()

    def test_training_that_goes_on_and_copies_do_not_change_each_other(self, device: Device) -> None:
        def train(memory: Staging | None) -> tuple[list[float], list[bool]]:
            torch.manual_seed(1)
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).to(device.device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            losses, right = [], []
            for _ in range(4):
                if memory is not None:
                    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
                    staged = memory.stage_object(model.state_dict())
                for _ in range(2):
                    loss = model(torch.ones(16, 512, device=device.device)).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
                if memory is not None:
                    right.append(all(torch.equal(staged.object()[name], expected[name].cpu()) for name in expected))
                    staged.release()
            return [loss.item() for loss in losses], right

        assert train(warm(device, 8 * MIB)) == (train(None)[0], [True] * 4)


class RegisteringContract:
    """Memory that is registered, not allocated by torch, counts as pinned, in blocks, and while it is used only."""

    @pytest.fixture(autouse=True)
    def registering(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        device.pins_by_registering(monkeypatch)
        monkeypatch.setattr(cuda_memory, "BLOCK", MIB)
        yield
        gc.collect()
        until(no_memory_is_registered)

    def test_copies_are_not_cut_where_a_block_ends_but_come_whole(self, device: Device) -> None:
        memory = warm(device, 8 * MIB)
        tensors = [device.numbered(0.75, start=number) for number in range(4)] + [device.numbered(2.5)]
        expected = [tensor.cpu() for tensor in tensors]
        tensors.append(device.numbered(1.5).view(1024, -1).t())
        expected.append(tensors[-1].cpu().contiguous())
        device.hold_copies()
        staged = memory.stage_tensors(tensors)
        for tensor in tensors:
            tensor.zero_()
        assert not staged.arrived(), "the host went on while the device was still busy"
        device.let_go()
        assert all(torch.equal(copy, value) for copy, value in zip(staged.tensors, expected, strict=True))

    def test_looking_for_bytes_registering_and_freeing_do_not_spoil_a_capture(self, device: Device) -> None:
        memory, tensor = warm(device), device.numbered()
        expected = tensor.cpu()
        device.hold_copies()
        staged = memory.stage_object(tensor)
        with ThreadPoolExecutor(1) as thread:
            with device.capturing():
                thread.submit(staged.arrived).result(PATIENCE_S)
                thread.submit(register_and_free, device).result(PATIENCE_S)
                device.let_go()
                thread.submit(staged.wait).result(PATIENCE_S)
                until(lambda: not any(thread.name == "checkpoint-copies" for thread in threading.enumerate()))
            assert torch.equal(staged.object(), expected)

    def test_memory_of_which_a_block_cannot_be_registered_is_not_pinned_and_gets_the_copy_all_the_same(
        self, device: Device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device.fail_registering(monkeypatch)
        memory, tensors = Staging(), [device.numbered(0.75), device.numbered(2.5)]
        with pytest.warns(UserWarning, match="are not pinned, .*: CUDA error 2, out of memory"):
            staged = memory.stage_tensors(tensors)
        for copy, tensor in zip(staged.tensors, tensors, strict=True):
            assert not copy.is_pinned()
            assert torch.equal(copy, tensor.cpu())
        staged.release()
        del staged, copy
        again = Staging().stage_tensors(tensors)
        assert all(copy.is_pinned() for copy in again.tensors), "nothing was left registered"

    def test_memory_is_pinned_until_the_last_tensor_of_it_has_gone(self, device: Device) -> None:
        memory = Staging()
        staged = memory.stage_tensors([device.numbered()])
        (copy,) = staged.tensors
        assert copy.is_pinned()
        staged.release()
        del memory, staged
        gc.collect()
        assert copy.is_pinned()
        assert torch.equal(copy, device.numbered().cpu())
        address = copy.data_ptr()
        del copy
        gc.collect()
        until(no_memory_is_registered)
        with ThreadPoolExecutor(1) as thread:  # which the error that this makes ends with
            assert thread.submit(unregister, device, address).result() != 0
