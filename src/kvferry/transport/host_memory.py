"""What transports of host memory have in common: registered regions, and that nothing goes on once they are closed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvferry.errors import Reason, TransportError
from kvferry.layout.shard import Region
from kvferry.transport.protocol import Capabilities, Status, Transfer
from kvferry.transport.regions import RegionTable


class HostMemoryTransport(ABC):
    """Keeps the regions of this side, and fails what is pending when it is polled after ``close``."""

    capabilities: Capabilities

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._local = RegionTable([])
        self._closed = False

    def poll(self, transfer: Transfer) -> Status:
        """Make bounded progress."""
        if transfer.status is not Status.PENDING:
            return transfer.status
        if self._closed:
            return transfer.fail(self._closed_error())
        return self._advance(transfer)

    @abstractmethod
    def _advance(self, transfer: Transfer) -> Status:
        """Make bounded progress on a pending transfer and return its status."""

    def _add(self, regions: Sequence[Region]) -> None:
        """Let descriptors be in these regions too."""
        self._regions.extend(regions)
        self._local = RegionTable(self._regions)

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> TransportError:
        return TransportError(Reason.CLOSED, f"this {self.capabilities.name} transport is closed.", "Open another.")
