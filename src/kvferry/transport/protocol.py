"""The interface of a transport: six verbs, called by one thread at a time.

``register`` local memory and send the end point to a peer, ``connect`` to a peer's end point, ``submit`` descriptors,
``poll`` until the transfer ends, ``cancel``, ``close``. A transport makes progress only inside these calls; ``poll``
makes a bounded amount of progress and returns. A connection is a transfer too: it reads a nonce, and its peer can be
used once the transfer is ``DONE``.
"""

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Addresses, Descriptors, Integers
from kvferry.errors import TransportError
from kvferry.layout.shard import HOST_DEVICE, Region

CUDA_DEVICE = re.compile(r"cuda:([0-9]{1,3})")


class Direction(StrEnum):
    """Which side is remote: the source of a ``READ``, the destination of a ``WRITE``."""

    READ = "read"
    WRITE = "write"


class Status(StrEnum):
    """The status of a transfer. All but ``PENDING`` are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a transport.

    ``cancel_is_immediate``: ``cancel`` returns ``CANCELLED`` at once; otherwise a cancelled transfer stays ``PENDING``
    until no more bytes can land.

    ``moves_device_memory``: regions may lie on CUDA devices, by their names in torch, such as ``cuda:0``. Once a
    transfer that landed in such memory is ``DONE``, work that is launched on the device afterwards sees the bytes.

    ``ends_with_process``: a ``WRITE`` is carried out by the process that submits it, to a process of its host and pid
    namespace: no byte of it lands once that process has ended. ``close_ends_writes``: no byte of a peer on another
    host, or of a process that has ended, lands once ``close`` has returned True.
    """

    name: str
    cancel_is_immediate: bool = True
    ends_with_process: bool = False
    close_ends_writes: bool = False
    moves_device_memory: bool = False

    def moves(self, device: str) -> bool:
        """Return whether the transport moves memory of this device.

        >>> Capabilities("nixl", moves_device_memory=True).moves("cuda:1"), Capabilities("cma").moves("cuda:1")
        (True, False)
        """
        return device == HOST_DEVICE or (self.moves_device_memory and CUDA_DEVICE.fullmatch(device) is not None)


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


def _merge(regions: Iterable[Region]) -> list[Region]:
    """Return ascending regions; those that overlap become one, and those of the host that touch."""
    merged: list[Region] = []
    for region in sorted(regions, key=lambda region: (region.base_address, region.length)):
        last = merged[-1] if merged else None
        if last is not None and last.device == region.device and region.base_address < _merges_before(last):
            length = max(_end(last), _end(region)) - last.base_address
            merged[-1] = Region(last.base_address, length, last.device)
        else:
            merged.append(region)
    return merged


def _end(region: Region) -> int:
    return region.base_address + region.length


def _merges_before(region: Region) -> int:
    """Return the address before which the next region must begin to be one with this region."""
    return _end(region) + (region.device == HOST_DEVICE)


@dataclass(slots=True, eq=False)
class Peer:
    """A reachable peer and its registered regions. ``close`` releases the connection (twice is fine)."""

    name: str
    regions: RegionTable

    def close(self) -> None:
        """Release the connection; its transfers must have ended."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One submission and its progress. ``error`` is set exactly when ``status`` is ``FAILED``.

    ``may_land`` says of a ``WRITE`` that is ``FAILED`` whether bytes of it may still land, out of a connection that
    broke. A transport whose bytes end with its calls, or that has posted none, says that none may.
    """

    peer: Peer
    direction: Direction
    num_descriptors: int
    num_bytes: int
    bytes_done: int = 0
    status: Status = Status.PENDING
    error: TransportError | None = None
    may_land: bool = True

    def fail(self, error: TransportError) -> Status:
        """End as ``FAILED`` with this error."""
        self.error = error
        self.status = Status.FAILED
        return self.status

    def cancel(self) -> Status:
        """End as ``CANCELLED``, unless it has ended."""
        if self.status is Status.PENDING:
            self.status = Status.CANCELLED
        return self.status


class Transport(Protocol):
    """Moves bytes between the registered memory of this process and of peers."""

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of this transport."""

    def register(self, regions: Sequence[Region]) -> bytes:
        """Add memory and return the end point: opaque bytes with which a peer reaches all memory registered so far.

        The memory must stay mapped until ``close``.
        """

    def connect(self, end_point: bytes) -> Transfer:
        """Begin to connect to a peer by reading its nonce; ``transfer.peer`` can be used once the transfer is ``DONE``.

        The transfer ends within some seconds even if the peer is stopped or dead, and at once when cancelled. Raises,
        or fails with, ``TransportError``: ``MALFORMED_MESSAGE`` (raised) for bytes that are not an end point,
        ``TRANSPORT_UNAVAILABLE``, ``PERMISSION_DENIED``, ``PEER_UNREACHABLE``, ``PEER_DIED`` or ``PEER_CHANGED``.
        """

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Check the descriptors and start or queue the copies; an empty list is ``DONE`` at once.

        Source and destination of every descriptor are checked before a byte moves. Raises ``TransportError`` for errors
        of the caller: ``INVALID_REQUEST`` (also for a length of 0), ``UNREGISTERED_RANGE``, ``UNSUPPORTED``,
        ``CLOSED``. Later errors end the transfer as ``FAILED``.
        """

    def poll(self, transfer: Transfer) -> Status:
        """Make bounded progress on the caller's thread and return the status. A failed peer raises no error."""

    def cancel(self, transfer: Transfer) -> Status:
        """Stop. After ``CANCELLED`` no more bytes land; while ``PENDING``, keep polling."""

    def close(self) -> bool:
        """Release all resources; pending transfers fail with ``CLOSED``. Twice is fine.

        Return False where that is not possible, because a posted transfer has not ended: peers may go on writing, and
        the posted transfer fails once it has ended.
        """


def reached(peer: Peer) -> Transfer:
    """Return the transfer of a connection that ``connect`` has already completed."""
    return Transfer(peer, Direction.READ, num_descriptors=0, num_bytes=0, status=Status.DONE)


def reach(transport: Transport, end_point: bytes) -> Peer:
    """Connect and wait. Raises as :meth:`Transport.connect`."""
    transfer = transport.connect(end_point)
    while transport.poll(transfer) is Status.PENDING:
        time.sleep(0.0002)
    if transfer.error is not None:
        raise transfer.error
    return transfer.peer
