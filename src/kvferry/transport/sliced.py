"""Transfers posted in slices that nobody can revoke: what NIXL and Mooncake have in common.

A slice is small enough for a responsive driver. A cancelled or failed transfer posts nothing more and stays
``PENDING`` until every posted slice has ended. Only a connection ends in time whatever its peer does: what it reads,
a nonce, lands in memory of the transport's own.
"""

import time
from abc import abstractmethod
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from kvferry.arrays import Descriptors
from kvferry.errors import TransportError
from kvferry.transport.host_memory import HostMemoryTransport
from kvferry.transport.protocol import Direction, Peer, Status, Transfer
from kvferry.transport.submission import check_submission, slice_bounds, split_long


@dataclass(slots=True, eq=False)
class SlicedTransfer(Transfer):
    """A transfer as slices ``[bounds[i], bounds[i + 1])`` of its descriptors, posted in order."""

    descriptors: Descriptors = field(kw_only=True)
    bounds: list[int] = field(kw_only=True)
    next_slice: int = 0
    running: Sized = ()
    """What was posted and has not ended."""
    ending: Status | None = None
    """Set by an error or ``cancel``: post nothing more and end so once the wire is quiet."""

    @classmethod
    def cut(
        cls, peer: Peer, direction: Direction, descriptors: Descriptors, max_descriptors: int, max_bytes: int
    ) -> Self:
        """Return a submission in slices of so many descriptors, and of less than twice so many bytes, at most."""
        pieces = split_long(descriptors, max_bytes)
        bounds = slice_bounds(pieces[:, 2], max_descriptors, max_bytes)
        num_bytes = int(descriptors[:, 2].sum())
        transfer = cls(peer, direction, len(descriptors), num_bytes, descriptors=pieces, bounds=bounds)
        if not num_bytes:
            transfer.status = Status.DONE
        return transfer

    @property
    def has_more(self) -> bool:
        """Whether there is a slice left that is to be posted."""
        return self.ending is None and self.next_slice < len(self.bounds) - 1

    def take_slice(self) -> Descriptors:
        """Return the next slice, once."""
        start, stop = self.bounds[self.next_slice : self.next_slice + 2]
        self.next_slice += 1
        return self.descriptors[start:stop]

    def end_failed(self, error: TransportError) -> None:
        """Post nothing more and fail once the wire is quiet; the first error stays."""
        if self.ending is not Status.FAILED:
            self.ending, self.error = Status.FAILED, error

    def settle(self) -> Status:
        """Take on the final status if the wire is quiet."""
        if not len(self.running):
            if self.ending is not None:
                self.status = self.ending
            elif self.bytes_done == self.num_bytes:
                self.status = Status.DONE
        return self.status


AnyTransfer = TypeVar("AnyTransfer", bound=SlicedTransfer)


@dataclass(slots=True, eq=False)
class Connection(Transfer):
    """A peer being reached, until ``deadline`` on the monotonic clock."""

    deadline: float = field(kw_only=True)
    reading: SlicedTransfer | None = None
    """Of the nonce. It may go on when the connection has ended, which its transport then keeps."""


AnyConnection = TypeVar("AnyConnection", bound=Connection)


class SlicedTransport(HostMemoryTransport, Generic[AnyTransfer, AnyConnection]):
    """``submit``, ``poll`` and ``cancel`` of a transport whose transfers are sliced."""

    _transfer_type: type[AnyTransfer]
    _connection_type: type[AnyConnection]
    _slice_descriptors: int
    _slice_bytes: int

    def __init__(self) -> None:
        super().__init__()
        self._connections: set[AnyConnection] = set()

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Check both sides and queue; slices are posted in ``poll``."""
        self._check_open()
        check_submission(descriptors, direction, self._local, peer.regions)
        return self._queue(peer, direction, descriptors)

    def _advance(self, transfer: Transfer) -> Status:
        """Take back ended slices and post at most one more."""
        if isinstance(transfer, self._connection_type):
            return self._poll_connection(transfer)
        assert isinstance(transfer, self._transfer_type)
        self._reap(transfer)
        if transfer.has_more and self._has_room(transfer):
            self._post(transfer, transfer.take_slice())
        return transfer.settle()

    def cancel(self, transfer: Transfer) -> Status:
        """Post nothing more; ``CANCELLED`` once what was posted has ended, which a stopped peer may delay."""
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
        return self._transfer_type.cut(peer, direction, descriptors, self._slice_descriptors, self._slice_bytes)

    def _follow(self, connection: AnyConnection) -> AnyConnection:
        """Keep a connection until its reading has ended, whoever polls it."""
        self._connections.add(connection)
        return connection

    def _check_answered(self, name: str) -> None:
        """Raise while this peer owes an answer to a connection that was given up: it would owe ever more.

        On the way go on with all connections, as whoever began one may not ask for it any more.
        """
        for connection in list(self._connections):
            self.poll(connection)
            self._let_go_if_quiet(connection)
        if any(each.peer.name == name and each.status is not Status.PENDING for each in self._connections):
            raise self._unanswered(name, "it has not yet answered when last it was asked")

    def _poll_connection(self, connection: AnyConnection) -> Status:
        try:
            if self._is_reached(connection):
                connection.bytes_done, connection.status = connection.num_bytes, Status.DONE
            elif time.monotonic() >= connection.deadline:
                connection.fail(self._unanswered(connection.peer.name, "it did not answer in time"))
        except TransportError as error:
            connection.fail(error)
        if connection.status is not Status.PENDING:
            self._end(connection)
        return connection.status

    def _end(self, connection: AnyConnection) -> None:
        """Stop reading, and let go of a peer that was not reached."""
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
        """Go on with a connection; return whether the nonce was the peer's. Raises what is in the way."""

    @abstractmethod
    def _take_back(self, connection: AnyConnection) -> None:
        """Take back what an ended connection, of which nothing runs, had."""

    @abstractmethod
    def _unanswered(self, name: str, found: str) -> TransportError:
        """Return the error of a peer that does not answer."""

    @abstractmethod
    def _has_room(self, transfer: AnyTransfer) -> bool:
        """Return whether one more slice may be posted now."""

    @abstractmethod
    def _post(self, transfer: AnyTransfer, pieces: Descriptors) -> None:
        """Post one slice."""

    @abstractmethod
    def _reap(self, transfer: AnyTransfer) -> None:
        """Take back the slices that have ended."""
