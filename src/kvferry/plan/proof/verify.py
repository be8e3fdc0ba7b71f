"""The proof of a plan: checks a lowered list against the shards and the request.

The proof shares no code with the planner. :mod:`kvferry.plan.proof.needed_bytes` enumerates *units*: needed bytes that
are contiguous at source and destination, each with its source address. A list is right if it writes exactly the units'
bytes, each once, from its source address.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvferry.arrays import Descriptors, Flags, Integers
from kvferry.errors import Reason, VerificationError
from kvferry.layout.shard import Region, Shard
from kvferry.plan.proof.needed_bytes import Heads, Units, all_heads, needed_from, needed_in
from kvferry.plan.request import GroupBlocks


def verify_pair(
    descriptors: Descriptors, source: Shard, destination: Shard, requests: Sequence[GroupBlocks], heads: Heads
) -> None:
    """Check the list with which one source rank sends these heads (global, by group and component).

    The list must write the layers and tokens that source and destination have in common. Raises
    :class:`VerificationError`: ``out-of-region``, ``bytes-doubled``, ``bytes-foreign`` (written but not needed),
    ``bytes-missing`` (needed but not written), ``wrong-source`` (from a source byte with other coordinates), or
    ``invalid-request`` for a request that leaves out a group or does not fit its blocks.
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
    """Check that the lists of all source ranks together write exactly the bytes that the destination needs.

    Raises as :func:`verify_pair`; a rank that sends bytes it does not hold is a ``wrong-source``.
    """
    sorted_lists = [(source, _sorted_in_bounds(rows, source, destination)) for source, rows in lists]
    together = np.concatenate([np.empty((0, 3), dtype=np.int64), *(rows for _, rows in sorted_lists)])
    together = together[np.argsort(together[:, 1], kind="stable")]
    _check_once(together)
    need = needed_in(destination, [source for source, _ in lists], requests)
    _check_need(_compare(together, need), need)
    for source, rows in sorted_lists:
        units = needed_from(source, destination, requests, all_heads(destination))
        _check_source(_compare(rows, units), rows, units)


def _sorted_in_bounds(descriptors: Descriptors, source: Shard, destination: Shard) -> Integers:
    """Return the list as signed integers, sorted by destination. Raises for a row that lies in no region."""
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


def _inside(address: Descriptors, length: Descriptors, region: Region) -> Flags:
    begin, end = np.uint64(region.base_address), np.uint64(region.base_address + region.length)
    # The last comparison wraps around only where the comparison before it is false.
    return (length > 0) & (address >= begin) & (address <= end) & (length <= end - address)


def _check_once(rows: Integers) -> None:
    twice = np.flatnonzero(rows[1:, 1] < (rows[:, 1] + rows[:, 2])[:-1])
    if twice.size:
        address = int(rows[twice[0] + 1, 1])
        raise VerificationError(Reason.BYTES_DOUBLED, f"destination byte {address:#x} is written more than once.")


class _Comparison(NamedTuple):
    """The stretches of destination bytes between all starts and ends of rows and units."""

    start: Integers
    row: Integers
    unit: Integers
    written: Flags
    needed: Flags


def _compare(rows: Integers, units: Units) -> _Comparison:
    ends = (rows[:, 1], rows[:, 1] + rows[:, 2], units.destination, units.destination + units.length)
    # Not np.unique, which hashes integers: that takes ten times as long.
    bounds = np.sort(np.concatenate(ends))
    start = bounds[:-1][np.diff(bounds) > 0]
    row, written = _covering(rows[:, 1], rows[:, 2], start)
    unit, needed = _covering(units.destination, units.length, start)
    return _Comparison(start, row, unit, written, needed)


def _covering(starts: Integers, lengths: Integers, points: Integers) -> tuple[Integers, Flags]:
    """Return for each point the last interval that begins at or before the point, and whether it covers the point."""
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
        raise VerificationError(Reason.WRONG_SOURCE, f"destination byte {address:#x} comes from a rank without it.")
    both = found.written & found.needed
    row, unit = found.row[both], found.unit[both]
    sent_from = rows[row, 0] - rows[row, 1]
    wrong = np.flatnonzero(sent_from != units.source[unit] - units.destination[unit])
    if wrong.size:
        name, shift = units.name(int(unit[wrong[0]])), int(sent_from[wrong[0]])
        address = int(found.start[both][wrong[0]]) + shift
        raise VerificationError(Reason.WRONG_SOURCE, f"{name} is read from {address:#x}, which holds other bytes.")
