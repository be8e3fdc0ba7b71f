"""What the pool tier makes of calls that fail, last or answer late; a dictionary of this process is the pool."""

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from kvferry.errors import Reason, TierError
from kvferry.tiers import remote_pool
from kvferry.tiers.pool.store import PoolState, UncertainTransfer
from kvferry.tiers.protocol import BlockKey
from kvferry.tiers.remote_pool import MIN_SHARE_BYTES, RemotePool

from ..support.tier_suite import BLOCK_BYTES, LowerBench, block_keys, refusal
from ..waits import wait_until

LOST = TierError(Reason.TIER_FAILED, "the pool does not answer.")


class FakeStore:
    """Keeps blocks in a dictionary. Calls wait for ``may_go_on``; ``fault`` is raised by puts and gets at their end."""

    def __init__(self, *_: object, **__: object) -> None:
        self.state = PoolState(True, 1)
        self.blocks: dict[BlockKey, bytes] = {}
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fault: Exception | None = None
        self.is_closed = False

    def renew(self) -> float:
        return 60.0

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._check()
        return [key in self.blocks for key in keys]

    def remove(self, keys: Sequence[BlockKey]) -> None:
        self._check()
        for key in keys:
            self.blocks.pop(key, None)

    def put(self, keys: Sequence[BlockKey], addresses: Sequence[int], lengths: Sequence[int]) -> list[None]:
        self._check()
        self.blocks |= dict(zip(keys, map(ctypes.string_at, addresses, lengths), strict=True))
        return self._end(keys)

    def get(self, keys: Sequence[BlockKey], addresses: Sequence[int], lengths: Sequence[int]) -> list[None]:
        self._check()
        for key, address, length in zip(keys, addresses, lengths, strict=True):
            ctypes.memmove(address, self.blocks[key], length)
        return self._end(keys)

    def close(self) -> None:
        self.is_closed = True

    def _check(self) -> None:
        if not self.state.is_reachable:
            raise LOST

    def _end(self, keys: Sequence[BlockKey]) -> list[None]:
        assert self.may_go_on.wait(60.0)
        if self.fault is not None:
            raise self.fault
        return [None] * len(keys)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[LowerBench]:
    monkeypatch.setattr(remote_pool, "PoolStore", FakeStore)
    monkeypatch.setattr(remote_pool, "import_store", lambda: None)
    bench = LowerBench(lambda region: RemotePool("nowhere:1", MIN_SHARE_BYTES, region))
    yield bench
    bench.tier.close()
    assert fake(bench).is_closed
    bench.memory.close()


def fake(bench: LowerBench) -> FakeStore:
    store = bench.tier._store  # type: ignore[attr-defined]
    assert isinstance(store, FakeStore)
    return store


def settle(bench: LowerBench) -> None:
    """Poll until the threads have nothing to do."""
    wait_until(lambda: bench.poll() or not bench.tier.snapshot()["num_waiting"], "the threads are done")
    bench.poll()


def test_a_read_whose_bytes_may_still_arrive_never_ends(bench: LowerBench) -> None:
    """Neither by itself nor by ``cancel``, so its slots stay in use; ``close`` says that the slab must stay mapped."""
    keys = block_keys(1, 2)
    bench.store(*keys)
    fake(bench).fault = UncertainTransfer()
    load = bench.begin_load(keys)
    settle(bench)
    bench.tier.cancel(load)
    settle(bench)
    assert not load.has_ended
    assert refusal(bench.tier.complete_load, load) is Reason.INVALID_REQUEST
    assert bench.tier.snapshot()["num_pinned"] == 2
    assert refusal(bench.tier.close) is Reason.DEADLINE_EXCEEDED
    assert not fake(bench).is_closed, "Mooncake may still write"
    fake(bench).close()


def test_a_tier_that_was_not_polled_keeps_the_slab_mapped_too(bench: LowerBench) -> None:
    bench.store(*block_keys(1))
    fake(bench).fault = UncertainTransfer()
    bench.begin_load(block_keys(1))
    wait_until(lambda: not bench.tier.snapshot()["num_waiting"], "the read has failed")
    assert refusal(bench.tier.close) is Reason.DEADLINE_EXCEEDED
    fake(bench).close()


def test_a_store_without_an_answer_leaves_nothing(bench: LowerBench) -> None:
    """Nobody knows whether the pool has the blocks, so they are removed."""
    fake(bench).fault = LOST
    store = bench.store(*block_keys(1, 2))
    assert store.failures == {Reason.TIER_FAILED: 2}
    assert bench.tier.snapshot()["num_bytes"] == 0
    settle(bench)
    assert not fake(bench).blocks


def test_what_could_not_be_removed_is_removed_later(bench: LowerBench) -> None:
    """Unless the block was stored again meanwhile."""
    first, again = block_keys(1, 2)
    fake(bench).fault = LOST
    store = bench.wait(bench.begin_store([first, again]))
    fake(bench).state = PoolState(False, 1)
    bench.complete(store)
    settle(bench)
    assert fake(bench).blocks.keys() == {first, again}
    fake(bench).fault = None
    fake(bench).state = PoolState(True, 1)
    opened = bench.begin_store([again])
    settle(bench)
    bench.complete(bench.wait(opened))
    settle(bench)
    assert fake(bench).blocks.keys() == {again}
    assert bench.held([first, again]) == [again]


