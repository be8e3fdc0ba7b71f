"""The checks every backend makes of a submission before a byte moves."""

from typing import NamedTuple

import numpy as np

from kvferry.arrays import Addresses, Descriptors
from kvferry.errors import Reason, TransportError
from kvferry.transport.protocol import Direction
from kvferry.transport.regions import RegionTable

MAX_DESCRIPTORS = 1 << 22


class Sides(NamedTuple):
    """The columns of a descriptor array by side."""

    local: Addresses
    remote: Addresses
    lengths: Addresses


def check_submission(descriptors: Descriptors, direction: Direction, local: RegionTable, remote: RegionTable) -> Sides:
    """Return the two sides of descriptors that are well formed and inside both sides' registered memory.

    Raises ``TransportError``: ``INVALID_REQUEST``, ``UNREGISTERED_RANGE``.
    """
    _check_shape(descriptors)
    sources, destinations, lengths = descriptors.T
    sides = Sides(destinations, sources, lengths) if direction is Direction.READ else Sides(*descriptors.T)
    _check_inside("local", local, sides.local, lengths)
    _check_inside("remote", remote, sides.remote, lengths)
    return sides


def _check_shape(descriptors: Addresses) -> None:
    """Refuse arrays that are not descriptors at all (``INVALID_REQUEST``)."""
    if descriptors.ndim != 2 or descriptors.shape[1] != 3 or descriptors.dtype != np.uint64:
        raise TransportError(
            Reason.INVALID_REQUEST,
            f"descriptors must be a uint64 array of shape (n, 3), not {descriptors.dtype} {descriptors.shape}.",
            "Take them from a plan's lower().",
        )
    if len(descriptors) > MAX_DESCRIPTORS:
        raise TransportError(
            Reason.INVALID_REQUEST,
            f"{len(descriptors)} descriptors in one submission; a transport takes {MAX_DESCRIPTORS}.",
            "Split the list.",
        )
    if len(descriptors) and not descriptors[:, 2].all():
        first = int(np.argmin(descriptors[:, 2] != 0))
        raise TransportError(Reason.INVALID_REQUEST, f"descriptor {first} has length 0.", "Leave it out.")


def _check_inside(side: str, table: RegionTable, addresses: Addresses, lengths: Addresses) -> None:
    """Refuse ranges outside the regions registered on ``side`` (``UNREGISTERED_RANGE``)."""
    outside = table.outside(addresses, lengths)
    if len(outside):
        first = int(outside[0])
        raise TransportError(
            Reason.UNREGISTERED_RANGE,
            f"{len(outside)} of {len(addresses)} descriptors leave the {side} side's registered memory; the first is "
            f"descriptor {first}: {int(lengths[first])} bytes at {int(addresses[first]):#x}.",
            f"Registered there: {_describe(table)}.",
        )


def _describe(table: RegionTable) -> str:
    spans = [f"[{r.base_address:#x}, {r.base_address + r.length:#x})" for r in table.regions[:4]]
    more = f" and {len(table.regions) - 4} more" if len(table.regions) > 4 else ""
    return (", ".join(spans) or "nothing") + more


def split_long(descriptors: Descriptors, max_bytes: int) -> Descriptors:
    """Return the descriptors with those longer than ``max_bytes`` cut into pieces, in order.

    >>> split_long(np.array([[0, 100, 5], [50, 200, 2]], np.uint64), 2).tolist()
    [[0, 100, 2], [2, 102, 2], [4, 104, 1], [50, 200, 2]]
    """
    limit = np.uint64(max_bytes)
    if not (descriptors[:, 2] > limit).any():
        return descriptors.copy()
    counts = (descriptors[:, 2] + limit - np.uint64(1)) // limit
    pieces = np.repeat(descriptors, counts.astype(np.int64), axis=0)
    first = np.repeat(np.cumsum(counts) - counts, counts.astype(np.int64))
    skipped = (np.arange(len(pieces), dtype=np.uint64) - first) * limit
    pieces[:, :2] += skipped[:, None]
    pieces[:, 2] = np.minimum(pieces[:, 2] - skipped, limit)
    return pieces


def slice_bounds(lengths: Addresses, max_descriptors: int, max_bytes: int) -> list[int]:
    """Return where slices of a list start and stop: at most so many descriptors, less than twice so many bytes each.

    No length may exceed ``max_bytes``.

    >>> slice_bounds(np.array([8, 1, 1, 8], np.uint64), 2, 8)
    [0, 1, 2, 4]
    """
    starts = np.cumsum(lengths) - lengths
    by_bytes = np.flatnonzero(np.diff(starts // np.uint64(max_bytes))) + 1
    by_count = np.arange(0, len(lengths), max_descriptors)
    bounds: list[int] = np.union1d(by_bytes, by_count).tolist()
    return [*bounds, len(lengths)] if bounds else [0]
