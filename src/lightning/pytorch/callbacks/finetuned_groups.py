"""Groups of parameters that finetuning added to an optimizer before a checkpoint was saved."""

from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def restore(module: "LightningModule", optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Gives an optimizer the groups that it had, and unfreezes the modules of parameters that it did not have yet.

    Args:
        module: The module that is finetuned.
        optimizer: Its optimizer, as it has been configured.
        groups: The groups, with parameters of ``module``.
    """
    from lightning.pytorch.callbacks.finetuning import BaseFinetuning  # which imports this

    configured = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    added = {parameter for group in groups for parameter in group["params"]} - configured
    BaseFinetuning.make_trainable(
        [part for part in module.modules() if not added.isdisjoint(part.parameters(recurse=False))]
    )
    optimizer.param_groups = groups
