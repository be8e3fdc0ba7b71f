"""The proof of a plan: checks a lowered list against the shards and the request.

The proof shares no code with the planner. :mod:`kvferry.plan.proof.needed_bytes` enumerates *units*: needed bytes that
are contiguous at source and destination, each with its source address. A list is right if it writes exactly the units'
bytes, each once, from its source address. For scatter, :func:`compose` first turns the reads into the stage and the
copies out of it into one list from cache to cache.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.arrays import Descriptors, Flags, Integers
from kvferry.errors import Reason, VerificationError
from kvferry.layout.shard import Region, Shard
from kvferry.plan.proof.needed_bytes import Heads, Units, all_heads, needed_from, needed_in
from kvferry.plan.request import GroupBlocks

if TYPE_CHECKING:
    from kvferry.plan.staging.scatter import Merge


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


def compose(reads: Integers, merges: Sequence["Merge"], stage_bytes: int, source: Shard) -> Descriptors:
    """Return the list from cache to cache that is equal to reads into a stage and copies out of it.

    ``reads`` are rows of source address, stage offset and length. Raises :class:`VerificationError`: ``out-of-region``
    for a read outside the stage or the source's regions, ``bytes-doubled`` for a stage byte that is written twice,
    ``bytes-missing`` for a stage byte that is copied but never written.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.plan.staging.scatter import Merge
    >>> from kvferry.layout.dense import shard_for
    >>> source = shard_for(layers=["0"], num_kv_heads=1, head_size=4, itemsize=1, block_size=2, num_blocks=4,
    ...     layout=NamedLayout.BHLNC)
    >>> merge = Merge(0, 8, 1000, 16, np.array([5, 4]), 4, ((2, 4, 8),))
    >>> compose(np.array([[32, 0, 16]]), [merge], 16, source).tolist()
    [[32, 1080, 4], [36, 1088, 4], [40, 1064, 4], [44, 1072, 4]]
    """
    copies = np.concatenate([np.empty((0, 3), dtype=np.int64), *(_rows(merge) for merge in merges)])
    reads = reads[np.argsort(reads[:, 1], kind="stable")]
    _check_reads(reads, stage_bytes, source)
    ends = reads[:, 1] + reads[:, 2]
    first = np.searchsorted(ends, copies[:, 0], side="right")
    last = np.searchsorted(reads[:, 1], copies[:, 0] + copies[:, 2], side="left") - 1
    # A copied run that several reads have filled becomes one row per read.
    num_rows = np.maximum(last - first + 1, 1)
    copy = np.repeat(np.arange(len(copies)), num_rows)
    read = first[copy] + np.arange(len(copy)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    unread = np.flatnonzero((read < 0) | (read >= len(reads)))
    if unread.size:
        _missing(copies[copy[unread[0]]])
    begin = np.maximum(copies[copy, 0], reads[read, 1])
    end = np.minimum(copies[copy, 0] + copies[copy, 2], ends[read])
    source_address = reads[read, 0] + begin - reads[read, 1]
    rows = np.stack((source_address, copies[copy, 1] + begin - copies[copy, 0], end - begin), axis=1)
    covered = np.bincount(copy, weights=np.maximum(end - begin, 0), minlength=len(copies))
    short = np.flatnonzero((covered != copies[:, 2]) | (num_rows < 1))
    if short.size:
        _missing(copies[short[0]])
    return rows.astype(np.uint64)


def _check_reads(reads: Integers, stage_bytes: int, source: Shard) -> None:
    inside = (reads[:, 1] >= 0) & (reads[:, 2] > 0) & (reads[:, 1] + reads[:, 2] <= stage_bytes)
    held = np.zeros(len(reads), dtype=np.bool_)
    for region in source.regions:
        end = region.base_address + region.length
        held |= (reads[:, 0] >= region.base_address) & (reads[:, 0] + reads[:, 2] <= end)
    wrong = np.flatnonzero(~(inside & held))
    if wrong.size:
        raise VerificationError(
            Reason.OUT_OF_REGION,
            f"{reads[wrong[0]].tolist()} leaves the stage of {stage_bytes} bytes or the source's regions.",
        )
    twice = np.flatnonzero(reads[1:, 1] < (reads[:, 1] + reads[:, 2])[:-1])
    if twice.size:
        raise VerificationError(Reason.BYTES_DOUBLED, f"stage byte {int(reads[twice[0] + 1, 1])} is written twice.")


def _rows(merge: "Merge") -> Integers:
    """Return every run of a copy: stage offset, address in the cache and length."""
    stage = np.arange(len(merge.destination_blocks)) * merge.stage_block_stride + merge.stage_offset
    destination = merge.destination_blocks * merge.destination_block_stride + merge.destination_address
    for count, stage_stride, destination_stride in reversed(merge.loops):
        index = np.arange(count)
        stage = (stage[:, None] + index * stage_stride).reshape(-1)
        destination = (destination[:, None] + index * destination_stride).reshape(-1)
    return np.stack((stage, destination, np.full(len(stage), merge.run_bytes)), axis=1)


def _missing(copied: Integers) -> None:
    raise VerificationError(
        Reason.BYTES_MISSING, f"{int(copied[2])} bytes at {int(copied[0])} of the stage are copied but never read."
    )
