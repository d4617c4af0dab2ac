"""One of two gloo ranks that load full states into a distributed model; run as a script.

``full_state_worker.py RUN_FOLDER RANK`` reads ``cases.json`` there and writes ``rank-N.pt``: what the rank has after
each case, put together to whole tensors, and what it has read.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning.fabric.storage.paths.location import locate
from lightning.fabric.storage.strategies.checkpoint_place import FoundCheckpoint
from lightning.fabric.storage.transport import open as transport
from lightning.fabric.strategies.model_parallel import _load_checkpoint, _load_raw_module_state_from_path
from tests.strategies.full_states import Net

RUN, RANK = Path(sys.argv[1]), int(sys.argv[2])
CASES: dict[str, dict[str, Any]] = json.loads((RUN / "cases.json").read_text())


def count_reads() -> list[int]:
    """The sizes of all reads from now on; of a remote file those of its pickle and its directory are among them."""
    sizes: list[int] = []
    read_into = transport._Named.read_into

    def counting(self: Any, start: int, view: memoryview) -> None:
        sizes.append(len(view))
        read_into(self, start, view)

    transport._Named.read_into = counting  # type: ignore[method-assign]
    return sizes


def parallel(net: Net) -> Net:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(net, mesh, {"columns": ColwiseParallel(), "rows": RowwiseParallel()})
    net.uneven.weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(net.uneven.weight.detach(), mesh))
    return net


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def outcome(case: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    net = parallel(Net())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.5, foreach=False)
    state = {"model": net, "optimizer": optimizer, "epoch": None}
    sizes.clear()
    error, rest = "", None
    try:
        if case.get("lost_by") == RANK:
            case = {**case, "path": case["path"] + ".lost"}
        if "lost_by" in case:  # after it was found
            found = FoundCheckpoint(locate(case["path"]), is_full=True)
            rest = _load_checkpoint(found, state, strict=case["strict"])
        elif case["raw"]:
            _load_raw_module_state_from_path(case["path"], net, world_size=2, strict=case["strict"])
        else:
            rest = _load_checkpoint(case["path"], state, strict=case["strict"])
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {
        "model": {name: whole(value) for name, value in net.state_dict().items()},
        "optimizer": {names[id(p)]: {k: whole(v) for k, v in s.items()} for p, s in optimizer.state.items()},
        "lr": optimizer.param_groups[0]["lr"],
        "epoch": state["epoch"],
        "rest": rest,
        "error": error,
        "read": list(sizes),
    }


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", init_method=f"file://{RUN}/store", rank=RANK, world_size=2)
    counted = count_reads()
    torch.save({name: outcome(case, counted) for name, case in CASES.items()}, RUN / f"rank-{RANK}.pt")
    torch.distributed.destroy_process_group()
