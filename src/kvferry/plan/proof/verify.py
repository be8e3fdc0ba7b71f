"""Checks a lowered list against the shards and the request, by arithmetic of its own.

Nothing here comes from the planner. :mod:`kvferry.plan.proof.needed_bytes` enumerates *units*: needed bytes,
contiguous on both sides, each with the one source address that it must come from. The list is right when it covers
exactly the units' bytes, once, from there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Descriptors, Integers
from kvferry.errors import Reason, VerificationError
from kvferry.layout.shard import Region, Shard
from kvferry.plan.proof.needed_bytes import Heads, Units, needed_from, needed_in
from kvferry.plan.request import GroupBlocks


def verify_pair(
    descriptors: Descriptors, source: Shard, destination: Shard, requests: Sequence[GroupBlocks], heads: Heads
) -> None:
    """Check the list by which one source rank sends these heads (global, by group and component) to a destination.

    What is needed of it are the layers and tokens that both hold. Raises :class:`VerificationError`:
    ``out-of-region``, ``bytes-doubled``, ``bytes-foreign`` (written but not needed), ``bytes-missing`` (needed but not
    written), ``wrong-source`` (written from elsewhere than the same coordinates), or ``invalid-request`` for a request
    that leaves out a group or does not fit its blocks.
    """
    units = needed_from(source, destination, requests, heads)
    rows = _sorted_in_bounds(descriptors, source, destination)
    _check_once(rows)
    found = _compare(rows, units)
    _check_need(found, units)
    _check_source(found, rows, units)


def verify_destination(
    lists: Sequence[tuple[Shard, Descriptors]], destination: Shard, requests: Sequence[GroupBlocks]
) -> None:
    """Check the lists of all source ranks together: they fill the destination's need exactly, whoever sends what.

    Raises as :func:`verify_pair`; a rank that sends what it does not hold is a ``wrong-source``.
    """
    sorted_lists = [(source, _sorted_in_bounds(rows, source, destination)) for source, rows in lists]
    together = np.concatenate([np.empty((0, 3), dtype=np.int64), *(rows for _, rows in sorted_lists)])
    together = together[np.argsort(together[:, 1], kind="stable")]
    _check_once(together)
    need = needed_in(destination, [source for source, _ in lists], requests)
    _check_need(_compare(together, need), need)
    everything = {
        (group.name, component.name): component.heads for group in destination.groups for component in group.components
    }
    for source, rows in sorted_lists:
        units = needed_from(source, destination, requests, everything)
        _check_source(_compare(rows, units), rows, units)


def _sorted_in_bounds(descriptors: Descriptors, source: Shard, destination: Shard) -> Integers:
    """Return the list as signed integers, sorted by destination, once every row lies in one region on each side."""
    for column, side, regions in ((0, "source", source.regions), (1, "destination", destination.regions)):
        inside = np.zeros(len(descriptors), dtype=np.bool_)
        for region in regions:
            inside |= _inside(descriptors[:, column], descriptors[:, 2], region)
        if not inside.all():
            row = int(np.flatnonzero(~inside)[0])
            address, length = int(descriptors[row, column]), int(descriptors[row, 2])
            raise VerificationError(
                Reason.OUT_OF_REGION,
                f"descriptor {row}: {length} bytes at {side} address {address:#x} lie in no region.",
            )
    rows = descriptors.astype(np.int64)
    return rows[np.argsort(rows[:, 1], kind="stable")]


def _inside(address: Descriptors, length: Descriptors, region: Region) -> npt.NDArray[np.bool_]:
    begin, end = np.uint64(region.base_address), np.uint64(region.base_address + region.length)
    # The last comparison may wrap around only where the one before it is false already.
    return (length > 0) & (address >= begin) & (address <= end) & (length <= end - address)


def _check_once(rows: Integers) -> None:
    twice = np.flatnonzero(rows[1:, 1] < (rows[:, 1] + rows[:, 2])[:-1])
    if twice.size:
        address = int(rows[twice[0] + 1, 1])
        raise VerificationError(Reason.BYTES_DOUBLED, f"destination byte {address:#x} is written more than once.")


class _Comparison(NamedTuple):
    """Every stretch of destination bytes between two neighbouring ends of rows or units."""

    start: Integers
    row: Integers
    unit: Integers
    written: npt.NDArray[np.bool_]
    needed: npt.NDArray[np.bool_]


def _compare(rows: Integers, units: Units) -> _Comparison:
    ends = (rows[:, 1], rows[:, 1] + rows[:, 2], units.destination, units.destination + units.length)
    # Not np.unique, which hashes integers: that takes ten times as long.
    bounds = np.sort(np.concatenate(ends))
    start = bounds[:-1][np.diff(bounds) > 0]
    row, written = _covering(rows[:, 1], rows[:, 2], start)
    unit, needed = _covering(units.destination, units.length, start)
    return _Comparison(start, row, unit, written, needed)


def _covering(starts: Integers, lengths: Integers, points: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Return for each point the last interval that begins at or before it, and whether it reaches the point."""
    if not len(starts):
        return np.zeros(len(points), dtype=np.int64), np.zeros(len(points), dtype=np.bool_)
    index = np.maximum(np.searchsorted(starts, points, side="right") - 1, 0)
    return index, (points >= starts[index]) & (points < starts[index] + lengths[index])


def _check_need(found: _Comparison, units: Units) -> None:
    """Raise unless the rows write exactly the bytes that the units need."""
    foreign = np.flatnonzero(found.written & ~found.needed)
    if foreign.size:
        address = int(found.start[foreign[0]])
        raise VerificationError(Reason.BYTES_FOREIGN, f"destination byte {address:#x} is written but not needed.")
    missing = np.flatnonzero(found.needed & ~found.written)
    if missing.size:
        unit = units.name(int(found.unit[missing[0]]))
        raise VerificationError(Reason.BYTES_MISSING, f"{missing.size} stretches are not written, the first in {unit}.")


def _check_source(found: _Comparison, rows: Integers, units: Units) -> None:
    """Raise unless every byte written comes from the source byte with the same coordinates."""
    unknown = np.flatnonzero(found.written & ~found.needed)
    if unknown.size:
        address = int(found.start[unknown[0]])
        raise VerificationError(Reason.WRONG_SOURCE, f"destination byte {address:#x} is not held by its sender.")
    both = found.written & found.needed
    row, unit = found.row[both], found.unit[both]
    sent_from = rows[row, 0] - rows[row, 1]
    wrong = np.flatnonzero(sent_from != units.source[unit] - units.destination[unit])
    if wrong.size:
        name, shift = units.name(int(unit[wrong[0]])), int(sent_from[wrong[0]])
        address = int(found.start[both][wrong[0]]) + shift
        raise VerificationError(Reason.WRONG_SOURCE, f"{name} is read from {address:#x}, where it does not lie.")
