"""Data whose workers take a second to start; a module of its own, since spawned workers import it."""

import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

SECONDS = 1.0


class SlowToSend(Dataset):
    """Takes its time to be pickled, which happens for each worker that is spawned."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)

    def __getstate__(self) -> dict[str, Any]:
        time.sleep(SECONDS)
        return {}


def loader(**options: Any) -> DataLoader:
    return DataLoader(SlowToSend(), batch_size=2, num_workers=1, multiprocessing_context="spawn", **options)


def slowly_constructed_loader() -> DataLoader:
    time.sleep(SECONDS)
    return DataLoader(torch.ones(4, 2), batch_size=2)
