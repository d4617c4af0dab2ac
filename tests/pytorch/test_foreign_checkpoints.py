"""Files of torch.save that the Trainer has not saved are named, with what is in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

FILES = {
    "state_dict": (BoringModel().state_dict(), "a dictionary of 'layer.weight', 'layer.bias', and no"),
    "fabric": ({name: 1 for name in "abcde"}, "a dictionary of 'a', 'b', 'c', 'd', ..., and no"),
    "list": ([1, 2], "an object of type 'list', and no"),
}


def resume(path: str) -> None:
    Trainer(logger=False, enable_checkpointing=False, accelerator="cpu").fit(BoringModel(), ckpt_path=path)


@pytest.mark.parametrize(
    "load",
    [resume, BoringModel.load_from_checkpoint, LightningDataModule.load_from_checkpoint],
    ids=lambda load: load.__qualname__,
)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_the_trainer_has_not_saved_is_named_with_what_is_in_it(
    kind: str, load: Callable[[str], Any], tmp_path: Path
) -> None:
    content, what = FILES[kind]
    path = str(tmp_path / "other.ckpt")
    torch.save(content, path)
    with pytest.raises(ValueError, match="is no checkpoint of the Trainer's") as raised:
        load(path)
    assert path in str(raised.value)
    assert what in str(raised.value)
