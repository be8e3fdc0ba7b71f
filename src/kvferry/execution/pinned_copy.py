"""Copies between a cache on a device and pinned host memory, such as a tier's slab, made by the device's copy engines.

The processor only names addresses: one call of the driver launches thousands of runs on the transfer thread's own
stream, beside the engine's. A mark behind each launch says when its bytes are there. Launched copies cannot be revoked.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvferry.arrays import Descriptors
from kvferry.errors import Reason, TransportError
from kvferry.execution.cuda_driver import HostCopies
from kvferry.execution.device import DeviceOrder, Mark
from kvferry.layout.shard import Region
from kvferry.peer_log import PeerLog
from kvferry.plan.block_copies import BlockCopies

logger = PeerLog(logging.getLogger(__name__))

BATCH_BYTES = 64 << 20
"""A launch has about so many bytes: an urgent job waits for two launches at most, some milliseconds."""
BATCH_ROWS = 1 << 16
LAUNCHES_IN_FLIGHT = 2
"""So the device goes on while the transfer thread looks at other jobs."""


class PinnedMemory:
    """A region of host memory that a device copies from and to.

    Raises :class:`TransportError` (``missing-dependency``, ``unsupported``) where the driver cannot do that.
    """

    def __init__(self, region: Region, order: DeviceOrder) -> None:
        self._region, self._order = region, order
        self._driver = HostCopies(order.device)
        self._driver.pin(region.base_address, region.length)
        self._is_pinned = True

    def copying(self, copies: Sequence[BlockCopies]) -> "PinnedCopying":
        """Return these copies, not begun. They are launched by the thread that advances them, on its own stream."""
        return PinnedCopying(copies, self._driver, self._order)

    def close(self) -> None:
        """Unpin the memory, which no copy may use any more; twice is fine."""
        if self._is_pinned:
            self._is_pinned = False
            if refused := self._driver.unpin(self._region.base_address):
                logger.info("kvferry: host memory stays pinned until the end of the process: %s", refused)


class PinnedCopying:
    """The copies of one job, launched in batches, of which at most two are under way."""

    transport = "cuda"

    def __init__(self, copies: Sequence[BlockCopies], driver: HostCopies, order: DeviceOrder) -> None:
        rows = [each.descriptors() for each in copies]
        self._rows = np.concatenate(rows) if rows else np.empty((0, 3), np.uint64)
        self._ends = deque(batch_ends(self._rows))
        self._begin = 0
        self._driver, self._order = driver, order
        self._in_flight: deque[Mark] = deque()
        self._began_at: float | None = None
        self.seconds = 0.0

    def advance(self) -> bool:
        """Launch the next batch unless two are under way; note which have ended.

        Raises :class:`TransportError` (``transfer-failed``) where the driver refuses a batch or the device has failed.
        """
        if self._began_at is None:
            self._began_at = time.monotonic()
        moved = self._settle()
        if self._ends and len(self._in_flight) < LAUNCHES_IN_FLIGHT:
            begin, self._begin = self._begin, self._ends.popleft()
            try:
                self._driver.launch(self._rows[begin : self._begin], self._order.stream())
            finally:
                # Also behind a batch that was refused: a part of it may be under way.
                self._in_flight.append(self._order.mark())
            moved = True
        self.seconds = time.monotonic() - self._began_at
        return moved

    @property
    def is_over(self) -> bool:
        """Whether all batches were launched and have ended."""
        return not self._ends and not self._in_flight

    def is_quiet(self) -> bool:
        """Return whether no batch is under way: all have ended, or the device has failed."""
        try:
            self._settle()
        except TransportError as error:
            logger.info("kvferry: no copy is under way any more: %s", error)
        return not self._in_flight

    def _settle(self) -> bool:
        before = len(self._in_flight)
        try:
            while self._in_flight and self._in_flight[0].is_over():
                self._in_flight.popleft()
        except RuntimeError as error:
            # CUDA reports a failed kernel or copy with the next call. The process can launch nothing any more, and
            # nothing that it has launched goes on.
            self._in_flight.clear()
            raise TransportError(
                Reason.TRANSFER_FAILED,
                f"{self._order.device} has failed: {error}.",
                "Start the engine again; its log and dmesg (Xid) say what has failed.",
            ) from error
        return len(self._in_flight) < before


def batch_ends(rows: Descriptors) -> list[int]:
    """Return where each batch of rows ends: behind the row that fills it, and behind the last.

    >>> batch_ends(np.array([[0, 0, 48 << 20], [0, 0, 32 << 20], [0, 0, 8]], np.uint64)), batch_ends(np.empty((0, 3)))
    ([2, 3], [])
    """
    if not len(rows):
        return []
    filled = np.cumsum(rows[:, 2].astype(np.int64))
    # A row belongs to the batch in which its first byte lies.
    batches = (filled - rows[:, 2].astype(np.int64)) // BATCH_BYTES + np.arange(len(rows)) // BATCH_ROWS
    return [*(np.flatnonzero(np.diff(batches)) + 1).tolist(), len(rows)]
