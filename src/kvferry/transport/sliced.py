"""Transfers posted in slices that nobody can revoke: what NIXL and Mooncake have in common.

A slice is small enough for a responsive driver. A cancelled or failed transfer posts nothing more and stays
``PENDING`` until every posted slice has ended.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from kvferry.errors import Reason, TransportError
from kvferry.transport.protocol import Capabilities, Descriptors, Direction, Peer, Status, Transfer
from kvferry.transport.submission import slice_bounds, split_long


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


class SlicedTransport(ABC, Generic[AnyTransfer]):
    """``poll`` and ``cancel`` of a transport whose transfers are sliced."""

    capabilities: Capabilities
    _transfer_type: type[AnyTransfer]

    def poll(self, transfer: Transfer) -> Status:
        """Take back ended slices and post at most one more."""
        assert isinstance(transfer, self._transfer_type)
        if transfer.status is not Status.PENDING:
            return transfer.status
        if self._closed:
            return transfer.fail(self._closed_error())
        self._reap(transfer)
        if transfer.has_more and self._has_room(transfer):
            self._post(transfer, transfer.take_slice())
        return transfer.settle()

    def cancel(self, transfer: Transfer) -> Status:
        """Post nothing more; ``CANCELLED`` once what was posted has ended, which a stopped peer may delay."""
        assert isinstance(transfer, self._transfer_type)
        if transfer.status is Status.PENDING and transfer.ending is None:
            transfer.ending = Status.CANCELLED
        return self.poll(transfer)

    def _ends_within(self, transfer: AnyTransfer, seconds: float) -> bool:
        """Poll for so long at most; a transfer that has not ended is cancelled. Raises its error."""
        deadline = time.monotonic() + seconds
        while self.poll(transfer) is Status.PENDING and time.monotonic() < deadline:
            time.sleep(0.0002)
        if transfer.status is Status.PENDING:
            self.cancel(transfer)
            return False
        if transfer.error is not None:
            raise transfer.error
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> TransportError:
        return TransportError(Reason.CLOSED, f"this {self.capabilities.name} transport is closed.")

    @property
    @abstractmethod
    def _closed(self) -> bool:
        """Whether the transport was closed."""

    @abstractmethod
    def _has_room(self, transfer: AnyTransfer) -> bool:
        """Return whether one more slice may be posted now."""

    @abstractmethod
    def _post(self, transfer: AnyTransfer, pieces: Descriptors) -> None:
        """Post one slice."""

    @abstractmethod
    def _reap(self, transfer: AnyTransfer) -> None:
        """Take back the slices that have ended."""
