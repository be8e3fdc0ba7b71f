"""Ranges of memory: registered regions, which check many ranges at once, and the ranges of a list of descriptors."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Addresses
from kvferry.layout.shard import Region


def _merge(regions: Iterable[Region]) -> list[tuple[int, int]]:
    """Return ascending ``(start, end)``; overlapping and touching regions become one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((region.base_address, region.base_address + region.length) for region in regions):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


class RegionTable:
    """A set of regions that checks many ranges at once.

    Regions that overlap or touch count as one, so a range may extend from one into the next.

    >>> table = RegionTable([Region(100, 50), Region(150, 50), Region(300, 10)])
    >>> table.regions
    (cpu 0x64 + 100, cpu 0x12c + 10)
    >>> table.outside(np.array([140, 305, 5], np.uint64), np.array([20, 6, 1], np.uint64)).tolist()
    [1, 2]
    """

    __slots__ = ("_ends", "_starts", "regions")

    def __init__(self, regions: Sequence[Region]) -> None:
        spans = _merge(regions)
        self.regions = tuple(Region(start, end - start) for start, end in spans)
        self._starts: Addresses = np.array([start for start, _ in spans], np.uint64)
        self._ends: Addresses = np.array([end for _, end in spans], np.uint64)

    def outside(self, addresses: Addresses, lengths: Addresses) -> npt.NDArray[np.intp]:
        """Return the indices of the ranges that do not lie inside one region."""
        if not len(self._starts):
            return np.arange(len(addresses))
        if len(self._starts) == 1:
            starts, ends = self._starts[0], self._ends[0]
        else:
            nearest = np.searchsorted(self._starts[1:], addresses, side="right")
            starts, ends = self._starts[nearest], self._ends[nearest]
        # For an address beyond the end the subtraction wraps around, so that case has its own comparison.
        inside = (addresses >= starts) & (addresses <= ends) & (lengths <= ends - addresses)
        return np.flatnonzero(~inside)


class RangeStream:
    """The local or the remote ranges of a list of descriptors as a stream of bytes, cut for vectored system calls.

    Ranges ``(address, length)`` in order, neighbours merged, addressed by byte position in the stream. The local and
    the remote stream of a transfer have equal length, so each is merged on its own.

    >>> stream = RangeStream(np.array([100, 110, 500], np.uint64), np.array([10, 10, 10], np.uint64))
    >>> stream.cut(5, 25).tolist()
    [[105, 15], [500, 5]]
    >>> stream.reach(5, 1), stream.reach(5, 2)
    (20, 30)
    """

    __slots__ = ("_ends", "_ranges")

    def __init__(self, addresses: Addresses, lengths: Addresses) -> None:
        starts_range = np.ones(len(addresses), bool)
        np.not_equal(addresses[1:], addresses[:-1] + lengths[:-1], out=starts_range[1:])
        first = np.flatnonzero(starts_range)
        ends = np.cumsum(lengths)
        self._ends: Addresses = ends[np.append(first[1:], len(addresses)) - 1] if len(first) else ends
        self._ranges: Addresses = np.empty((len(first), 2), np.uint64)
        self._ranges[:, 0] = addresses[first]
        self._ranges[:, 1] = np.diff(self._ends, prepend=np.uint64(0))

    def __len__(self) -> int:
        return len(self._ranges)

    def reach(self, position: int, max_ranges: int) -> int:
        """Return the position at the end of ``max_ranges`` ranges from ``position``."""
        index = int(np.searchsorted(self._ends, np.uint64(position), side="right"))
        return int(self._ends[min(index + max_ranges, len(self._ends)) - 1])

    def cut(self, start: int, stop: int) -> Addresses:
        """Return the ranges from position ``start`` up to ``stop``, as a new C-contiguous ``(n, 2)`` array."""
        first, last = np.searchsorted(self._ends, np.array([start, stop - 1], np.uint64), side="right")
        ranges = self._ranges[first : last + 1].copy()
        skipped = np.uint64(start) - (self._ends[first] - self._ranges[first, 1])
        ranges[0, 0] += skipped
        ranges[0, 1] -= skipped
        ranges[-1, 1] -= self._ends[last] - np.uint64(stop)
        return ranges