def test_a_cancelled_store_ends_with_its_call(bench: LowerBench) -> None:
    """Its slots are read until then; the blocks that the pool got are removed."""
    fake(bench).may_go_on.clear()
    store = bench.begin_store(block_keys(1, 2))
    wait_until(lambda: len(fake(bench).blocks) == 2, "the call is in progress")
    bench.tier.cancel(store)
    bench.poll()
    assert not store.has_ended
    fake(bench).may_go_on.set()
    bench.wait(store)
    assert store.failures == {Reason.ABORTED: 2}
    bench.complete(store)
    settle(bench)
    assert not fake(bench).blocks
    assert bench.held(block_keys(1, 2)) == []


def test_a_store_that_no_thread_has_begun_is_cancelled_at_once(bench: LowerBench) -> None:
    fake(bench).may_go_on.clear()
    first, second = bench.begin_store(block_keys(1)), bench.begin_store(block_keys(2))
    bench.tier.cancel(second)
    assert second.has_ended
    bench.complete(second)
    fake(bench).may_go_on.set()
    bench.complete(bench.wait(first))
    settle(bench)
    assert list(fake(bench).blocks) == block_keys(1)


@pytest.mark.parametrize("has_landed", [False, True])
def test_a_store_of_a_pool_that_was_emptied_is_not_visible(bench: LowerBench, has_landed: bool) -> None:
    """Whether its call ended before or after."""
    fake(bench).may_go_on.clear()
    store = bench.begin_store(block_keys(1))
    if has_landed:
        fake(bench).may_go_on.set()
        bench.wait(store)
    fake(bench).state = PoolState(True, 2)
    bench.poll()
    fake(bench).may_go_on.set()
    bench.complete(bench.wait(store))
    settle(bench)
    assert bench.held(block_keys(1)) == []
    assert not fake(bench).blocks
    assert bench.tier.snapshot()["num_bytes"] == 0


def test_blocks_that_were_stored_before_the_loss_was_noticed_are_removed(bench: LowerBench) -> None:
    """They lie in the new pool, and no engine would own them."""
    bench.store(*block_keys(1, 2))
    fake(bench).state = PoolState(True, 2)
    assert bench.held(block_keys(9)) == []
    settle(bench)
    assert not fake(bench).blocks


@pytest.mark.parametrize(
    "reason",
    [
        Reason.PEER_UNREACHABLE,
        Reason.TRANSFER_FAILED,
        Reason.BLOCK_MISSING,
        Reason.CHECKSUM_MISMATCH,
        Reason.BLOCK_SIZE_MISMATCH,
    ],
)
def test_an_own_block_that_cannot_be_read_leaves_the_pool(bench: LowerBench, reason: Reason) -> None:
    """Its room is given back; a block that stayed would be in nobody's books, and the share would overflow."""
    keys = block_keys(1, 2)
    bench.store(*keys)
    fake(bench).get = lambda *_: [TierError(reason, "not this time.")]  # type: ignore[method-assign]
    load = bench.load(keys[0])
    assert load.failures == {reason: 1}
    settle(bench)
    assert fake(bench).blocks.keys() == {keys[1]}
    assert bench.tier.snapshot()["num_blocks"] == 1
    assert bench.held(keys) == keys[1:]


@pytest.mark.parametrize(
    ("reason", "stays"),
    [
        (Reason.CHECKSUM_MISMATCH, False),
        (Reason.BLOCK_SIZE_MISMATCH, False),
        (Reason.PEER_UNREACHABLE, True),
        (Reason.TRANSFER_FAILED, True),
    ],
)
def test_a_block_of_another_that_is_not_what_its_name_says_leaves_the_pool(
    bench: LowerBench, reason: Reason, stays: bool
) -> None:
    """Else everybody asks for the block, and nobody stores it, as long as its engine lives."""
    (key,) = block_keys(1)
    fake(bench).blocks[key] = b"forged"
    fake(bench).get = lambda *_: [TierError(reason, "not this time.")]  # type: ignore[method-assign]
    assert bench.held([key]) == [key]
    assert bench.load(key).failures == {reason: 1}
    settle(bench)
    assert (key in fake(bench).blocks) == stays
    assert bench.held([key]) == []


def test_no_verb_waits_for_a_call(bench: LowerBench) -> None:
    bench.store(*block_keys(*range(8)))
    fake(bench).may_go_on.clear()
    began_at = time.monotonic()
    copies = [bench.begin_load(block_keys(*range(8))), bench.begin_store(block_keys(*range(20, 28)))]
    bench.tier.look_up(block_keys(*range(50)))
    bench.poll()
    assert time.monotonic() - began_at < 5.0
    fake(bench).may_go_on.set()
    for copy in copies:
        bench.complete(bench.wait(copy))
    assert bench.tier.snapshot()["num_bytes"] >= 16 * BLOCK_BYTES
