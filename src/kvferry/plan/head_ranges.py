"""Sets of heads as ranges: a convolution's state has many thousands of heads."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.layout.shard import HeadRange

Ranges = tuple[HeadRange, ...]
"""Ascending ranges with gaps between them: a canonical form, so that equal sets are equal values."""


class HeadOverlap(NamedTuple):
    """Heads that source and destination hold: the local index of the first head in each, and the number."""

    source_head: int
    destination_head: int
    num_heads: int


def canonical(heads: Sequence[HeadRange]) -> Ranges:
    """Return disjoint ranges, which may be in any order, as a set.

    >>> canonical([HeadRange(4, 6), HeadRange(0, 2), HeadRange(2, 3)])
    (0:3, 4:6)
    """
    ranges: list[HeadRange] = []
    for held in sorted(heads, key=lambda held: held.start):
        if ranges and ranges[-1].end == held.start:
            ranges[-1] = HeadRange(ranges[-1].start, held.end)
        else:
            ranges.append(held)
    return tuple(ranges)


def count(heads: Sequence[HeadRange]) -> int:
    """Return the number of heads in the ranges.

    >>> count([HeadRange(0, 2), HeadRange(5, 6)])
    3
    """
    return sum(len(held) for held in heads)


def common(left: Sequence[HeadRange], right: Sequence[HeadRange]) -> Ranges:
    """Return the intersection.

    >>> common([HeadRange(0, 4), HeadRange(6, 8)], [HeadRange(3, 7)])
    (3:4, 6:7)
    """
    bounds = [(max(one.start, other.start), min(one.end, other.end)) for one in left for other in right]
    return canonical([HeadRange(start, end) for start, end in bounds if start < end])


def without(left: Sequence[HeadRange], right: Sequence[HeadRange]) -> Ranges:
    """Return the heads of ``left`` that are not in ``right``.

    >>> without([HeadRange(0, 8)], [HeadRange(3, 4), HeadRange(6, 8)])
    (0:3, 4:6)
    """
    rest = list(left)
    for taken in right:
        before = [(held.start, min(held.end, taken.start)) for held in rest]
        bounds = before + [(max(held.start, taken.end), held.end) for held in rest]
        rest = [HeadRange(start, end) for start, end in bounds if start < end]
    return canonical(rest)


def match_heads(
    source: Sequence[HeadRange], destination: Sequence[HeadRange], wanted: Sequence[HeadRange]
) -> list[HeadOverlap]:
    """Return the local indices of the wanted heads in source and destination, as stretches of consecutive heads.

    >>> match_heads([HeadRange(0, 4)], [HeadRange(2, 8)], [HeadRange(0, 8)])
    [HeadOverlap(source_head=2, destination_head=0, num_heads=2)]
    """
    overlaps = []
    for source_head, sent in _local(source):
        for destination_head, received in _local(destination):
            for both in common(common([sent], [received]), wanted):
                local = source_head + both.start - sent.start, destination_head + both.start - received.start
                overlaps.append(HeadOverlap(*local, len(both)))
    return overlaps


def _local(heads: Sequence[HeadRange]) -> list[tuple[int, HeadRange]]:
    """Return each range with the local index of its first head."""
    counts = [0, *(len(held) for held in heads)]
    return [(int(first), held) for first, held in zip(np.cumsum(counts)[:-1], heads, strict=True)]
