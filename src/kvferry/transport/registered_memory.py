"""What all transports share: registered regions, checked submissions, and ``close``."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Self

import msgspec
import numpy as np

from kvferry.arrays import Addresses, Descriptors
from kvferry.errors import Reason, TransportError, install_command
from kvferry.layout.shard import Region
from kvferry.transport.end_points import decode_end_point
from kvferry.transport.protocol import Capabilities, Direction, Peer, RegionTable, Status, Transfer

MAX_DESCRIPTORS = 1 << 22


def install_nixl() -> str:
    """Return what to do where NIXL is not installed. With CUDA 13, its package for CUDA 12 loads nixl-cu13."""
    return f"Install NIXL: {install_command('nixl', 'nixl-cu12')}"


class Sides(NamedTuple):
    """The columns of a descriptor array as local and remote addresses."""

    local: Addresses
    remote: Addresses
    lengths: Addresses

    @classmethod
    def of(cls, descriptors: Descriptors, direction: Direction) -> Self:
        """Return the columns of descriptors that move in this direction."""
        sources, destinations, lengths = descriptors.T
        return (
            cls(destinations, sources, lengths) if direction is Direction.READ else cls(sources, destinations, lengths)
        )


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


class RegisteredMemoryTransport(ABC):
    """``register``, ``submit``, ``poll``, ``cancel`` and ``close``; a subclass connects and moves the bytes.

    Where bytes move inside ``poll`` only, as here, ``cancel`` stops at once. After ``close`` a poll of a pending
    transfer fails it.
    """

    capabilities: Capabilities

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._local = RegionTable([])
        self._closed = False

    def register(self, regions: Sequence[Region]) -> bytes:
        """Add memory and return the end point. Raises ``TransportError`` (``UNSUPPORTED``) for memory of a device that
        the transport does not move, and where no peer could read the end point.

        ``_make_reachable`` raises further errors.
        """
        self._check_open()
        for region in regions:
            if not self.capabilities.moves(region.device):
                raise self._cannot_move(region)
        self._make_reachable(regions)
        self._regions.extend(regions)
        self._local = RegionTable(self._regions)
        return self._readable(self._end_point())

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Check the descriptors and queue them; ``poll`` moves the bytes."""
        self._check_open()
        check_descriptors(descriptors, direction, self._local, peer.regions)
        transfer = self._queue(peer, direction, descriptors)
        if not len(descriptors):
            transfer.status = Status.DONE
        return transfer

    def poll(self, transfer: Transfer) -> Status:
        """Make bounded progress and return the status."""
        if transfer.status is not Status.PENDING:
            return transfer.status
        if self._closed:
            return transfer.fail(self._closed_error())
        return self._advance(transfer)

    def cancel(self, transfer: Transfer) -> Status:
        """Stop at once: bytes move only inside ``poll``."""
        return transfer.cancel()

    def close(self) -> bool:
        """Refuse all later calls."""
        self._closed = True
        return True

    def _readable(self, end_point: msgspec.Struct) -> bytes:
        """Return an end point as bytes, which this side has read as a peer reads them."""
        name, encoded = self.capabilities.name, msgspec.msgpack.encode(end_point)
        try:
            decode_end_point(encoded, type(end_point), name)
        except TransportError as error:
            raise TransportError(
                Reason.UNSUPPORTED,
                f"no other engine could reach this memory over {name}: {error.message}",
                'Set another "transport", or run the engine with fewer regions of memory.',
            ) from error
        return encoded

    def _cannot_move(self, region: Region) -> TransportError:
        """Return the error of memory that this transport does not move."""
        if self.capabilities.moves_device_memory:
            found = (
                f"{self.capabilities.name} moves memory of the host and of CUDA devices; region {region} is neither."
            )
            remedy = "Run the engine on a CUDA device or on the CPU."
        else:
            found = (
                f"{self.capabilities.name} moves host memory only, since the processor makes its copies; region "
                f"{region} is memory of a device."
            )
            remedy = f'Set "transport" to "auto" or "nixl" on both engines. {install_nixl()}'
        return TransportError(Reason.UNSUPPORTED, found, remedy)

    def _make_reachable(self, regions: Sequence[Region]) -> None:
        """Prepare new memory for peers; most transports need nothing. Raises ``TransportError``."""
        return

    @abstractmethod
    def _end_point(self) -> msgspec.Struct:
        """Return what a peer needs to reach all registered memory."""

    @abstractmethod
    def _queue(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Return a pending transfer of checked descriptors; the caller may change the array afterwards."""

    @abstractmethod
    def _advance(self, transfer: Transfer) -> Status:
        """Make bounded progress on a pending transfer and return its status."""

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> TransportError:
        return TransportError(Reason.CLOSED, f"this {self.capabilities.name} transport is closed.", "Open another.")


def check_descriptors(descriptors: Descriptors, direction: Direction, local: RegionTable, remote: RegionTable) -> None:
    """Raise ``TransportError`` (``INVALID_REQUEST``, ``UNREGISTERED_RANGE``) for what no transport moves."""
    _check_shape(descriptors)
    sides = Sides.of(descriptors, direction)
    _check_inside("local", local, sides.local, sides.lengths)
    _check_inside("remote", remote, sides.remote, sides.lengths)


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
