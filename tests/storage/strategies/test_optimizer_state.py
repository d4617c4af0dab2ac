"""The tensors that an optimizer's state is loaded into."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning.fabric.storage.strategies.optimizer_state import by_name, target_factory


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_load_goes_into_the_state_that_an_optimizer_of_fsdp2_has() -> None:
    module = torch.nn.Linear(3, 5, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(2, 3)).sum().backward()

    def target(dtype: torch.dtype = torch.float32) -> int:
        made = target_factory(module, optimizer)("weight", "exp_avg", torch.Size([5, 3]), dtype)
        assert (made.size(), made.dtype) == ((5, 3), dtype)
        return made.to_local().data_ptr()

    target()
    assert not optimizer.state  # which a load makes, not the question
    optimizer.step()
    own = optimizer.state[module.weight]["exp_avg"].to_local().data_ptr()
    assert target() == own
    assert target(torch.bfloat16) != own


def test_numbers_of_parameters_that_are_one_flat_parameter_are_refused_with_what_to_do() -> None:
    module = torch.nn.Linear(2, 2)
    module.weight._fqns = ["weight", "bias"]  # type: ignore[attr-defined]
    state = {"state": {0: {"step": 1}}, "param_groups": [{"params": [0, 1]}]}
    with pytest.raises(ValueError, match=r"numbers for parameters.*Load it with `use_orig_params=True`"):
        by_name(state, module)
