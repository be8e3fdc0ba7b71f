"""One side of a descriptor list as a stream of bytes, cut for vectored system calls."""

import numpy as np

from kvferry.arrays import Addresses


class PieceStream:
    """Pieces ``(address, length)`` in order, neighbours merged, addressed by byte position in the stream.

    The two sides of a transfer are two streams of equal length, so each may be merged on its own.

    >>> stream = PieceStream(np.array([100, 110, 500], np.uint64), np.array([10, 10, 10], np.uint64))
    >>> stream.cut(5, 25).tolist()
    [[105, 15], [500, 5]]
    >>> stream.reach(5, 1), stream.reach(5, 2)
    (20, 30)
    """

    __slots__ = ("_ends", "_pieces")

    def __init__(self, addresses: Addresses, lengths: Addresses) -> None:
        starts_piece = np.ones(len(addresses), bool)
        np.not_equal(addresses[1:], addresses[:-1] + lengths[:-1], out=starts_piece[1:])
        first = np.flatnonzero(starts_piece)
        ends = np.cumsum(lengths)
        self._ends: Addresses = ends[np.append(first[1:], len(addresses)) - 1] if len(first) else ends
        self._pieces: Addresses = np.empty((len(first), 2), np.uint64)
        self._pieces[:, 0] = addresses[first]
        self._pieces[:, 1] = np.diff(self._ends, prepend=np.uint64(0))

    def __len__(self) -> int:
        return len(self._pieces)

    def reach(self, position: int, max_pieces: int) -> int:
        """Return the furthest position that ``max_pieces`` pieces from here reach."""
        index = int(np.searchsorted(self._ends, np.uint64(position), side="right"))
        return int(self._ends[min(index + max_pieces, len(self._ends)) - 1])

    def cut(self, start: int, stop: int) -> Addresses:
        """Return the pieces of the half-open range of positions, as a new C-contiguous ``(n, 2)`` array."""
        first, last = np.searchsorted(self._ends, np.array([start, stop - 1], np.uint64), side="right")
        pieces = self._pieces[first : last + 1].copy()
        skipped = np.uint64(start) - (self._ends[first] - self._pieces[first, 1])
        pieces[0, 0] += skipped
        pieces[0, 1] -= skipped
        pieces[-1, 1] -= self._ends[last] - np.uint64(stop)
        return pieces
