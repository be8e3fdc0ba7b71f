"""Copies between a rank's cache and memory of the same process, such as a tier's slab: no transport, no peer.

A :class:`LocalRoute` plans them, and a :class:`LocalCopy` is the job. The processor copies host memory itself
(:class:`HostCopying`). Between a cache on a device and pinned host memory it only names addresses: one call of the
driver launches thousands of runs for the device's copy engines on the transfer thread's own stream, beside the
engine's, and a mark behind each launch says when its bytes are there. Short runs pass a buffer of the device
(:mod:`~kvferry.execution.device_gather`). Launched copies cannot be revoked.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Descriptors
from kvferry.errors import KVFerryError, PlanError, Reason, TransportError
from kvferry.execution.device import OVER, DeviceOrder, HostCopies, Mark
from kvferry.execution.device_gather import GatherBuffer, choose
from kvferry.execution.executor import JobResult, Phase
from kvferry.layout.shard import Region, Shard
from kvferry.peer_log import PeerLog
from kvferry.plan.block_copies import BlockCopies, block_copies
from kvferry.plan.match import GroupBlocks, sample_requests
from kvferry.plan.planner import PairPlan, Planner
from kvferry.plan.proof import verify_destination
from kvferry.transport.protocol import memory_at

logger = PeerLog(logging.getLogger(__name__))

BYTES_PER_ADVANCE = 16 << 20
"""A job copies about so much at a time: then an urgent job may go first."""
BATCH_BYTES = 64 << 20
"""A launch has about so many bytes: an urgent job waits for two launches at most, some milliseconds."""
BATCH_ROWS = 1 << 16
LAUNCHES_IN_FLIGHT = 2
"""So the device goes on while the transfer thread looks at other jobs."""
CHUNKS_IN_FLIGHT = 4
"""Of half as many bytes each."""
BLOCK_BY_BLOCK_FROM = 16 << 10
"""Blocks of so many bytes are copied one by one, smaller ones many at a time through a buffer in the processor's cache:
one call of numpy costs about as much as a copy of some kilobytes."""
GATHER_BYTES = 256 << 10
ELEMENT_BYTES = 512
"""numpy releases the interpreter lock only for more than 500 elements, so a long run is many elements, not one."""


class LocalRoute:
    """How bytes move from ranks' memory to one shard's, planned and proved once, for the pairs of this process.

    ``own`` are the indices of the sources whose bytes this process copies. The constructor proves the copies of all
    sources, for every choice among replicas. Raises :class:`PlanError` and :class:`VerificationError`.
    """

    def __init__(self, sources: Sequence[Shard], destination: Shard, own: Sequence[int]) -> None:
        self._own = frozenset(own)
        self._groups = {group.name for shard in (*sources, destination) for group in shard.groups}
        self._planner = Planner(sources, destination)
        sample = sample_requests(sources, destination)
        for plans in dict.fromkeys(self._planner.plans(selector) for selector in range(len(sources))):
            lists = [(plan.source, _descriptors(plan, sample)) for plan in plans]
            verify_destination(lists, destination, sample)

    def copies(self, selector: int, blocks: Sequence[GroupBlocks]) -> list[BlockCopies]:
        """Return this process's part of the copies of a request; none where only other processes have a part.

        ``selector`` chooses among replicas, and must be equal in all processes. A destination in one process of several
        may lack a group. Raises :class:`PlanError` (``invalid-request``) for an unknown group or blocks that do not
        fit.
        """
        if unknown := sorted({each.group for each in blocks} - self._groups):
            raise PlanError(
                Reason.INVALID_REQUEST,
                f"cache group {unknown[0]!r} does not exist; there are {sorted(self._groups)}.",
            )
        own = [plan for plan in self._planner.plans(selector) if plan.assignment.source_index in self._own]
        return [copies for plan in own for copies in block_copies(plan, blocks)]


class Copying(Protocol):
    """How the bytes of one job move: by the processor, or by a device."""

    transport: str
    """Its name in results and statistics."""
    seconds: float
    """How long the copies have taken until now."""

    def advance(self) -> bool:
        """Copy or launch a bounded piece; return whether there was progress. Raises :class:`KVFerryError`."""

    @property
    def is_over(self) -> bool:
        """Whether all bytes have moved."""

    def is_quiet(self) -> bool:
        """Return whether no copy is under way, so that no byte moves outside ``advance``."""


class HostCopying:
    """Copies by the processor: bytes move inside ``advance`` only, some 16 MiB at a time."""

    transport = "memcpy"

    def __init__(self, copies: Sequence[BlockCopies]) -> None:
        self._pieces = (num_bytes for each in copies for num_bytes in copy_blocks(each))
        self.is_over = False
        self.seconds = 0.0

    def advance(self) -> bool:
        """Copy about :data:`BYTES_PER_ADVANCE`."""
        began_at, num_bytes = time.monotonic(), 0
        while num_bytes < BYTES_PER_ADVANCE and not self.is_over:
            piece = next(self._pieces, 0)
            num_bytes += piece
            self.is_over = not piece
        self.seconds += time.monotonic() - began_at
        return True

    def is_quiet(self) -> bool:
        return True


class LocalCopy:
    """A copy in progress, as a job: begins once the device has reached ``after``; ``copying`` moves the bytes.

    A load ``fills_blocks`` for a request that waits; any other copy ``can_wait``.
    """

    is_for_log = False

    def __init__(
        self,
        job_id: str,
        route: LocalRoute,
        selector: int,
        blocks: Sequence[GroupBlocks],
        after: Mark = OVER,
        copying: Callable[[Sequence[BlockCopies]], Copying] = HostCopying,
        *,
        fills_blocks: bool,
    ) -> None:
        self.job_id = job_id
        self.fills_blocks = fills_blocks
        self.can_wait = not fills_blocks
        self.phase = Phase.PREPARING
        self.error: KVFerryError | None = None
        self.given_up_at: float | None = None
        self._prepare = partial(route.copies, selector, blocks)
        self._begin = copying
        self._after = after
        self._created_at = time.monotonic()
        self._copies: list[BlockCopies] = []
        self._copying: Copying | None = None

    def advance(self, now: float) -> bool:
        """Lower the plan, copy or launch a bounded piece, or wait for the copies of a job that was given up."""
        try:
            return self._step()
        except KVFerryError as error:
            self.cancel(error)
            return True

    def is_ending(self, now: float) -> bool:
        """Return whether the job was given up: a copy has no deadline."""
        return self.phase is Phase.STOPPING

    def cancel(self, error: KVFerryError) -> None:
        """Give the copy up: at once, or when the copies that a device makes have ended."""
        if self.phase is Phase.DONE or self.error is not None:
            return
        self.error, self.given_up_at = error, time.monotonic()
        self.phase = Phase.DONE if self._copying is None or self._copying.is_quiet() else Phase.STOPPING

    def result(self, finished_at: float) -> JobResult:
        copies = self._copies if self.error is None else []
        return JobResult(
            job_id=self.job_id,
            error=self.error,
            num_bytes=sum(each.num_bytes for each in copies),
            num_descriptors=sum(each.copy.num_runs * len(each.source_blocks) for each in copies),
            num_sources=1,
            transport=HostCopying.transport if self._copying is None else self._copying.transport,
            wait_seconds=finished_at - self._created_at,
            transfer_seconds=0.0 if self._copying is None else self._copying.seconds,
        )

    def _step(self) -> bool:
        if self._copying is None:
            if not self._after.is_over():
                return False
            self._copies = self._prepare()
            self._copying = self._begin(self._copies)
            self.phase = Phase.MOVING
            return True
        if self.phase is Phase.STOPPING:
            if not self._copying.is_quiet():
                return False
            self.phase = Phase.DONE
            return True
        moved = self._copying.advance()
        if self._copying.is_over:
            self.phase = Phase.DONE
        return moved


def copy_blocks(copies: BlockCopies) -> Iterator[int]:
    """Copy all pairs of blocks, a bounded piece per step; yield the bytes of each piece.

    numpy starts no thread, and releases the interpreter lock while it copies a large block.

    >>> source, destination = np.arange(64, dtype=np.uint8), np.zeros(32, dtype=np.uint8)
    >>> from kvferry.plan.planner import StridedCopy
    >>> one = StridedCopy(source.ctypes.data, destination.ctypes.data, 4, ((2, 8, 4),))
    >>> list(copy_blocks(BlockCopies(one, 16, 8, np.array([3, 1]), np.array([0, 2]))))
    [16]
    >>> destination.tolist()[:8], destination.tolist()[16:24]
    ([48, 49, 50, 51, 56, 57, 58, 59], [16, 17, 18, 19, 24, 25, 26, 27])
    """
    run_bytes, block_bytes = copies.copy.run_bytes, copies.block_bytes
    element = math.gcd(run_bytes, ELEMENT_BYTES)
    loops = *copies.copy.loops[::-1], (run_bytes // element, element, element)
    counts, source_strides, destination_strides = zip(*loops, strict=True)
    from_ids, to_ids = copies.source_blocks, copies.destination_blocks
    shape = (int(from_ids.max(initial=0)) + 1, *counts), (int(to_ids.max(initial=0)) + 1, *counts)
    begin, end = copies.copy.source_offset, copies.copy.destination_offset
    source = memory_at(begin, shape[0], (copies.source_block_stride, *source_strides), element)
    destination = memory_at(end, shape[1], (copies.destination_block_stride, *destination_strides), element)
    if block_bytes >= BLOCK_BY_BLOCK_FROM:
        for from_id, to_id in zip(from_ids.tolist(), to_ids.tolist(), strict=True):
            destination[to_id] = source[from_id]
            yield block_bytes
        return
    num_blocks = max(1, GATHER_BYTES // block_bytes)
    for first in range(0, len(from_ids), num_blocks):
        chosen = from_ids[first : first + num_blocks]
        destination[to_ids[first : first + num_blocks]] = source[chosen]
        yield len(chosen) * block_bytes


def _descriptors(plan: PairPlan, blocks: Sequence[GroupBlocks]) -> npt.NDArray[np.uint64]:
    copies = [each.descriptors() for each in block_copies(plan, blocks)]
    return np.concatenate([np.empty((0, 3), dtype=np.uint64), *copies])


class PinnedMemory:
    """A region of host memory that a device copies from and to; short pieces pass the ``buffer``, where there is one.

    Raises :class:`TransportError` (``missing-dependency``, ``unsupported``) where the driver cannot do that.
    """

    def __init__(self, region: Region, order: DeviceOrder, buffer: GatherBuffer | None = None) -> None:
        self._region, self._order, self.buffer = region, order, buffer
        self._driver = HostCopies(order.device)
        self._driver.pin(region.base_address, region.length)
        self._is_pinned = True

    def copying(self, copies: Sequence[BlockCopies]) -> "PinnedCopying":
        """Return these copies, not begun. They are launched by the thread that advances them, on its own stream."""
        begin, end = self._region.base_address, self._region.base_address + self._region.length
        is_load = any(begin <= each.copy.source_offset < end for each in copies)
        return PinnedCopying(copies, self._driver, self._order, self.buffer, is_load=is_load)

    def close(self) -> None:
        """Unpin the memory, which no copy may use any more; twice is fine."""
        if self._is_pinned:
            self._is_pinned = False
            if refused := self._driver.unpin(self._region.base_address):
                logger.info("kvferry: host memory stays pinned until the end of the process: %s", refused)


class PinnedCopying:
    """The copies of one job, launched in batches and chunks, of which few are under way."""

    transport = "cuda"

    def __init__(
        self,
        copies: Sequence[BlockCopies],
        driver: HostCopies,
        order: DeviceOrder,
        buffer: GatherBuffer | None,
        *,
        is_load: bool,
    ) -> None:
        self._driver, self._order = driver, order
        self._in_flight: deque[Mark] = deque()
        self._chunks: deque[Callable[[], None]] = deque()
        if buffer is not None:
            copies, images = choose(copies, buffer.half_bytes, is_load=is_load)
            launch = partial(buffer.launch, copy=driver.launch, under_way=self._in_flight, is_load=is_load)
            self._chunks.extend(partial(launch, chunk) for each in images for chunk in each.chunks(buffer.half_bytes))
        rows = np.concatenate([np.empty((0, 3), np.uint64), *(each.descriptors() for each in copies)])
        ends = batch_ends(rows)
        self._batches = deque(rows[begin:end] for begin, end in zip([0, *ends], ends, strict=False))
        self._began_at: float | None = None
        self.seconds = 0.0

    def advance(self) -> bool:
        """Launch the next batch or chunk unless enough are under way; note which have ended.

        Raises :class:`TransportError` (``transfer-failed``) where the driver refuses copies or the device has failed.
        """
        if self._began_at is None:
            self._began_at = time.monotonic()
        moved = self._settle()
        if self._batches and len(self._in_flight) < LAUNCHES_IN_FLIGHT:
            self._launch(self._batches.popleft())
            moved = True
        elif self._chunks and len(self._in_flight) < CHUNKS_IN_FLIGHT:
            self._chunks.popleft()()
            moved = True
        self.seconds = time.monotonic() - self._began_at
        return moved

    def _launch(self, rows: Descriptors) -> None:
        stream = self._order.stream()
        try:
            self._driver.launch(rows, stream.handle)
        finally:
            # Also behind a batch that was refused: a part of it may be under way.
            self._in_flight.append(stream.mark())

    @property
    def is_over(self) -> bool:
        """Whether all was launched and has ended."""
        return not self._batches and not self._chunks and not self._in_flight

    def is_quiet(self) -> bool:
        """Return whether no copy is under way: all that were launched have ended, or the device has failed."""
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
