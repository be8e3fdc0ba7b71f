"""The time of transfers between GPUs, in models of one H200: a transfer thread and NIXL's calls on a virtual clock.

Measured there on 2026-11-27: a copy within the device moves 2,130 GB/s; 1.17 GB in 26 descriptors, in slices of 8 MiB
of which 8 were in flight, took 12 to 14 ms. Which call took how long is not known. Both models take as long: in one a
call that posts a slice takes 90 us; in the other UCX sees the end of a copy every 0.7 ms only.
"""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.errors import KVFerryError
from kvferry.execution import executor as executor_module
from kvferry.execution.executor import Executor, JobResult, Phase
from kvferry.layout.shard import Region
from kvferry.transport import nixl as nixl_module
from kvferry.transport.nixl import NixlPeer, NixlTransport
from kvferry.transport.protocol import Direction, RegionTable, Status, Transfer

BYTES_PER_SECOND = 2130e9
LOOK_SECONDS, START_SECONDS = 3e-6, 5e-6
"""Of a call that asks for the state of a slice, and from the launch of a copy to its first byte."""
REGION = Region(1 << 40, 1 << 31, "cuda:0")
PROMPT_BYTES, NUM_DESCRIPTORS = 1_170_000_000, 26


class Clock:
    """A virtual clock, the orders of an executor that wait by it, and NIXL's calls, which take their time.

    To post a slice takes ``post_seconds``; ends are seen every ``seen_seconds``, at once for 0.
    """

    def __init__(self, post_seconds: float, seen_seconds: float) -> None:
        self.post_seconds, self.seen_seconds = post_seconds, seen_seconds
        self.now = 0.0
        self.num_looks = 0
        self._device_is_free_at = 0.0
        self._ends: dict[int, float] = {}
        self._bytes: list[int] = []
        self._orders: list[Any] = []

    def put(self, order: Any) -> None:
        self._orders.append(order)

    def take(self) -> list[Any]:
        orders, self._orders = self._orders, []
        return orders

    def wait(self, seconds: float = 0.0) -> bool:
        self.now += 0.0 if self._orders else seconds
        return bool(self._orders)

    def createXferReq(self, operation: str, local: Any, *_: Any) -> int:
        self._bytes.append(int(local[:, 1].sum()))
        return len(self._bytes)

    def postXferReq(self, handle: int) -> str:
        self.now += self.post_seconds
        begins_at = max(self.now + START_SECONDS, self._device_is_free_at)
        self._device_is_free_at = self._ends[handle] = begins_at + self._bytes[handle - 1] / BYTES_PER_SECOND
        return "running"

    def getXferStatus(self, handle: int) -> str:
        self.now += LOOK_SECONDS
        self.num_looks += 1
        seen_until = self.now // self.seen_seconds * self.seen_seconds if self.seen_seconds else self.now
        return "running" if seen_until < self._ends[handle] else "done"

    def releaseXferReq(self, handle: int) -> None:
        del self._ends[handle]

    def registerMem(self, *_: Any) -> None: ...

    deregisterMem = registerMem

    def createBackend(self, *_: Any) -> int:
        return 1

    def getLocalMD(self) -> bytes:
        return b"metadata"


class Moved:
    """A job that moves one transfer."""

    job_id, fills_blocks, is_for_log, can_wait = "moved", False, False, False
    phase, error, given_up_at = Phase.MOVING, None, None

    def __init__(self, transport: NixlTransport, transfer: Transfer) -> None:
        self._transport, self._transfer = transport, transfer

    def advance(self, now: float) -> bool:
        before = self._transfer.bytes_done
        if self._transport.poll(self._transfer) is not Status.PENDING:
            assert self._transfer.status is Status.DONE, self._transfer.error
            self.phase = Phase.DONE
        return self._transfer.bytes_done != before

    def is_ending(self, now: float) -> bool:
        return False

    def cancel(self, error: KVFerryError) -> None:
        raise error

    def result(self, finished_at: float) -> JobResult:
        return JobResult(self.job_id, None)


