"""Injected faults: a decorator over any transport, for negative controls and tests."""

import ctypes
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np

from kvferry.arrays import Addresses, Descriptors
from kvferry.errors import Reason, SettingsError, TransportError
from kvferry.layout.shard import HOST_DEVICE, Region
from kvferry.transport.protocol import Capabilities, Direction, Peer, RangeStream, Status, Transfer, Transport
from kvferry.transport.sliced import slice_bounds, split_long

logger = logging.getLogger(__name__)

Position = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
SLICE_SECONDS = 0.02
"""How often a slow submission moves bytes."""


class SwapRanges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Let two ranges of ``length`` bytes land each where the other belongs; positions count the submission's bytes in
    order.
    """

    first: Position
    second: Position
    length: Count

    def __post_init__(self) -> None:
        if self.first + self.length > self.second:
            raise SettingsError(
                Reason.INVALID_SETTING,
                f"the ranges of {self} overlap or are out of order.",
                "Let the first range end before the second begins.",
            )


class ZeroRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Overwrite a range that landed with zeros; the position counts the submission's bytes in order."""

    position: Position
    length: Count


class FaultPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The faults of every submission that has at least ``min_bytes`` and is large enough for the fault.

    ``swap`` exchanges destinations; ``zero`` (``READ`` only) changes the bytes that landed, just before ``DONE``;
    ``drop`` silently omits the descriptor of that index; ``fail_after`` moves so many descriptors and then fails, as a
    connection that breaks where there is one: more of them may land; ``delay_seconds`` keeps a finished transfer
    pending; ``hang`` moves no bytes and keeps the transfer pending; ``bytes_per_second`` moves the bytes of each
    submission at this rate, so that a test can act while they move. Small submissions have no faults.

    >>> msgspec.convert({"zero": {"position": 4096, "length": 512}}, FaultPlan).zero
    ZeroRange(position=4096, length=512)
    """

    swap: SwapRanges | None = None
    zero: ZeroRange | None = None
    drop: Position | None = None
    fail_after: Position | None = None
    delay_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    hang: bool = False
    bytes_per_second: Count | None = None
    min_bytes: Count = 256

    def fits(self, num_descriptors: int, num_bytes: int) -> bool:
        """Return whether a submission is large enough for every fault of the plan."""
        needed_bytes = [self.min_bytes]
        if self.swap is not None:
            needed_bytes.append(self.swap.second + self.swap.length)
        if self.zero is not None:
            needed_bytes.append(self.zero.position + self.zero.length)
        needed_descriptors = max(1, 0 if self.drop is None else self.drop + 1, self.fail_after or 0)
        return num_bytes >= max(needed_bytes) and num_descriptors >= needed_descriptors


@dataclass(slots=True, eq=False)
class FaultyTransfer(Transfer):
    """The submitted transfer, around the transfer of the descriptors that really move."""

    inner: Transfer = field(kw_only=True)
    """The slice that moves, or the whole."""
    landed: RangeStream = field(kw_only=True)
    not_before: float = field(kw_only=True)
    slices: deque[Descriptors] = field(kw_only=True)
    """What moves after ``inner``."""
    submitted_at: float = field(kw_only=True)
    bytes_before: int = 0
    """Bytes of the slices before ``inner``."""


class FaultyTransport:
    """Another transport with a :class:`FaultPlan`; ``num_injected`` counts the submissions with a fault."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self.num_injected = 0
        self._inner = inner
        self._plan = plan
        logger.warning("faults are injected into the %s transport: %s", inner.capabilities.name, plan)

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the inner transport."""
        return self._inner.capabilities

    def register(self, regions: Sequence[Region]) -> bytes:
        """Register with the inner transport. Raises ``SettingsError`` where the plan changes bytes of a device."""
        if self._plan.zero and any(region.device != HOST_DEVICE for region in regions):
            raise SettingsError(
                Reason.INVALID_SETTING,
                "zero changes bytes by the processor, and this memory is a device's.",
                "Inject swap, drop, fail_after, delay_seconds, hang or bytes_per_second.",
            )
        return self._inner.register(regions)

    def connect(self, end_point: bytes) -> Transfer:
        """Connect with the inner transport."""
        return self._inner.connect(end_point)

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        """Submit the descriptors that the plan lets move."""
        num_bytes = int(descriptors[:, 2].sum())
        if not self._plan.fits(len(descriptors), num_bytes):
            return self._inner.submit(peer, direction, descriptors)
        if direction is Direction.WRITE and self._plan.zero:
            raise SettingsError(
                Reason.INVALID_SETTING,
                "zero changes local memory, and this transfer is a WRITE.",
                "Inject them into the engine that reads.",
            )
        self.num_injected += 1
        slices, now = self._slices(self._moved(descriptors)), time.monotonic()
        return FaultyTransfer(
            peer,
            direction,
            len(descriptors),
            num_bytes,
            inner=self._inner.submit(peer, direction, slices.popleft()),
            landed=RangeStream(descriptors[:, 1], descriptors[:, 2]),
            not_before=now + self._plan.delay_seconds,
            slices=slices,
            submitted_at=now,
        )

    def poll(self, transfer: Transfer) -> Status:
        """Poll the inner transfer; at its end inject the fault."""
        if not isinstance(transfer, FaultyTransfer):
            return self._inner.poll(transfer)
        if transfer.status is not Status.PENDING:
            return transfer.status
        status = self._inner.poll(transfer.inner)
        transfer.bytes_done = transfer.bytes_before + transfer.inner.bytes_done
        if status is Status.DONE and transfer.slices:
            return self._go_on(transfer)
        return self._finish(transfer) if status is Status.DONE else _end(transfer, status)

    def cancel(self, transfer: Transfer) -> Status:
        """Cancel the inner transfer; if that has ended, the transfer is cancelled at once."""
        if not isinstance(transfer, FaultyTransfer):
            return self._inner.cancel(transfer)
        if transfer.status is not Status.PENDING:
            return transfer.status
        status = self._inner.cancel(transfer.inner)
        transfer.slices.clear()
        return _end(transfer, Status.CANCELLED if status is Status.DONE else status)

    def close(self) -> bool:
        """Close the inner transport."""
        return self._inner.close()

    def _moved(self, descriptors: Descriptors) -> Descriptors:
        """Return the descriptors that really move."""
        if self._plan.hang:
            return descriptors[:0]
        if self._plan.swap is not None:
            descriptors = _exchanged(descriptors, self._plan.swap)
        if self._plan.drop is not None:
            descriptors = np.delete(descriptors, self._plan.drop, axis=0)
        return descriptors if self._plan.fail_after is None else descriptors[: self._plan.fail_after]

    def _slices(self, descriptors: Descriptors) -> deque[Descriptors]:
        """Return the parts of a submission that move one after the other; without a rate all at once."""
        rate = self._plan.bytes_per_second
        if rate is None or not len(descriptors):
            return deque([descriptors])
        most = max(1, int(rate * SLICE_SECONDS))
        split = split_long(descriptors, most)
        bounds = slice_bounds(split[:, 2], len(split), most)
        return deque(split[start:stop] for start, stop in pairwise(bounds))

    def _go_on(self, transfer: FaultyTransfer) -> Status:
        """Move the next slice, once the rate allows that."""
        assert self._plan.bytes_per_second is not None
        if transfer.bytes_done > (time.monotonic() - transfer.submitted_at) * self._plan.bytes_per_second:
            return transfer.status
        transfer.bytes_before = transfer.bytes_done
        try:
            transfer.inner = self._inner.submit(transfer.peer, transfer.direction, transfer.slices.popleft())
        except TransportError as error:
            transfer.may_land = False  # nothing of this slice was submitted, and the ones before have landed
            return transfer.fail(error)
        return transfer.status

    def _finish(self, transfer: FaultyTransfer) -> Status:
        plan = self._plan
        if plan.hang or time.monotonic() < transfer.not_before:
            return transfer.status
        if plan.fail_after is not None:
            transfer.may_land = plan.fail_after > 0 and not self.capabilities.ends_with_process
            message = f"the injected fault failed the transfer after {plan.fail_after} descriptors."
            return transfer.fail(TransportError(Reason.TRANSFER_FAILED, message, "Remove the fault."))
        if plan.zero is not None:
            _write(transfer.landed, plan.zero.position, bytes(plan.zero.length))
        transfer.bytes_done = transfer.num_bytes
        return _end(transfer, Status.DONE)


def _end(transfer: FaultyTransfer, status: Status) -> Status:
    transfer.status, transfer.error, transfer.may_land = status, transfer.inner.error, transfer.inner.may_land
    return status


def _exchanged(descriptors: Descriptors, swap: SwapRanges) -> Descriptors:
    """Return descriptors of the same bytes, of which two ranges go each to the other's destination.

    >>> descriptors = np.array([[0, 100, 4], [50, 200, 4]], np.uint64)
    >>> _exchanged(descriptors, SwapRanges(1, 5, 2)).tolist()
    [[0, 100, 1], [1, 201, 2], [3, 103, 1], [50, 200, 1], [51, 101, 2], [53, 203, 1]]
    """
    addresses, lengths = descriptors[:, 1], descriptors[:, 2]
    stop, second, total = swap.first + swap.length, swap.second + swap.length, int(lengths.sum())
    spans = [(0, swap.first), (swap.second, second), (stop, swap.second), (swap.first, stop), (second, total)]
    landed, moved = RangeStream(addresses, lengths), RangeStream(descriptors[:, 0], lengths)
    destinations = np.concatenate([landed.cut(*span) for span in spans if span[0] < span[1]])
    sources = moved.cut(0, total)
    ends = np.union1d(np.cumsum(sources[:, 1]), np.cumsum(destinations[:, 1]))
    starts = np.concatenate([np.zeros(1, np.uint64), ends[:-1]])
    columns = [_at(sources, starts), _at(destinations, starts), ends - starts]
    return np.stack(columns, axis=1)


def _at(ranges: Addresses, positions: Addresses) -> Addresses:
    """Return the addresses of positions in a stream of ranges."""
    ends = np.cumsum(ranges[:, 1])
    index = np.searchsorted(ends, positions, side="right")
    addresses: Addresses = ranges[index, 0] + (positions - (ends[index] - ranges[index, 1]))
    return addresses


def _write(landed: RangeStream, position: int, content: bytes) -> None:
    written = 0
    for address, size in landed.cut(position, position + len(content)).tolist():
        ctypes.memmove(address, content[written : written + size], size)
        written += size
