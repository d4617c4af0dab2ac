"""Columns of numbers in few bytes, which stand in a pickle for the many objects that are made of them.

The metadata of a thousand ranks have a million of torch's small objects. To pickle these takes many seconds, for much
of which no other thread of Python's can run. Here a pickle has columns of numbers, and the functions that make the
objects of them when it is read. These are Python's and torch's own, so that any reader gets the same objects.
"""

import struct
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

#: Types of whole numbers of one, two, four and eight bytes, in :mod:`struct` and NumPy.
_CODES = "BHIQ"


class Made:
    """Stand-in, in a pickle, for the result of a function that is called when the pickle is read.

    One for an iterator can have one place in a pickle only: there it is used up.

    Args:
        function: A function that can be pickled.
        arguments: The arguments of the call.
    """

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function = function
        self._arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, self._arguments


def narrow(numbers: NDArray[np.int64]) -> tuple[str, bytes]:
    """Packs whole numbers from 0 on into as few bytes each as the largest of them takes.

    Returns:
        The code of their type in :mod:`struct` and NumPy, and their bytes, little-endian.
    """
    largest = int(numbers.max(initial=0))
    code = next(code for code in _CODES if largest >> 8 * struct.calcsize(f"<{code}") == 0)
    return code, numbers.astype(f"<{code}").tobytes()


def made_numbers(numbers: NDArray[np.int64]) -> Made:
    """Returns a stand-in for a tuple of the numbers."""
    code, data = narrow(numbers)
    return Made(struct.unpack, f"<{len(numbers)}{code}", data)


def made_sizes(rows: NDArray[np.int64]) -> Made:
    """Returns a stand-in for a list with a :class:`torch.Size` for each row."""
    count, dims = rows.shape
    if dims == 0:
        return Made(list, Made(repeat, torch.Size(), count))
    code, data = narrow(rows)
    return Made(list, Made(map, torch.Size, Made(struct.iter_unpack, f"<{dims}{code}", data)))
