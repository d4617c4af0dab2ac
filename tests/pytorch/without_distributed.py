"""Trains where PyTorch was built without its distributed package; run as a script, with the URL of a
folder in which there is a sharded checkpoint.

Such builds are made for macOS, Windows and small machines. What tells that a build has the package is removed before
PyTorch looks for it.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class WithoutDistributed(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torch.distributed":
            compiled = sys.modules["torch._C"]
            for built in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                vars(compiled).pop(built, None)
        return None


def main(url: str) -> None:
    import pytest
    import torch

    import lightning.pytorch as L
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import AsyncCheckpointIO, TorchCheckpointIO
    from lightning.fabric.storage.tools.discover import why_incomplete
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    assert not torch.distributed.is_available()
    assert "torch.distributed.checkpoint" not in sys.modules

    for name, plugin in (("plain", TorchCheckpointIO()), ("async", AsyncCheckpointIO())):
        for epochs in (1, 2):
            checkpoint = ModelCheckpoint(f"{url}/{name}", save_last=True, save_top_k=-1)
            trainer = L.Trainer(
                accelerator="cpu", max_epochs=epochs, limit_train_batches=2, limit_val_batches=1, logger=False,
                callbacks=[checkpoint], plugins=[plugin], enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(BoringModel(), ckpt_path="last" if epochs > 1 else None)
        assert trainer.global_step == 4
        assert TorchCheckpointIO().load_checkpoint(f"{url}/{name}/last.ckpt")["global_step"] == 4

    fabric = Fabric(accelerator="cpu", devices=1)
    state = {"model": fabric.setup_module(torch.nn.Linear(2, 2)), "step": 3}
    fabric.save(f"{url}/fabric.ckpt", state)
    state["step"] = 0
    fabric.load(f"{url}/fabric.ckpt", state)
    assert state["step"] == 3

    with pytest.raises(ImportError, match=f"{url}/sharded.ckpt is a sharded checkpoint"):
        why_incomplete(f"{url}/sharded.ckpt")


if __name__ == "__main__":
    sys.meta_path.insert(0, WithoutDistributed())
    main(sys.argv[1])