@pytest.fixture(params=[(90e-6, 0.0), (20e-6, 0.0007)], ids=["slow posts", "late looks"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(*request.param)
    bindings = SimpleNamespace(
        **{name: name for name in ("NIXL_READ", "NIXL_WRITE", "NIXL_THREAD_SYNC_NONE", "DRAM_SEG", "VRAM_SEG")},
        NIXL_IN_PROG="running",
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=lambda name, config: clock,
        nixlRegDList=lambda kind, rows: rows,
        nixlXferDList=lambda kind, rows: rows,
    )
    monkeypatch.setattr(nixl_module, "_import_bindings", lambda: bindings)
    return clock


def seconds_of(clock: Clock, num_bytes: int, num_descriptors: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the seconds from the submission of a transfer until the transfer thread has noticed its end."""
    transport = NixlTransport()
    transport.register([REGION])
    peer = NixlPeer("peer", RegionTable([REGION]), "peer", nixl_module.deque())
    lengths = np.full(num_descriptors, num_bytes // num_descriptors, np.uint64)
    starts = REGION.base_address + np.cumsum(lengths) - lengths
    executor = Executor()
    waits_on = executor._orders
    try:
        monkeypatch.setattr(executor_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
        executor._orders = clock  # type: ignore[assignment] # the executor's own thread waits on the former
        transfer = transport.submit(peer, Direction.WRITE, np.stack([starts, starts, lengths], 1))
        began_at = clock.now
        executor.submit(Moved(transport, transfer))
        while not (done := executor.collect()):
            executor._turn()
        assert [result.error for result in done] == [None]
        return clock.now - began_at
    finally:
        monkeypatch.undo()
        executor._stop.set()
        waits_on.put(None)
        executor._thread.join()


def predicted(clock: Clock, num_bytes: int) -> float:
    """Return the seconds by arithmetic: the copy behind its post, or all posts, or all looks; and the last look."""
    num_slices = math.ceil(num_bytes / NixlTransport._device_slice_bytes)
    copied = clock.post_seconds + START_SECONDS + num_bytes / BYTES_PER_SECOND
    posted = num_slices * clock.post_seconds
    seen = math.ceil(num_slices / nixl_module.MAX_DEVICE_SLICES_IN_FLIGHT) * clock.seen_seconds
    return max(copied, posted, seen) + LOOK_SECONDS


def test_the_models_take_as_long_as_an_h200_took_before(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlTransport, "_device_slice_bytes", 8 << 20)
    monkeypatch.setattr(nixl_module, "MAX_DEVICE_SLICES_IN_FLIGHT", 8)
    monkeypatch.setattr(executor_module, "WAIT_SECONDS", 0.0005)
    expected = predicted(clock, PROMPT_BYTES)
    seconds = seconds_of(clock, PROMPT_BYTES, NUM_DESCRIPTORS, monkeypatch)
    assert seconds == pytest.approx(0.013, rel=0.2)
    assert seconds == pytest.approx(expected, rel=0.2)


def test_a_large_prompt_takes_a_tenth_of_the_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.55 ms are those of a copy within the device."""
    seconds = seconds_of(clock, PROMPT_BYTES, NUM_DESCRIPTORS, monkeypatch)
    assert seconds == pytest.approx(predicted(clock, PROMPT_BYTES), rel=0.2)
    assert 0.00055 < seconds < 0.0015
    assert clock.num_looks < 200


@pytest.mark.parametrize(("num_bytes", "num_descriptors"), [(256 << 10, 4), (64 << 20, 1), (64 << 20, 512)])
def test_a_small_prompt_takes_under_a_millisecond(
    num_bytes: int, num_descriptors: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = seconds_of(clock, num_bytes, num_descriptors, monkeypatch)
    assert seconds == pytest.approx(predicted(clock, num_bytes), rel=0.2)
    assert seconds < 0.001


def submitted(region: Region, num_bytes: int) -> tuple[NixlTransport, Transfer]:
    transport = NixlTransport()
    transport.register([region])
    peer = NixlPeer("peer", RegionTable([region]), "peer", nixl_module.deque())
    row = np.array([[region.base_address, region.base_address, num_bytes]], np.uint64)
    return transport, transport.submit(peer, Direction.WRITE, row)


def test_a_cancelled_transfer_ends_only_with_its_posted_slices(clock: Clock) -> None:
    transport, transfer = submitted(REGION, 1 << 28)
    assert transport.poll(transfer) is Status.PENDING
    assert transport.cancel(transfer) is Status.PENDING, "the device still writes"
    clock.now += 1.0
    assert transport.poll(transfer) is Status.CANCELLED


def test_slices_that_end_as_they_are_posted_are_not_the_whole_transfer(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "postXferReq", lambda handle: clock._ends.update({handle: 0.0}))
    transport, transfer = submitted(Region(1 << 40, 1 << 31), 2 * NixlTransport._slice_bytes)
    assert transport.poll(transfer) is Status.PENDING, "a second slice is not posted"
    assert transport.poll(transfer) is Status.DONE
