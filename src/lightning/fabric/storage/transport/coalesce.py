"""Byte ranges that one request reads together."""

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Ranged(Protocol):
    """A range of bytes, from ``start`` until before ``stop``, such as a :class:`range`."""

    @property
    def start(self) -> int:
        """The first byte."""

    @property
    def stop(self) -> int:
        """The byte after the last."""


_R = TypeVar("_R", bound=Ranged)


def coalesce(ranges: Iterable[_R], gap: int, most: int) -> Iterator[list[_R]]:
    """Groups ranges that are near each other.

    Args:
        ranges: Ranges of one file, most of them in its order. One that begins before its group begins another.
        gap: The most bytes between two ranges of a group.
        most: The most bytes from the first of a group to its last. A range that is longer is alone, each if it is 0.
    """
    group: list[_R] = []
    start = stop = 0
    for one in ranges:
        if group and (one.start < start or one.start - stop > gap or max(stop, one.stop) - start > most):
            yield group
            group = []
        if not group:
            start = stop = one.start
        group.append(one)
        stop = max(stop, one.stop)
        if stop - start >= most:  # without a look at the next one, for which a caller may allocate memory
            yield group
            group = []
    if group:
        yield group
