"""A warning for the twins ``lightning`` and ``pytorch-lightning``, the same code, if one is ours and one is stock."""

from importlib.metadata import PackageNotFoundError, version

from lightning.fabric.utilities.rank_zero import rank_zero_warn


def warn_about_stock_twin() -> None:
    """Warns, on rank zero, if this distribution is a build of ours and the other one is installed but is not."""
    names = ["lightning", "pytorch-lightning"]
    mine, twin = names if __name__.partition(".")[0] == "lightning" else reversed(names)
    if _is_ours(mine) and _is_ours(twin) is False:
        rank_zero_warn(
            f"`{mine}` is {version(mine)}, a build with changed I/O paths, but `{twin}` is stock {version(twin)}: what"
            f" imports that one gets none of the changes. Install both from the checkout that `{mine}` came from:"
            " `pip install . ./pytorch-lightning`",
            category=UserWarning,
        )


def _is_ours(distribution: str) -> "bool | None":
    """Returns whether a distribution is a build of ours; None if it is not installed."""
    try:
        return "+io." in version(distribution)
    except PackageNotFoundError:
        return None
