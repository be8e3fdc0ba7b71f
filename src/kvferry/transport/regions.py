"""Registered memory, and the check that ranges lie inside it."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Addresses
from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region


def _merge(regions: Iterable[Region]) -> list[tuple[int, int]]:
    """Return ascending ``(start, end)``; overlapping and touching regions become one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((region.base_address, region.base_address + region.length) for region in regions):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


class RegionTable:
    """A set of regions that checks many ranges at once.

    Regions that overlap or touch count as one, so a range may extend from one into the next.

    >>> table = RegionTable([Region(100, 50), Region(150, 50), Region(300, 10)])
    >>> table.regions
    (cpu 0x64 + 100, cpu 0x12c + 10)
    >>> table.outside(np.array([140, 305, 5], np.uint64), np.array([20, 6, 1], np.uint64)).tolist()
    [1, 2]
    """

    __slots__ = ("_ends", "_starts", "regions")

    def __init__(self, regions: Sequence[Region]) -> None:
        spans = _merge(regions)
        self.regions = tuple(Region(start, end - start) for start, end in spans)
        self._starts: Addresses = np.array([start for start, _ in spans], np.uint64)
        self._ends: Addresses = np.array([end for _, end in spans], np.uint64)

    def outside(self, addresses: Addresses, lengths: Addresses) -> npt.NDArray[np.intp]:
        """Return the indices of the ranges that do not lie inside one region."""
        if not len(self._starts):
            return np.arange(len(addresses))
        if len(self._starts) == 1:
            starts, ends = self._starts[0], self._ends[0]
        else:
            nearest = np.searchsorted(self._starts[1:], addresses, side="right")
            starts, ends = self._starts[nearest], self._ends[nearest]
        # For an address beyond the end the subtraction wraps around, so that case has its own comparison.
        inside = (addresses >= starts) & (addresses <= ends) & (lengths <= ends - addresses)
        return np.flatnonzero(~inside)


def check_regions(regions: Sequence[Region], transport: str) -> None:
    """Refuse memory that a host-memory transport cannot reach (``UNSUPPORTED``)."""
    for region in regions:
        if region.device != "cpu":
            raise TransportError(
                Reason.UNSUPPORTED,
                f"{transport} moves host memory only; region {region} is not host memory.",
                "Register memory of the device 'cpu'.",
            )
