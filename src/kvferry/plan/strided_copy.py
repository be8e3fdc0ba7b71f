"""Strided copies with the fewest and longest runs.

A CuTe *layout* is a function from integers to integers, written as (count, stride) loops. A strided copy is a pair of
such functions, source and destination, over one shared domain. CuTe's ``coalesce`` folds neighbouring loops in four
cases; here a case must hold for source and destination at once:

1. a loop of count 1 is dropped;
2. a loop whose strides both equal the run's length makes the run longer;
3. a loop whose strides both equal the inner neighbour's stride times its count is merged into that neighbour;
4. any other loop stays.

Afterwards no loop has count 1 and no neighbours can be folded. Every byte is copied from and to the same offset as
before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvferry.arrays import Offsets

Loop = tuple[int, int, int]
"""Count, source stride, destination stride."""


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Runs of ``run_bytes`` from source to destination, repeated over loops, innermost loop first.

    >>> copy = StridedCopy(0, 0, 256, ((16, 256, 256), (8, 8192, 4096)))
    >>> coalesce(copy)
    StridedCopy(source_offset=0, destination_offset=0, run_bytes=4096, loops=((8, 8192, 4096),))
    """

    source_offset: int
    destination_offset: int
    run_bytes: int
    loops: tuple[Loop, ...] = ()

    @property
    def num_runs(self) -> int:
        """The number of runs."""
        return int(np.prod([count for count, _, _ in self.loops], dtype=np.int64))

    def expand(self) -> Offsets:
        """Return the runs as rows of source offset, destination offset, length.

        >>> StridedCopy(0, 100, 4, ((2, 16, 8),)).expand().tolist()
        [[0, 100, 4], [16, 108, 4]]
        """
        rows = np.array([[self.source_offset, self.destination_offset, self.run_bytes]], dtype=np.int64)
        for count, source_stride, destination_stride in self.loops:
            step = np.array([source_stride, destination_stride, 0], dtype=np.int64)
            rows = (np.arange(count, dtype=np.int64)[:, None, None] * step + rows).reshape(-1, 3)
        return rows


def coalesce(copy: StridedCopy) -> StridedCopy:
    """Order the loops by destination stride and fold them by the four cases.

    >>> coalesce(StridedCopy(0, 0, 2, ((128, 2, 2), (1, 7, 7), (16, 256, 256), (36, 4096, 4096))))
    StridedCopy(source_offset=0, destination_offset=0, run_bytes=147456, loops=())
    """
    run_bytes, loops = fold(copy.run_bytes, copy.loops)
    return replace(copy, run_bytes=run_bytes, loops=loops)


def fold(run_bytes: int, loops: Iterable[Loop]) -> tuple[int, tuple[Loop, ...]]:
    """Fold loops around a run and return the longer run and the loops that remain.

    >>> fold(2, [(4, 16, 8), (2, 64, 32)])
    (2, ((8, 16, 8),))
    """
    folded: list[Loop] = []
    for count, source, destination in sorted(loops, key=lambda loop: (loop[2], loop[1])):
        if count == 1:
            continue
        if source == destination == run_bytes:
            run_bytes *= count
            continue
        inner_count, inner_source, inner_destination = folded[-1] if folded else (0, 0, 0)
        if folded and (source, destination) == (inner_source * inner_count, inner_destination * inner_count):
            folded[-1] = (inner_count * count, inner_source, inner_destination)
        else:
            folded.append((count, source, destination))
    return run_bytes, tuple(folded)


def merge_rows(rows: Offsets) -> Offsets:
    """Sort rows of source, destination, length by destination; join rows adjacent at both source and destination.

    >>> merge_rows(np.array([[16, 116, 8], [0, 100, 16], [40, 124, 4]])).tolist()
    [[0, 100, 24], [40, 124, 4]]
    """
    if len(rows) < 2:
        return rows
    source, destination, length = np.ascontiguousarray(rows.T)
    if (destination[1:] < destination[:-1]).any():
        order = np.argsort(destination, kind="stable")
        rows, source, destination, length = rows[order], source[order], destination[order], length[order]
    apart = (source[:-1] + length[:-1] != source[1:]) | (destination[:-1] + length[:-1] != destination[1:])
    if apart.all():
        return rows
    starts = np.flatnonzero(np.concatenate(([True], apart)))
    merged = rows[starts]
    merged[:, 2] = np.add.reduceat(length, starts)
    return merged


def place(run_bytes: int, loops: tuple[Loop, ...], places: Offsets) -> list[StridedCopy]:
    """Return the copies of one strided pattern at many places, which are rows of source and destination offset.

    A place is a layer, or a component with the same pattern. Patterns that are adjacent at source and destination join
    into longer runs; the remaining places are split into maximal affine stretches, each of which becomes one loop.

    >>> places = np.array([[0, 0], [256, 256], [512, 512], [4096, 1024], [8192, 2048]])
    >>> [(copy.source_offset, copy.run_bytes, copy.loops) for copy in place(256, (), places)]
    [(0, 768, ()), (4096, 256, ((2, 4096, 1024),))]
    """
    lengths = np.full((len(places), 1), run_bytes, dtype=np.int64)
    rows = merge_rows(np.concatenate((places.astype(np.int64, copy=False), lengths), axis=1))
    copies: list[StridedCopy] = []
    for length in np.unique(rows[:, 2]).tolist():
        same = rows[rows[:, 2] == length, :2]
        longer, fewer = fold(length, loops)
        if len(same) > 1 and longer != length:
            # The longer run may reach the next place: join again.
            copies += place(longer, fewer, same)
        else:
            copies += [coalesce(copy) for copy in _stretches(longer, fewer, same)]
    return sorted(copies, key=lambda copy: copy.destination_offset)


def _stretches(run_bytes: int, loops: tuple[Loop, ...], places: Offsets) -> list[StridedCopy]:
    """Split places, sorted by destination, into maximal stretches of constant step."""
    steps = np.diff(places, axis=0)
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    copies, first = [], 0
    while first < len(places):
        # A stretch that begins at `first` has the step that follows it and ends at the next change after that step.
        position = int(np.searchsorted(changes, first, side="right"))
        last = int(changes[position]) if position < len(changes) else len(places) - 1
        source, destination = places[first].tolist()
        count = last - first + 1
        step = steps[first].tolist() if count > 1 else [0, 0]
        copies.append(StridedCopy(source, destination, run_bytes, (*loops, (count, step[0], step[1]))))
        first = last + 1
    return copies
