"""Numbers in few bytes, and what stands in a pickle for the many objects that are made of them.

The metadata of a thousand ranks have a million of torch's small objects. To pickle these takes many seconds, for much
of which no other thread of Python's can run. Here a pickle has columns of numbers, and says which functions make the
objects of them when it is read. As these are Python's and torch's own, any reader gets what it would get otherwise.
"""

import struct
from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

#: Of :mod:`struct`, and of NumPy: whole numbers of one, two, four and eight bytes.
_CODES = "BHIQ"


class Made:
    """Stands in a pickle for what a function returns, which is called when the pickle is read.

    One that stands for an iterator can have one place in a pickle only: there it is used up.

    Args:
        function: It can be pickled, for it is not nested in anything.
        arguments: Of the function.
    """

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function = function
        self._arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, self._arguments


def narrow(numbers: NDArray[np.int64]) -> tuple[str, bytes]:
    """Whole numbers from 0 on, in no more bytes each than the largest of them takes.

    Returns:
        What :mod:`struct` and NumPy call their type, and their bytes, little-endian.
    """
    largest = int(numbers.max(initial=0))
    code = next(code for code in _CODES if largest >> 8 * struct.calcsize(f"<{code}") == 0)
    return code, numbers.astype(f"<{code}").tobytes()


def made_numbers(numbers: NDArray[np.int64]) -> Made:
    """Stands for a tuple of them."""
    code, data = narrow(numbers)
    return Made(struct.unpack, f"<{len(numbers)}{code}", data)


def made_sizes(rows: NDArray[np.int64]) -> Made:
    """Stands for a list of what :class:`torch.Size` makes of each row."""
    count, dims = rows.shape
    if dims == 0:
        return Made(list, Made(repeat, torch.Size(), count))
    code, data = narrow(rows)
    return Made(list, Made(map, torch.Size, Made(struct.iter_unpack, f"<{dims}{code}", data)))
