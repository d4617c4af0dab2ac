"""The states of the data loaders of all ranks, each of which is at a position of its own in the data."""

import io
import sys
from typing import Any

import torch

from lightning.fabric.storage.collectives.channel import training_channel
from lightning.fabric.utilities.rank_zero import rank_zero_warn

#: The keys of the states of rank zero's loaders, which is Lightning's, and of those of all ranks.
_OWN, _OF_RANKS = "combined_loader", "combined_loaders_of_ranks"


def gathered(loops: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of the Trainer's loops, with the states of all ranks' loaders on rank zero.

    It is a collective call if there are any loaders with a state.

    Args:
        loops: The state of this rank's loops, which is changed.

    Raises:
        OSError: A rank has a state that cannot be pickled. Every rank raises it, or what the pickler says of it.
    """
    state = loops.get("fit_loop", {}).get("state_dict", {})
    channel = training_channel()
    if _OWN not in state or channel.world_size == 1:
        return loops
    if sys.exc_info()[0] is not None:  # this rank may be the only one that saves, as it does on an exception
        rank_zero_warn(
            "A checkpoint that is saved because of an exception has only the state of the data loaders of rank zero:"
            " all ranks will go on from there."
        )
        return loops
    with channel.talking():
        with channel.working("saving the states of data loaders"):
            own = _pickled(state[_OWN])
        of_ranks = channel.gather(own)
    if of_ranks:
        state[_OF_RANKS] = [torch.load(io.BytesIO(one), map_location="cpu", weights_only=False) for one in of_ranks]
    return loops


def of_this_rank(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the states of this rank's loaders from the saved state of the fit loop."""
    own: list[dict[str, Any]] = state.get(_OWN, [])
    of_ranks = state.get(_OF_RANKS)
    if not of_ranks:
        return own
    channel = training_channel()
    if channel.world_size != len(of_ranks):
        rank_zero_warn(
            f"The checkpoint has the state of the data loaders of {len(of_ranks)} ranks, and these are"
            f" {channel.world_size}: each of them goes on from that of rank zero, so that some of the data may be seen"
            " twice and some not at all."
        )
        return own
    return list(of_ranks[channel.rank])


def _pickled(states: Any) -> bytes:
    file = io.BytesIO()
    torch.save(states, file)
    return file.getvalue()
