"""What a transport is: six verbs, driven by the caller's thread.

``register`` my memory and hand the end point to a peer, ``connect`` to a peer's end point, ``submit`` descriptors,
``poll`` until the transfer ends, ``cancel``, ``close``. A transport starts no thread of its own and is driven by one
thread at a time; ``poll`` makes a bounded amount of progress and returns. To connect is a transfer like any other: it
reads a nonce, and its peer is one once it is ``DONE``.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvferry.arrays import Descriptors
from kvferry.errors import TransportError
from kvferry.layout.shard import Region
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


class Direction(StrEnum):
    """Which side is remote: the source of a ``READ``, the destination of a ``WRITE``."""

    READ = "read"
    WRITE = "write"


class Status(StrEnum):
    """Where a transfer stands. All but ``PENDING`` are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, as plain data.

    ``same_process_only`` bounds where a peer may be. ``cancel_is_immediate`` says that ``cancel`` returns ``CANCELLED``
    at once; otherwise a cancelled transfer stays ``PENDING`` until the wire is quiet. ``moves_bytes`` is false only for
    the null transport.
    """

    name: str
    same_process_only: bool = False
    cancel_is_immediate: bool = True
    moves_bytes: bool = True


@dataclass(slots=True, eq=False)
class Peer:
    """Memory that can be reached: the other side's registered regions. Forget it with ``close`` (twice is fine)."""

    name: str
    regions: RegionTable

    def close(self) -> None:
        """Release what the connection holds; transfers that use it must have ended."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One submission and how far it is. ``error`` is set exactly when ``status`` is ``FAILED``."""

    peer: Peer
    direction: Direction
    num_descriptors: int
    num_bytes: int
    bytes_done: int = 0
    status: Status = Status.PENDING
    error: TransportError | None = None

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
    """A way to move bytes between registered memory of two sides."""

    @property
    def capabilities(self) -> Capabilities:
        """What this transport can do."""

    def register(self, regions: Sequence[Region]) -> bytes:
        """Add memory and return the end point: opaque, all a peer needs to reach everything registered so far.

        The memory must stay mapped until ``close``.
        """

    def connect(self, end_point: bytes) -> Transfer:
        """Begin to reach a peer by really reading from it; ``transfer.peer`` is for use once that is ``DONE``.

        It ends within some seconds, however the peer fares, and at once when cancelled. Raises, or fails with,
        ``TransportError``: ``MALFORMED_MESSAGE`` (raised) for bytes that are no end point, ``TRANSPORT_UNAVAILABLE``,
        ``PERMISSION_DENIED``, ``PEER_UNREACHABLE``, ``PEER_DIED`` or ``PEER_CHANGED`` with the remedy.
        """

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Check and start (or queue) the copies; an empty list is ``DONE`` at once.

        Both sides of every descriptor are checked before a byte moves. Raises ``TransportError`` for what the caller
        did wrong (``INVALID_REQUEST``, ``UNREGISTERED_RANGE``, ``UNSUPPORTED``, ``CLOSED``); what goes wrong later
        is a ``FAILED`` transfer. A zero length is refused (``INVALID_REQUEST``).
        """

    def poll(self, transfer: Transfer) -> Status:
        """Make bounded progress on the caller's thread and return the status. Raises nothing for a failed peer."""

    def cancel(self, transfer: Transfer) -> Status:
        """Stop. After ``CANCELLED`` no more bytes land; ``PENDING`` means: keep polling until it is quiet."""

    def close(self) -> None:
        """Release everything; pending transfers fail with ``CLOSED``. Twice is fine."""


def reached(peer: Peer) -> Transfer:
    """Return the transfer of a connection that was made, nonce and all, within ``connect``."""
    return Transfer(peer, Direction.READ, num_descriptors=0, num_bytes=0, status=Status.DONE)


def reach(transport: Transport, end_point: bytes) -> Peer:
    """Connect and wait for it, where nothing else is to be done meanwhile. Raises as :meth:`Transport.connect`."""
    transfer = transport.connect(end_point)
    while transport.poll(transfer) is Status.PENDING:
        time.sleep(0.0002)
    if transfer.error is not None:
        raise transfer.error
    return transfer.peer
