"""A decorator over any transport that remembers its last transfers."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.layout.shard import Region
from kvferry.transport.protocol import Capabilities, Descriptors, Direction, Peer, Status, Transfer, Transport


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One ended transfer: ``started_at`` as ``time.time()``, ``seconds`` from submit to the call that saw the end."""

    started_at: float
    seconds: float
    peer: str
    direction: Direction
    num_descriptors: int
    num_bytes: int
    status: Status


@dataclass(slots=True, eq=False)
class TracedTransfer(Transfer):
    """A transfer and when it began."""

    inner: Transfer = field(kw_only=True)
    started_at: float = field(default_factory=time.time)
    started: float = field(default_factory=time.perf_counter)


class TracingTransport:
    """Another transport, with ``records`` of the last ``max_records`` transfers that ended."""

    def __init__(self, inner: Transport, max_records: int = 1024) -> None:
        self.records: deque[TransferRecord] = deque(maxlen=max_records)
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:
        """Those of the transport inside."""
        return self._inner.capabilities

    def register(self, regions: Sequence[Region]) -> bytes:
        """Register with the transport inside."""
        return self._inner.register(regions)

    def connect(self, end_point: bytes) -> Transfer:
        """Connect with the transport inside; no record is made of it."""
        return self._inner.connect(end_point)

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Submit inside and start the clock."""
        inner = self._inner.submit(peer, direction, descriptors)
        traced = TracedTransfer(peer, direction, inner.num_descriptors, inner.num_bytes, inner=inner)
        self._follow(traced)
        return traced

    def poll(self, transfer: Transfer) -> Status:
        """Poll inside."""
        if not isinstance(transfer, TracedTransfer):
            return self._inner.poll(transfer)
        if transfer.status is Status.PENDING:
            self._inner.poll(transfer.inner)
            self._follow(transfer)
        return transfer.status

    def cancel(self, transfer: Transfer) -> Status:
        """Cancel inside."""
        if not isinstance(transfer, TracedTransfer):
            return self._inner.cancel(transfer)
        if transfer.status is Status.PENDING:
            self._inner.cancel(transfer.inner)
            self._follow(transfer)
        return transfer.status

    def close(self) -> None:
        """Close the transport inside."""
        self._inner.close()

    def _follow(self, transfer: TracedTransfer) -> None:
        inner = transfer.inner
        transfer.status, transfer.error, transfer.bytes_done = inner.status, inner.error, inner.bytes_done
        if inner.status is Status.PENDING:
            return
        seconds = time.perf_counter() - transfer.started
        self.records.append(
            TransferRecord(
                transfer.started_at,
                seconds,
                transfer.peer.name,
                transfer.direction,
                transfer.num_descriptors,
                transfer.num_bytes,
                inner.status,
            )
        )
