"""Transfers in slices, for libraries that cannot revoke a posted transfer: NIXL and Mooncake.

A slice of host memory is small, so that each call returns soon: the call itself copies. A device copies by itself:
there slices are large, and all that have room are posted at once, so that the device never waits for the next one. A
slice has one local and one remote device: NIXL takes descriptors of one type of memory on each side. A cancelled or
failed transfer posts no more slices and stays ``PENDING`` until every posted slice has ended. A connection ends in time
even if its peer never answers, since the nonce that a connection reads lands in memory of the transport.
"""

import time
from abc import abstractmethod
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from kvferry.arrays import Addresses, Descriptors
from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import HOST_DEVICE
from kvferry.transport.protocol import Direction, Peer, RegisteredMemoryTransport, Sides, Status, Transfer


@dataclass(slots=True, eq=False)
class SlicedTransfer(Transfer):
    """A transfer as slices ``[bounds[i], bounds[i + 1])`` of its descriptors, posted in order."""

    may_land: bool = False
    descriptors: Descriptors = field(kw_only=True)
    bounds: list[int] = field(kw_only=True)
    is_of_devices: bool = False
    """Whether all memory of both sides is of devices."""
    next_slice: int = 0
    running: Sized = ()
    """The posted slices that have not ended."""
    ending: Status | None = None
    """Set by an error or ``cancel``: the status once all posted slices have ended. No more slices are posted."""

    @property
    def has_more(self) -> bool:
        """Whether a slice remains to be posted."""
        return self.ending is None and self.next_slice < len(self.bounds) - 1

    def take_slice(self) -> Descriptors:
        """Return the next slice and advance."""
        start, stop = self.bounds[self.next_slice : self.next_slice + 2]
        self.next_slice += 1
        return self.descriptors[start:stop]

    def end_failed(self, error: TransportError, *, may_land: bool) -> None:
        """Post no more slices and fail with the first such error once all posted slices have ended.

        Bytes of a slice that was posted, and did not end well, ``may_land`` later: for the library the slice has ended,
        but what the kernel or the network has taken goes on.
        """
        self.may_land |= may_land
        if self.ending is not Status.FAILED:
            self.ending, self.error = Status.FAILED, error

    def settle(self) -> Status:
        """Set the final status if all posted slices have ended; return the status."""
        if not len(self.running):
            if self.ending is not None:
                self.status = self.ending
            elif self.bytes_done == self.num_bytes:
                self.status = Status.DONE
        return self.status


AnyTransfer = TypeVar("AnyTransfer", bound=SlicedTransfer)


@dataclass(slots=True, eq=False)
class Connection(Transfer):
    """A connection in progress, until ``deadline`` on the monotonic clock."""

    deadline: float = field(kw_only=True)
    reading: SlicedTransfer | None = None
    """The read of the nonce. It may outlast the connection; the transport then keeps the connection until it ends."""


AnyConnection = TypeVar("AnyConnection", bound=Connection)


