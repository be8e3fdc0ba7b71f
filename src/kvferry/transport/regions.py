"""Ranges of memory: registered regions, which check many ranges at once, and the ranges of a list of descriptors."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Addresses, Integers
from kvferry.layout.shard import HOST_DEVICE, Region


def _merge(regions: Iterable[Region]) -> list[Region]:
    """Return ascending regions; those that overlap become one, and those of the host that touch."""
    merged: list[Region] = []
    for region in sorted(regions, key=lambda region: (region.base_address, region.length)):
        last = merged[-1] if merged else None
        if last is not None and last.device == region.device and region.base_address < _reach(last):
            length = max(_end(last), _end(region)) - last.base_address
            merged[-1] = Region(last.base_address, length, last.device)
        else:
            merged.append(region)
    return merged


def _end(region: Region) -> int:
    return region.base_address + region.length


def _reach(region: Region) -> int:
    """Return the address before which the next region must begin to be one with this region."""
    return _end(region) + (region.device == HOST_DEVICE)


class RegionTable:
    """A set of regions that checks many ranges at once.

    Regions that overlap count as one; on the host also those that touch, so a range may extend from one into the next.
    On a device these are two allocations, which CUDA and network cards map one at a time: UCX asks CUDA where the
    allocation of a region's first byte ends, and would reach nothing behind that. Host and devices of one process have
    no address in common.

    >>> table = RegionTable([Region(100, 50), Region(150, 50), Region(200, 10, "cuda:0"), Region(210, 10, "cuda:0")])
    >>> table.regions
    (cpu 0x64 + 100, cuda:0 0xc8 + 10, cuda:0 0xd2 + 10)
    >>> ranges = np.array([[140, 20], [205, 5], [5, 1], [198, 4], [205, 6], [210, 10]], np.uint64)
    >>> table.outside(*ranges.T).tolist()
    [2, 3, 4]
    >>> table.devices, table.device_indices(np.array([140, 205], np.uint64)).tolist()
    (('cpu', 'cuda:0'), [0, 1])
    """

    __slots__ = ("_device_of", "_ends", "_starts", "devices", "regions")

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(_merge(regions))
        self.devices = tuple(sorted({region.device for region in self.regions}))
        self._starts: Addresses = np.array([region.base_address for region in self.regions], np.uint64)
        self._ends: Addresses = np.array([_end(region) for region in self.regions], np.uint64)
        self._device_of = np.array([self.devices.index(region.device) for region in self.regions], np.int64)

    def of_device(self, device: str) -> list[Region]:
        """Return the regions of one device."""
        return [region for region in self.regions if region.device == device]

    def device_indices(self, addresses: Addresses) -> Integers:
        """Return for each address, which must lie inside a region, the index of its device in ``devices``."""
        if len(self.devices) <= 1:
            return np.zeros(len(addresses), np.int64)
        return self._device_of[np.searchsorted(self._starts[1:], addresses, side="right")]

    def device_of(self, address: int) -> str:
        """Return the device of an address; outside of all regions, where nonces are, the host."""
        index = int(np.searchsorted(self._starts, np.uint64(address), side="right")) - 1
        return self.regions[index].device if index >= 0 and address < int(self._ends[index]) else HOST_DEVICE

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


class RangeStream:
    """The local or the remote ranges of a list of descriptors as a stream of bytes, cut for vectored system calls.

    Ranges ``(address, length)`` in order, neighbours merged, addressed by byte position in the stream. The local and
    the remote stream of a transfer have equal length, so each is merged on its own.

    >>> stream = RangeStream(np.array([100, 110, 500], np.uint64), np.array([10, 10, 10], np.uint64))
    >>> stream.cut(5, 25).tolist()
    [[105, 15], [500, 5]]
    >>> stream.reach(5, 1), stream.reach(5, 2)
    (20, 30)
    """

    __slots__ = ("_ends", "_ranges")

    def __init__(self, addresses: Addresses, lengths: Addresses) -> None:
        starts_range = np.ones(len(addresses), bool)
        np.not_equal(addresses[1:], addresses[:-1] + lengths[:-1], out=starts_range[1:])
        first = np.flatnonzero(starts_range)
        ends = np.cumsum(lengths)
        self._ends: Addresses = ends[np.append(first[1:], len(addresses)) - 1] if len(first) else ends
        self._ranges: Addresses = np.empty((len(first), 2), np.uint64)
        self._ranges[:, 0] = addresses[first]
        self._ranges[:, 1] = np.diff(self._ends, prepend=np.uint64(0))

    def __len__(self) -> int:
        return len(self._ranges)

    def reach(self, position: int, max_ranges: int) -> int:
        """Return the position at the end of ``max_ranges`` ranges from ``position``."""
        index = int(np.searchsorted(self._ends, np.uint64(position), side="right"))
        return int(self._ends[min(index + max_ranges, len(self._ends)) - 1])

    def cut(self, start: int, stop: int) -> Addresses:
        """Return the ranges from position ``start`` up to ``stop``, as a new C-contiguous ``(n, 2)`` array."""
        first, last = np.searchsorted(self._ends, np.array([start, stop - 1], np.uint64), side="right")
        ranges = self._ranges[first : last + 1].copy()
        skipped = np.uint64(start) - (self._ends[first] - self._ranges[first, 1])
        ranges[0, 0] += skipped
        ranges[0, 1] -= skipped
        ranges[-1, 1] -= self._ends[last] - np.uint64(stop)
        return ranges
