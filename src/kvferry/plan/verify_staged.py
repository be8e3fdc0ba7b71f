"""Checks staged moves without the code that makes them: reads and copies are composed into one list of rows.

What comes out, source address, destination address and length, says where each byte ends up, and is checked by
:mod:`kvferry.plan.verify` as if it had been moved directly.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.errors import Reason, VerificationError
from kvferry.layout.shard import Shard
from kvferry.plan.staged import Merge

Integers = npt.NDArray[np.int64]


def composed(reads: Integers, merges: Sequence[Merge], stage_bytes: int, source: Shard) -> npt.NDArray[np.uint64]:
    """Return what reads into a stage and the copies that follow them amount to, one row for each piece.

    ``reads`` are rows of source address, stage offset and length. Raises :class:`VerificationError`:
    ``out-of-region`` for a read beyond the stage or the source's regions, ``bytes-doubled`` for a stage byte that is
    read twice, ``bytes-missing`` for one that is copied but never read.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.layout.shapes import shard_for
    >>> source = shard_for(layers=["0"], num_kv_heads=1, head_size=4, itemsize=1, block_size=2, num_blocks=4,
    ...     layout=NamedLayout.BHLNC)
    >>> merge = Merge(0, 8, 1000, 16, np.array([5, 4]), 4, ((2, 4, 8),))
    >>> composed(np.array([[32, 0, 16]]), [merge], 16, source).tolist()
    [[32, 1080, 4], [36, 1088, 4], [40, 1064, 4], [44, 1072, 4]]
    """
    reads = reads[np.argsort(reads[:, 1], kind="stable")]
    _check_reads(reads, stage_bytes, source)
    copies = np.concatenate([np.empty((0, 3), dtype=np.int64), *(_rows(merge) for merge in merges)])
    ends = reads[:, 1] + reads[:, 2]
    first = np.searchsorted(ends, copies[:, 0], side="right")
    last = np.searchsorted(reads[:, 1], copies[:, 0] + copies[:, 2], side="left") - 1
    # A copy whose bytes come from several reads becomes one row for each.
    num_rows = np.maximum(last - first + 1, 1)
    copy = np.repeat(np.arange(len(copies)), num_rows)
    read = first[copy] + np.arange(len(copy)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    _check_read(read, len(reads), copies[copy])
    begin = np.maximum(copies[copy, 0], reads[read, 1])
    end = np.minimum(copies[copy, 0] + copies[copy, 2], ends[read])
    rows = np.stack(
        (reads[read, 0] + begin - reads[read, 1], copies[copy, 1] + begin - copies[copy, 0], end - begin), axis=1
    )
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
            f"read {reads[wrong[0]].tolist()} leaves the stage of {stage_bytes} bytes or the source's regions.",
        )
    twice = np.flatnonzero(reads[1:, 1] < (reads[:, 1] + reads[:, 2])[:-1])
    if twice.size:
        raise VerificationError(Reason.BYTES_DOUBLED, f"stage byte {int(reads[twice[0] + 1, 1])} is read twice.")


def _rows(merge: Merge) -> Integers:
    """Return every run of a merge: stage offset, destination address and length."""
    stage = np.arange(len(merge.destination_blocks)) * merge.stage_block_stride + merge.stage_offset
    destination = merge.destination_blocks * merge.destination_block_stride + merge.destination_address
    for count, stage_stride, destination_stride in reversed(merge.loops):
        index = np.arange(count)
        stage = (stage[:, None] + index * stage_stride).reshape(-1)
        destination = (destination[:, None] + index * destination_stride).reshape(-1)
    return np.stack((stage, destination, np.full(len(stage), merge.run_bytes)), axis=1)


def _check_read(read: Integers, num_reads: int, copies: Integers) -> None:
    unread = np.flatnonzero((read < 0) | (read >= num_reads))
    if unread.size:
        _missing(copies[unread[0]])


def _missing(copy: Integers) -> None:
    raise VerificationError(
        Reason.BYTES_MISSING, f"{int(copy[2])} bytes at {int(copy[0])} of the stage are copied but not read."
    )
