"""The checks of a submission, which every backend makes before a byte moves."""

from typing import NamedTuple

import numpy as np

from kvferry.arrays import Addresses, Descriptors
from kvferry.errors import Reason, TransportError
from kvferry.transport.protocol import Direction
from kvferry.transport.regions import RegionTable

MAX_DESCRIPTORS = 1 << 22


class Sides(NamedTuple):
    """The columns of a descriptor array as local and remote addresses."""

    local: Addresses
    remote: Addresses
    lengths: Addresses


def check_submission(descriptors: Descriptors, direction: Direction, local: RegionTable, remote: RegionTable) -> Sides:
    """Return local addresses, remote addresses and lengths.

    Raises ``TransportError``: ``INVALID_REQUEST`` for an array that is not a list of descriptors,
    ``UNREGISTERED_RANGE`` for ranges outside registered memory.
    """
    _check_shape(descriptors)
    sources, destinations, lengths = descriptors.T
    sides = Sides(destinations, sources, lengths) if direction is Direction.READ else Sides(*descriptors.T)
    _check_inside("local", local, sides.local, lengths)
    _check_inside("remote", remote, sides.remote, lengths)
    return sides


def _check_shape(descriptors: Addresses) -> None:

    if descriptors.ndim != 2 or descriptors.shape[1] != 3 or descriptors.dtype != np.uint64:
        raise TransportError(
            Reason.INVALID_REQUEST,
            f"descriptors must be a uint64 array of shape (n, 3), not {descriptors.dtype} {descriptors.shape}.",
            "Submit the descriptors of a plan's lower().",
        )
    if len(descriptors) > MAX_DESCRIPTORS:
        raise TransportError(
            Reason.INVALID_REQUEST,
            f"the submission has {len(descriptors)} descriptors; the limit is {MAX_DESCRIPTORS}.",
            "Split the list.",
        )
    if len(descriptors) and not descriptors[:, 2].all():
        first = int(np.argmin(descriptors[:, 2] != 0))
        raise TransportError(Reason.INVALID_REQUEST, f"descriptor {first} has length 0.", "Leave it out.")


def _check_inside(side: str, table: RegionTable, addresses: Addresses, lengths: Addresses) -> None:

    outside = table.outside(addresses, lengths)
    if len(outside):
        first = int(outside[0])
        raise TransportError(
            Reason.UNREGISTERED_RANGE,
            f"{len(outside)} of {len(addresses)} descriptors lie outside the {side} registered memory; the first is "
            f"descriptor {first}: {int(lengths[first])} bytes at {int(addresses[first]):#x}.",
            f"Registered {side} memory: {_describe(table)}.",
        )


def _describe(table: RegionTable) -> str:
    spans = [f"[{r.base_address:#x}, {r.base_address + r.length:#x})" for r in table.regions[:4]]
    more = f" and {len(table.regions) - 4} more" if len(table.regions) > 4 else ""
    return (", ".join(spans) or "nothing") + more
