"""The base of all transports of host memory: the registered regions, and the end of all transfers by ``close``."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.protocol import Capabilities, Status, Transfer
from kvferry.transport.regions import RegionTable


class HostMemoryTransport(ABC):
    """Keeps the local regions; after ``close`` a poll of a pending transfer fails it."""

    capabilities: Capabilities

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._local = RegionTable([])
        self._closed = False

    def poll(self, transfer: Transfer) -> Status:
        """Make bounded progress and return the status."""
        if transfer.status is not Status.PENDING:
            return transfer.status
        if self._closed:
            return transfer.fail(self._closed_error())
        return self._advance(transfer)

    @abstractmethod
    def _advance(self, transfer: Transfer) -> Status:
        """Make bounded progress on a pending transfer and return its status."""

    def _add(self, regions: Sequence[Region]) -> None:
        """Add regions to the local ones."""
        self._regions.extend(regions)
        self._local = RegionTable(self._regions)

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> TransportError:
        return TransportError(Reason.CLOSED, f"this {self.capabilities.name} transport is closed.", "Open another.")
