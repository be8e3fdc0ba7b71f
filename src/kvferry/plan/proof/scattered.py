"""Checks scatter without the code that plans it: reads and copies are composed into one list of rows.

What comes out, source address, destination address and length, says where each byte ends up, and is checked by
:mod:`kvferry.plan.proof.verify` as if it had been moved directly.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Integers
from kvferry.errors import Reason, VerificationError
from kvferry.layout.shard import Shard
from kvferry.plan.staging.scatter import Merge


def composed(reads: Integers, merges: Sequence[Merge], stage_bytes: int, source: Shard) -> npt.NDArray[np.uint64]:
    """Return what reads into a stage and the copies that follow them amount to, one row for each piece.

    ``reads`` are rows of source address, stage offset and length. Raises :class:`VerificationError`:
    ``out-of-region`` for a read beyond the stage or the source's regions, ``bytes-doubled`` for a stage byte that is
    read twice, ``bytes-missing`` for one that is copied but never read.

    >>> from kvferry.layout.named_layouts import NamedLayout
    >>> from kvferry.testing.dense_shards import shard_for
    >>> source = shard_for(layers=["0"], num_kv_heads=1, head_size=4, itemsize=1, block_size=2, num_blocks=4,
    ...     layout=NamedLayout.BHLNC)
    >>> merge = Merge(0, 8, 1000, 16, np.array([5, 4]), 4, ((2, 4, 8),))
    >>> composed(np.array([[32, 0, 16]]), [merge], 16, source).tolist()
    [[32, 1080, 4], [36, 1088, 4], [40, 1064, 4], [44, 1072, 4]]
    """
    out = np.concatenate([np.empty((0, 3), dtype=np.int64), *(_rows(merge) for merge in merges)])
    into = reads[np.argsort(reads[:, 1], kind="stable")]
    _check_into(into, stage_bytes, source)
    ends = into[:, 1] + into[:, 2]
    first = np.searchsorted(ends, out[:, 0], side="right")
    last = np.searchsorted(into[:, 1], out[:, 0] + out[:, 2], side="left") - 1
    # What is taken out and was put in by several reads becomes one row for each.
    num_rows = np.maximum(last - first + 1, 1)
    taken = np.repeat(np.arange(len(out)), num_rows)
    put = first[taken] + np.arange(len(taken)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    _check_put(put, len(into), out[taken])
    begin = np.maximum(out[taken, 0], into[put, 1])
    end = np.minimum(out[taken, 0] + out[taken, 2], ends[put])
    rows = np.stack((into[put, 0] + begin - into[put, 1], out[taken, 1] + begin - out[taken, 0], end - begin), axis=1)
    covered = np.bincount(taken, weights=np.maximum(end - begin, 0), minlength=len(out))
    short = np.flatnonzero((covered != out[:, 2]) | (num_rows < 1))
    if short.size:
        _missing(out[short[0]])
    return rows.astype(np.uint64)


def _check_into(into: Integers, stage_bytes: int, source: Shard) -> None:
    inside = (into[:, 1] >= 0) & (into[:, 2] > 0) & (into[:, 1] + into[:, 2] <= stage_bytes)
    held = np.zeros(len(into), dtype=np.bool_)
    for region in source.regions:
        end = region.base_address + region.length
        held |= (into[:, 0] >= region.base_address) & (into[:, 0] + into[:, 2] <= end)
    wrong = np.flatnonzero(~(inside & held))
    if wrong.size:
        raise VerificationError(
            Reason.OUT_OF_REGION,
            f"{into[wrong[0]].tolist()} leaves the stage of {stage_bytes} bytes or the source's regions.",
        )
    twice = np.flatnonzero(into[1:, 1] < (into[:, 1] + into[:, 2])[:-1])
    if twice.size:
        raise VerificationError(Reason.BYTES_DOUBLED, f"stage byte {int(into[twice[0] + 1, 1])} is written twice.")


def _rows(merge: Merge) -> Integers:
    """Return every run of a copy: stage offset, address in the cache and length."""
    stage = np.arange(len(merge.destination_blocks)) * merge.stage_block_stride + merge.stage_offset
    destination = merge.destination_blocks * merge.destination_block_stride + merge.destination_address
    for count, stage_stride, destination_stride in reversed(merge.loops):
        index = np.arange(count)
        stage = (stage[:, None] + index * stage_stride).reshape(-1)
        destination = (destination[:, None] + index * destination_stride).reshape(-1)
    return np.stack((stage, destination, np.full(len(stage), merge.run_bytes)), axis=1)


def _check_put(put: Integers, num_into: int, taken: Integers) -> None:
    unknown = np.flatnonzero((put < 0) | (put >= num_into))
    if unknown.size:
        _missing(taken[unknown[0]])


def _missing(taken: Integers) -> None:
    raise VerificationError(
        Reason.BYTES_MISSING, f"{int(taken[2])} bytes at {int(taken[0])} of the stage are taken out but never put in."
    )
