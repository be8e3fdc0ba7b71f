"""The local or the remote ranges of a list of descriptors as a stream of bytes, cut for vectored system calls."""

import numpy as np

from kvferry.arrays import Addresses


class RangeStream:
    """Ranges ``(address, length)`` in order, neighbours merged, addressed by byte position in the stream.

    The local and the remote stream of a transfer have equal length, so each is merged on its own.

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
