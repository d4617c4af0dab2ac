"""What no test without a GPU can show: copies that are on their way while both the CPU and the device go on."""

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lightning.fabric.storage.archives import tensor_bytes
from lightning.fabric.storage.background.staging import Staged, Staging
from tests.storage.states import serialized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 2**20
#: Of the device's clock: some tenths of a second, which is longer than staging keeps the CPU busy here.
CYCLES = 1_000_000_000


@pytest.fixture
def warm() -> Iterator[Staging]:
    """Memory that is pinned already, which takes time and waits for the device."""
    memory = Staging()
    memory.warm(600 * MIB, pinned=True)
    memory.stage_object(torch.zeros(1, device="cuda")).release()
    torch.cuda.synchronize()
    yield memory
    torch.cuda.synchronize()


def numbered(size_mib: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + size_mib * MIB // 4, dtype=torch.int32, device="cuda")


def as_object(memory: Staging, tensor: torch.Tensor) -> tuple[Staged, Callable[[], torch.Tensor]]:
    staged = memory.stage_object({"w": tensor})
    return staged, lambda: staged.object()["w"]


def as_tensors(memory: Staging, tensor: torch.Tensor) -> tuple[Staged, Callable[[], torch.Tensor]]:
    staged = memory.stage_tensors([tensor])
    return staged, lambda: staged.tensors[0]


Stage = Callable[[Staging, torch.Tensor], tuple[Staged, Callable[[], torch.Tensor]]]


def has_arrived(staged: Staged) -> bool:
    return all(copied.query() for _, copied in staged._arriving)


@pytest.mark.parametrize("stage", [as_object, as_tensors])
def test_changes_right_after_a_copy_was_begun_do_not_reach_it(stage: Stage, warm: Staging) -> None:
    tensor = numbered(512)
    expected = tensor.cpu()
    torch.cuda._sleep(CYCLES)
    tensor.add_(1)  # is waited for: launched before the copy
    staged, copy = stage(warm, tensor)
    tensor.fill_(-1)  # waits: launched after it
    assert not has_arrived(staged), "the CPU went on while the device was still busy"
    staged.wait()
    assert has_arrived(staged)
    assert torch.equal(copy(), expected + 1)
    assert tensor.eq(-1).all()


@pytest.mark.parametrize("stage", [as_object, as_tensors])
def test_memory_that_is_freed_right_after_a_copy_was_begun_is_used_for_others_only_after_it(
    stage: Stage, warm: Staging
) -> None:
    other = torch.cuda.Stream()  # whose memory comes back to it alone, and which does not wait for copies
    with torch.cuda.stream(other):
        tensor = numbered(512)
    torch.cuda.synchronize()
    expected = tensor.cpu()
    torch.cuda._sleep(CYCLES)
    staged, copy = stage(warm, tensor)
    assert not has_arrived(staged)
    del tensor
    with torch.cuda.stream(other):
        overwriting = torch.full((512 * MIB,), 255, dtype=torch.uint8, device="cuda")
    other.synchronize()
    staged.wait()
    assert torch.equal(copy(), expected)
    assert overwriting.eq(255).all()


def test_a_copy_is_made_of_what_the_current_stream_has_computed(warm: Staging) -> None:
    tensor = torch.zeros(128 * MIB // 4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES)
        tensor.fill_(1)
        staged = warm.stage_object(tensor)
        tensor.fill_(2)
    staged.wait()
    assert staged.object().eq(1).all()


def test_copies_follow_each_other_in_the_same_pinned_memory(warm: Staging) -> None:
    addresses = set()
    for number in range(4):
        staged = warm.stage_tensors([numbered(256, start=number)])
        staged.wait()
        (copy,) = staged.tensors
        assert copy.is_pinned()
        addresses.add(copy.data_ptr())
        assert torch.equal(copy, numbered(256, start=number).cpu())
        staged.release()
    assert len(addresses) == 1


def test_a_copy_that_is_given_up_has_ended_before_its_memory_is_used_again(warm: Staging) -> None:
    torch.cuda._sleep(CYCLES)
    given_up = warm.stage_tensors([numbered(512)])
    assert not has_arrived(given_up)
    given_up.release()
    staged = warm.stage_tensors([torch.full((512 * MIB,), 7, dtype=torch.uint8)])  # from the host, at once
    torch.cuda.synchronize()
    assert staged.tensors[0].eq(7).all()


def test_pinned_memory_is_unpinned_when_the_last_tensor_of_it_has_gone() -> None:
    memory = Staging()
    staged = memory.stage_tensors([numbered(64)])
    (copy,) = staged.tensors
    whole = torch.frombuffer(staged._slot._memory._view, dtype=torch.uint8)  # type: ignore[union-attr]
    assert whole.is_pinned()
    staged.release()
    del memory, staged, whole
    assert copy.is_pinned()
    assert torch.equal(copy, numbered(64).cpu())
    address = copy.data_ptr()
    del copy
    with ThreadPoolExecutor(1) as thread:  # which the error that this makes in CUDA ends with
        assert int(thread.submit(torch.cuda.cudart().cudaHostUnregister, address).result()) != 0, "not pinned any more"


def test_nothing_is_cloned_on_the_device(warm: Staging) -> None:
    whole, cut = numbered(256), numbered(256).view(1024, -1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    warm.stage_object({"whole": whole, "cut": cut.t()}).release()
    warm.stage_tensors([whole, cut]).release()
    assert torch.cuda.max_memory_allocated() == before
    staged = warm.stage_tensors([cut.t(), cut[:, ::2]])
    staged.wait()
    assert torch.cuda.max_memory_allocated() - before <= 2 * tensor_bytes._PIECE
    assert torch.equal(staged.tensors[0], cut.t().cpu())
    assert torch.equal(staged.tensors[1], cut[:, ::2].cpu())


def various() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.rand(300, 400, device="cuda"))
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {
        "tied": [weight, weight, weight.detach()[1:]],
        "transposed": torch.rand(3, 4, device="cuda").t(),
        "half": torch.rand(5, device="cuda").bfloat16(),
        "scalar": torch.tensor(3.0, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "sparse": torch.eye(3, device="cuda").to_sparse(),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j], device="cuda").conj(),
        "host": torch.rand(1000),
        "devices": [torch.full((1000,), device.index, device=device) for device in devices],
        "step": 3,
    }


def test_a_copy_is_what_a_file_would_be_loaded_as(warm: Staging) -> None:
    state = various()
    expected = serialized(torch.load(io.BytesIO(serialized(state)), map_location="cpu", weights_only=False))
    staged = warm.stage_object(state)
    for device in range(torch.cuda.device_count()):
        torch.cuda._sleep(CYCLES // 10)
        state["devices"][device].fill_(-1)
    state["host"].fill_(-1)
    staged.wait()
    assert serialized(staged.object()) == expected


def test_training_that_goes_on_and_copies_do_not_change_each_other(warm: Staging) -> None:
    def train(memory: Staging | None) -> tuple[list[float], list[bool]]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses, right = [], []
        for _ in range(4):
            if memory is not None:
                staged, expected = memory.stage_object(model.state_dict()), model[0].weight.detach().clone()
            for _ in range(2):
                loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            if memory is not None:
                staged.wait()
                right.append(torch.equal(staged.object()["0.weight"], expected.cpu()))
                staged.release()
        return [loss.item() for loss in losses], right

    assert train(warm) == (train(None)[0], [True] * 4)
