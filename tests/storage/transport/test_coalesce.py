"""Byte ranges that are near each other are read together, and no two that are not."""

from collections.abc import Iterator

from lightning.fabric.storage.transport.coalesce import coalesce


def groups(*ranges: tuple[int, int], gap: int = 2, most: int = 10) -> list[list[tuple[int, int]]]:
    found = coalesce((range(*one) for one in ranges), gap, most)
    return [[(one.start, one.stop) for one in group] for group in found]


def test_ranges_with_a_small_gap_are_one_group() -> None:
    assert groups((5, 6), (8, 9), (12, 13)) == [[(5, 6), (8, 9)], [(12, 13)]]


def test_a_group_is_no_longer_than_it_may_be_but_one_range_can_be() -> None:
    assert groups((0, 4), (4, 8), (8, 12)) == [[(0, 4), (4, 8)], [(8, 12)]]
    assert groups((0, 30), (30, 31)) == [[(0, 30)], [(30, 31)]]
    assert groups((0, 1), (1, 2), most=0) == [[(0, 1)], [(1, 2)]]


def test_ranges_that_overlap_are_one_group_and_one_before_the_group_is_not_in_it() -> None:
    assert groups((0, 6), (1, 2), (7, 8)) == [[(0, 6), (1, 2), (7, 8)]]
    assert groups((8, 9), (7, 8)) == [[(8, 9)], [(7, 8)]]


def test_a_group_that_is_full_comes_before_the_next_range_is_asked_for() -> None:
    def ranges() -> Iterator[range]:
        yield range(0, 10)
        raise AssertionError("it was not needed")

    assert next(coalesce(ranges(), 2, 10)) == [range(0, 10)]