class SlicedTransport(RegisteredMemoryTransport, Generic[AnyTransfer, AnyConnection]):
    """Polls and cancels transfers in slices of up to ``_slice_descriptors`` and less than twice ``_slice_bytes``, or
    ``_device_slice_bytes`` where all memory of both sides is of devices.
    """

    _transfer_type: type[AnyTransfer]
    _connection_type: type[AnyConnection]
    _slice_descriptors: int
    _slice_bytes: int
    _device_slice_bytes: int

    def __init__(self) -> None:
        super().__init__()
        self._connections: set[AnyConnection] = set()

    def _advance(self, transfer: Transfer) -> Status:
        """Collect ended slices and post one more; of devices all that have room."""
        if isinstance(transfer, self._connection_type):
            return self._poll_connection(transfer)
        assert isinstance(transfer, self._transfer_type)
        self._reap(transfer)
        while transfer.has_more and self._has_room(transfer):
            self._post(transfer, transfer.take_slice())
            if not transfer.is_of_devices:
                break
        return transfer.settle()

    def cancel(self, transfer: Transfer) -> Status:
        """Post no more slices; ``CANCELLED`` once all posted slices have ended, which a stopped peer may delay."""
        if isinstance(transfer, self._connection_type):
            if transfer.status is Status.PENDING:
                transfer.status = Status.CANCELLED
                self._end(transfer)
            return transfer.status
        assert isinstance(transfer, self._transfer_type)
        if transfer.status is Status.PENDING and transfer.ending is None:
            transfer.ending = Status.CANCELLED
        return self.poll(transfer)

    def _queue(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> AnyTransfer:
        is_of_devices = HOST_DEVICE not in {*self._local.devices, *peer.regions.devices}
        slice_bytes = self._device_slice_bytes if is_of_devices else self._slice_bytes
        split, cuts = self._by_devices(peer, direction, split_long(descriptors, slice_bytes))
        return self._transfer_type(
            peer,
            direction,
            len(descriptors),
            int(descriptors[:, 2].sum()),
            descriptors=split,
            bounds=slice_bounds(split[:, 2], self._slice_descriptors, slice_bytes, cuts),
            is_of_devices=is_of_devices,
        )

    def _by_devices(
        self, peer: Peer, direction: Direction, descriptors: Descriptors
    ) -> tuple[Descriptors, Sequence[int]]:
        """Return the descriptors in the order of their pairs of devices, and where another pair begins."""
        if len(self._local.devices) <= 1 and len(peer.regions.devices) <= 1:
            return descriptors, ()
        sides = Sides.of(descriptors, direction)
        remote = peer.regions.device_indices(sides.remote)
        pairs = self._local.device_indices(sides.local) * len(peer.regions.devices) + remote
        order = np.argsort(pairs, kind="stable")
        return descriptors[order], (np.flatnonzero(np.diff(pairs[order])) + 1).tolist()

    def _follow(self, connection: AnyConnection) -> AnyConnection:
        """Keep a connection until its read of the nonce has ended."""
        self._connections.add(connection)
        return connection

    def _check_answered(self, name: str) -> None:
        """Raise while a cancelled connection to this peer still waits for its nonce, so that no more pile up.

        Polls all connections first: the caller of a cancelled connection does not poll it any more.
        """
        for connection in list(self._connections):
            self.poll(connection)
            self._let_go_if_quiet(connection)
        for each in self._connections:
            if each.peer.name == name and each.status is not Status.PENDING:
                raise self._unanswered(each.peer, "it has not yet answered the last connection")

    def _poll_connection(self, connection: AnyConnection) -> Status:
        try:
            if self._is_reached(connection):
                connection.bytes_done, connection.status = connection.num_bytes, Status.DONE
            elif time.monotonic() >= connection.deadline:
                connection.fail(self._unanswered(connection.peer, "it did not answer in time"))
        except TransportError as error:
            connection.fail(error)
        if connection.status is not Status.PENDING:
            self._end(connection)
        return connection.status

    def _end(self, connection: AnyConnection) -> None:
        """Cancel the read of the nonce; close a peer that was not reached."""
        if connection.reading is not None:
            self.cancel(connection.reading)
        if connection.status is not Status.DONE:
            connection.peer.close()
        self._let_go_if_quiet(connection)

    def _let_go_if_quiet(self, connection: AnyConnection) -> None:
        if connection.status is Status.PENDING or connection not in self._connections:
            return
        if connection.reading is None or self.poll(connection.reading) is not Status.PENDING:
            self._connections.remove(connection)
            self._take_back(connection)

    @abstractmethod
    def _is_reached(self, connection: AnyConnection) -> bool:
        """Advance a connection; return whether the peer's nonce was read. Raises ``TransportError``."""

    @abstractmethod
    def _take_back(self, connection: AnyConnection) -> None:
        """Release the resources of a connection that has ended and reads no more."""

    @abstractmethod
    def _unanswered(self, peer: Peer, found: str) -> TransportError:
        """Return the error for a peer that does not answer."""

    @abstractmethod
    def _has_room(self, transfer: AnyTransfer) -> bool:
        """Return whether one more slice may be posted now."""

    @abstractmethod
    def _post(self, transfer: AnyTransfer, descriptors: Descriptors) -> None:
        """Post one slice."""

    @abstractmethod
    def _reap(self, transfer: AnyTransfer) -> None:
        """Collect the slices that have ended."""


def cannot_reach_itself(transport: str) -> TransportError:
    """Return the error of a connection to the transport's own end point."""
    return TransportError(
        Reason.UNSUPPORTED, f"a {transport} transport cannot connect to itself.", "Open a second transport."
    )


def connection_lost(name: str, remedy: str = "") -> TransportError:
    """Return the error of a transfer whose peer is gone; ``remedy`` says what to do where the peer runs."""
    told = f"Reconnect when the peer is back. {f'If it runs: {remedy}' if remedy else ''}".strip()
    return TransportError(Reason.PEER_DIED, f"the connection to {name} is lost.", told)


def other_nonce(name: str) -> TransportError:
    """Return the error of a peer that is not the one of the end point."""
    return TransportError(Reason.PEER_CHANGED, f"{name} holds another nonce.", "Ask the peer for a new end point.")


def split_long(descriptors: Descriptors, max_bytes: int) -> Descriptors:
    """Return a copy in which descriptors longer than ``max_bytes`` are split, in order.

    >>> split_long(np.array([[0, 100, 5], [50, 200, 2]], np.uint64), 2).tolist()
    [[0, 100, 2], [2, 102, 2], [4, 104, 1], [50, 200, 2]]
    """
    limit = np.uint64(max_bytes)
    if not (descriptors[:, 2] > limit).any():
        return descriptors.copy()
    counts = (descriptors[:, 2] + limit - np.uint64(1)) // limit
    split = np.repeat(descriptors, counts.astype(np.int64), axis=0)
    first = np.repeat(np.cumsum(counts) - counts, counts.astype(np.int64))
    skipped = (np.arange(len(split), dtype=np.uint64) - first) * limit
    split[:, :2] += skipped[:, None]
    split[:, 2] = np.minimum(split[:, 2] - skipped, limit)
    return split


def slice_bounds(lengths: Addresses, max_descriptors: int, max_bytes: int, cuts: Sequence[int] = ()) -> list[int]:
    """Return the bounds of slices of at most ``max_descriptors`` and of less than twice ``max_bytes``.

    Slices also end at the ``cuts``. No length may exceed ``max_bytes``.

    >>> slice_bounds(np.array([8, 1, 1, 8], np.uint64), 2, 8), slice_bounds(np.array([1, 1, 1], np.uint64), 2, 8, [1])
    ([0, 1, 2, 4], [0, 1, 2, 3])
    """
    starts = np.cumsum(lengths) - lengths
    by_bytes = np.flatnonzero(np.diff(starts // np.uint64(max_bytes))) + 1
    by_count = np.arange(0, len(lengths), max_descriptors)
    bounds: list[int] = np.union1d(np.union1d(by_bytes, by_count), np.array(cuts, np.int64)).tolist()
    return [*bounds, len(lengths)] if bounds else [0]
