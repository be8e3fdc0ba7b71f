"""The interface of a transport: six verbs, called by one thread at a time.

``register`` local memory and send the end point to a peer, ``connect`` to a peer's end point, ``submit`` descriptors,
``poll`` until the transfer ends, ``cancel``, ``close``. A transport makes progress only inside these calls; ``poll``
makes a bounded amount of progress and returns. A connection is a transfer too: it reads a nonce, and its peer can be
used once the transfer is ``DONE``.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvferry.arrays import Descriptors
from kvferry.errors import TransportError
from kvferry.layout.shard import HOST_DEVICE, Region
from kvferry.transport.regions import RegionTable

__all__ = [
    "Capabilities",
    "Direction",
    "Peer",
    "Region",
    "RegionTable",
    "Status",
    "Transfer",
    "Transport",
    "reach",
    "reached",
]

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

    ``same_process_only``: peers are in this process. ``cancel_is_immediate``: ``cancel`` returns ``CANCELLED`` at once;
    otherwise a cancelled transfer stays ``PENDING`` until no more bytes can land. ``moves_bytes`` is false only for the
    null transport.

    ``moves_device_memory``: regions may lie on CUDA devices, by their names in torch, such as ``cuda:0``. Once a
    transfer that landed in such memory is ``DONE``, work that is launched on the device afterwards sees the bytes.

    ``ends_with_process``: a ``WRITE`` is carried out by the process that submits it, to a process of its host and pid
    namespace: no byte of it lands once that process has ended. ``close_ends_writes``: no byte of a peer on another
    host, or of a process that has ended, lands once ``close`` has returned True.
    """

    name: str
    same_process_only: bool = False
    cancel_is_immediate: bool = True
    moves_bytes: bool = True
    ends_with_process: bool = False
    close_ends_writes: bool = False
    moves_device_memory: bool = False

    def moves(self, device: str) -> bool:
        """Return whether the transport moves memory of this device.

        >>> Capabilities("nixl", moves_device_memory=True).moves("cuda:1"), Capabilities("cma").moves("cuda:1")
        (True, False)
        """
        return device == HOST_DEVICE or (self.moves_device_memory and CUDA_DEVICE.fullmatch(device) is not None)


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
