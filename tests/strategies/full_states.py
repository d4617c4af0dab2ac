"""What the ranks of ``full_state_worker.py`` load, as one process saves it."""

from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Rows, columns and an uneven part of it are distributed; the rest is not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.columns = nn.Linear(1024, 1024, bias=False)
        self.rows = nn.Linear(1024, 1024, bias=False)
        self.uneven = nn.Linear(3, 5)
        self.register_buffer("counter", torch.tensor([float(seed)]))


def trained() -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed=1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.25, foreach=False)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return net, optimizer


def checkpoint(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As one process saves it. Two entries share memory, and one is not laid out row by row."""
    history = torch.arange(10.0)
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": torch.tensor(7),
        "history": history,
        "latest": {"loss": history[5:], "table": torch.arange(6).reshape(2, 3).t()},
    }
