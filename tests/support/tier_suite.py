"""The tests that every tier must pass. Subclass a suite in a test module and say how your tier is opened:

    class TestMyTier(LowerTierSuite):
        def open_tier(self, region: Region, place: Path) -> LowerTier:
            return MyTier(region, place / "blocks", capacity_bytes=8 << 20)

        def damage(self, tier: LowerTier, place: Path, key: BlockKey) -> None:
            ...  # flip a byte of the stored block, behind the tier's back

``capacity_bytes`` of the tier must hold 20 to 400 blocks of ``BLOCK_BYTES``. :func:`tier_machine` makes a Hypothesis
state machine that drives the same tier against a dictionary. Needs pytest and hypothesis; every wait is bounded.
"""

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import Reason, TierError
from kvferry.layout.named_layouts import NamedLayout
from kvferry.layout.shard import Region, Shard
from kvferry.layout.slab import slab_shard
from kvferry.tiers.host_memory import HostMemory, HostStore
from kvferry.tiers.protocol import (
    KEY_BYTES,
    MAX_BATCH,
    BlockKey,
    Load,
    LowerTier,
    Presence,
    Slots,
    Store,
    Tier,
    TierCopy,
)
from kvferry.tiers.slab_memory import SlabMemory

from .dense import shard_for

BLOCK_BYTES = 65_536
FINISH_SECONDS = 20.0
CALL_SECONDS = 5.0
"""Limit of the duration of one call, in seconds: a busy machine stalls a process for one or two."""
LOOK_UP_SECONDS = 1e-6
"""Limit of a look-up, for each block."""
NUM_STAGING_SLOTS = 512

Copy = TypeVar("Copy", bound=TierCopy)


def block_key(number: int) -> BlockKey:
    """Return the key of this number.

    >>> len(block_key(7)) == KEY_BYTES, block_key(7)[-1]
    (True, 7)
    """
    return number.to_bytes(KEY_BYTES, "big")


def block_keys(*numbers: int) -> list[BlockKey]:
    """Return the keys of these numbers."""
    return list(map(block_key, numbers))


@lru_cache(maxsize=1024)
def content_of(key: BlockKey, length: int = BLOCK_BYTES) -> bytes:
    """Return the bytes that the tests store under a key: random, and different for each key and length."""
    return np.random.default_rng(int.from_bytes(key, "big")).bytes(length)


class TierBench(ABC):
    """A tier and memory for its blocks. Stores the content of :func:`content_of`, loads, and completes."""

    tier: Tier

    @abstractmethod
    def begin_store(self, keys: Sequence[BlockKey], lengths: Mapping[BlockKey, int] | None = None) -> Store:
        """Prepare a store of these blocks and let their bytes be there."""

    @abstractmethod
    def begin_load(self, keys: Sequence[BlockKey], lengths: Mapping[BlockKey, int] | None = None) -> Load:
        """Prepare a load into memory that holds other bytes."""

    @abstractmethod
    def wait(self, copy: Copy) -> Copy:
        """Return the copy when it has ended."""

    @abstractmethod
    def close(self) -> None:
        """Close the tier and free the memory."""

    def complete(self, copy: TierCopy) -> None:
        """Complete a copy that has ended."""
        if isinstance(copy, Load):
            self.tier.complete_load(copy)
        else:
            assert isinstance(copy, Store)
            self.tier.complete_store(copy)

    def store(self, *keys: BlockKey, lengths: Mapping[BlockKey, int] | None = None) -> Store:
        """Store blocks and complete the store."""
        store = self.wait(self.begin_store(keys, lengths))
        self.complete(store)
        return store

    def load(self, *keys: BlockKey, lengths: Mapping[BlockKey, int] | None = None) -> Load:
        """Load blocks, compare their bytes, and complete the load."""
        load = self.wait(self.begin_load(keys, lengths))
        self.check_content(load)
        self.complete(load)
        return load

    def held(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return which blocks the tier holds; wait for its answer."""
        deadline = time.monotonic() + FINISH_SECONDS
        while (found := self.tier.look_up(keys)).max(initial=0) == Presence.PENDING:
            assert time.monotonic() < deadline, "the tier does not say whether it holds the blocks"
            self.poll()
        return [key for key, presence in zip(keys, found.tolist(), strict=True) if presence == Presence.HELD]

    @abstractmethod
    def poll(self) -> None:
        """Let the tier make progress."""

    @staticmethod
    def check_content(load: Load) -> None:
        """Compare every landed block with what was stored under its key."""
        rows = zip(load.keys, load.slots.addresses.tolist(), load.slots.lengths.tolist(), load.landed, strict=True)
        for key, address, length, landed in rows:
            wrong = f"the bytes of block {int.from_bytes(key, 'big')} are wrong"
            assert not landed or ctypes.string_at(address, length) == content_of(key, length), wrong


class LowerBench(TierBench):
    """A lower tier with a slab for staging."""

    tier: LowerTier

    def __init__(self, open_tier: Callable[[Region], LowerTier]) -> None:
        self.memory = SlabMemory(NUM_STAGING_SLOTS * BLOCK_BYTES)
        self.tier = open_tier(self.memory.region)
        self.open_tier = open_tier
        self._free = list(range(NUM_STAGING_SLOTS))

    def begin_store(self, keys: Sequence[BlockKey], lengths: Mapping[BlockKey, int] | None = None) -> Store:
        """Write the blocks into slots and store these."""
        slots = self._slots(keys, lengths)
        for key, address, length in zip(keys, slots.addresses.tolist(), slots.lengths.tolist(), strict=True):
            ctypes.memmove(address, content_of(key, length), length)
        return self._kept(self.tier.prepare_store(keys, slots), slots)

    def begin_load(self, keys: Sequence[BlockKey], lengths: Mapping[BlockKey, int] | None = None) -> Load:
        """Load into slots full of other bytes."""
        slots = self._slots(keys, lengths)
        for address, length in zip(slots.addresses.tolist(), slots.lengths.tolist(), strict=True):
            ctypes.memset(address, 0xA5, length)
        return self._kept(self.tier.prepare_load(keys, slots), slots)

    def wait(self, copy: Copy) -> Copy:
        """Poll until the copy has ended."""
        deadline = time.monotonic() + FINISH_SECONDS
        while not copy.has_ended:
            assert time.monotonic() < deadline, f"{type(copy).__name__} has not ended after {FINISH_SECONDS} s"
            self.poll()
        return copy

    def poll(self) -> None:
        """Poll once; the call must be short."""
        began_at = time.monotonic()
        self.tier.poll()
        assert time.monotonic() - began_at < CALL_SECONDS
        time.sleep(0.0005)

    def complete(self, copy: TierCopy) -> None:
        """Complete, and use the slots again."""
        super().complete(copy)
        self._free += ((copy.slots.addresses - np.uint64(self.memory.region.base_address)) // BLOCK_BYTES).tolist()

    def reopen(self) -> None:
        """Close the tier and open another one at the same place."""
        self.tier.close()
        self.tier = self.open_tier(self.memory.region)

    def close(self) -> None:
        """Close the tier, then unmap the slab."""
        self.tier.close()
        self.memory.close()

    def _slots(self, keys: Sequence[BlockKey], lengths: Mapping[BlockKey, int] | None) -> Slots:
        numbers = [self._free.pop() for _ in keys]
        addresses = [self.memory.region.base_address + number * BLOCK_BYTES for number in numbers]
        return Slots.of(addresses, [(lengths or {}).get(key, BLOCK_BYTES) for key in keys])

    @staticmethod
    def _kept(copy: Copy, slots: Slots) -> Copy:
        assert copy.slots.addresses.tolist() == slots.addresses.tolist()
        return copy


class HostBench(TierBench):
    """Host memory of one group; its blocks are written in two parts."""

    tier: HostMemory

    def __init__(self, num_blocks: int = 128) -> None:
        self.memory = SlabMemory(num_blocks * BLOCK_BYTES)
        self.tier = HostMemory(slab_of_blocks(num_blocks, self.memory.region.base_address))

    def begin_store(self, keys: Sequence[BlockKey], lengths: Mapping[BlockKey, int] | None = None) -> Store:
        """Reserve slots and write the blocks into them."""
        assert not lengths, "slots of host memory have one size"
        store = self.tier.prepare_store("full", keys, num_parts=2)
        for key, address in zip(store.keys, store.slots.addresses.tolist(), strict=True):
            ctypes.memmove(address, content_of(key), BLOCK_BYTES)
        return store

    def begin_load(self, keys: Sequence[BlockKey], lengths: Mapping[BlockKey, int] | None = None) -> Load:
        """Pin the blocks where they are."""
        assert not lengths, "slots of host memory have one size"
        return self.tier.prepare_load(keys)

    def wait(self, copy: Copy) -> Copy:
        """Report the parts of a store."""
        if isinstance(copy, HostStore) and not copy.has_ended:
            for part in (1, 0):
                self.tier.land(copy, part)
        assert copy.has_ended
        return copy

    def poll(self) -> None:
        """Wait for nobody: host memory makes progress when its parts land."""

    def close(self) -> None:
        """Close the tier, then unmap the slab."""
        self.tier.close()
        self.memory.close()


def slab_of_blocks(num_blocks: int, base_address: int) -> Shard:
    """Return the shard of a slab of one group ``full`` with blocks of ``BLOCK_BYTES``."""
    rank = shard_for(
        layers=["0", "1"],
        num_kv_heads=8,
        head_size=64,
        itemsize=2,
        block_size=16,
        num_blocks=1,
        layout=NamedLayout.LBNHC,
    )
    return slab_shard([rank], {"full": num_blocks}, base_address=base_address)


def refusal(call: Callable[..., object], *args: Any) -> Reason:
    """Return why a call is refused."""
    with pytest.raises(TierError) as caught:
        call(*args)
    return caught.value.reason


class TierSuite(ABC):
    """What host memory and every lower tier must do; see the module's docstring."""

    @abstractmethod
    def open_bench(self, place: Path) -> TierBench:
        """Open an empty tier."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[TierBench]:
        """An empty tier; at the end of every test nothing is pinned and no copy is open."""
        bench = self.open_bench(tmp_path)
        try:
            yield bench
            found = bench.tier.snapshot()
            assert [found[name] for name in ("num_pinned", "num_loads", "num_stores")] == [0, 0, 0]
            assert found["num_bytes"] <= bench.tier.capabilities.capacity_bytes
        finally:
            bench.close()

    def test_what_was_stored_is_loaded(self, bench: TierBench) -> None:
        """Byte for byte, whole batches and single blocks, in another order."""
        keys = block_keys(*range(16))
        store = bench.store(*keys)
        assert store.landed.all()
        assert not store.failures
        assert bench.held(keys) == keys
        assert bench.load(*keys[::-1]).landed.all()
        for key in keys[3:6]:
            assert bench.load(key).landed.all()
        assert bench.tier.snapshot()["num_blocks"] == 16
        assert bench.tier.snapshot()["num_bytes"] >= 16 * BLOCK_BYTES

    def test_an_empty_batch_ends_at_once(self, bench: TierBench) -> None:
        """No blocks, no error."""
        assert bench.tier.look_up([]).tolist() == []
        assert len(bench.store().landed) == len(bench.load().landed) == 0

    def test_a_block_is_visible_only_after_its_store_is_completed(self, bench: TierBench) -> None:
        """Neither while the store is open nor after it has landed."""
        keys = block_keys(1, 2)
        store = bench.begin_store(keys)
        assert Presence.HELD not in bench.tier.look_up(keys).tolist()
        bench.wait(store)
        assert Presence.HELD not in bench.tier.look_up(keys).tolist()
        bench.complete(store)
        assert bench.held(keys) == keys

    def test_a_cancelled_store_leaves_nothing(self, bench: TierBench) -> None:
        """No block becomes visible, and its room is given back, however often."""
        keys = block_keys(*range(8))
        for _ in range(bench.tier.capabilities.capacity_bytes // BLOCK_BYTES // 4):
            store = bench.begin_store(keys)
            bench.tier.cancel(store)
            bench.wait(store)
            assert not store.landed.any()
            assert store.failures == {Reason.ABORTED: 8}
            bench.complete(store)
        assert bench.held(keys) == []
        assert bench.store(*keys).landed.all()
        assert bench.load(*keys).landed.all()

    def test_a_cancelled_store_counts_every_block_as_aborted(self, bench: TierBench) -> None:
        """Also a block that the tier held before, and still holds."""
        bench.store(block_key(1))
        store = bench.begin_store(block_keys(1, 2))
        bench.tier.cancel(store)
        bench.wait(store)
        assert not store.landed.any()
        assert store.failures == {Reason.ABORTED: len(store.keys)}
        bench.complete(store)
        assert bench.load(block_key(1)).landed.all()

    def test_cancelling_what_has_ended_changes_nothing(self, bench: TierBench) -> None:
        """A cancelled load has either landed or not; a store that has ended becomes visible."""
        keys = block_keys(1, 2, 3)
        store = bench.wait(bench.begin_store(keys))
        bench.tier.cancel(store)
        assert store.landed.all()
        bench.complete(store)
        load = bench.wait(bench.begin_load(keys))
        bench.tier.cancel(load)
        assert load.landed.all()
        bench.complete(load)

    def test_a_cancelled_load_says_what_has_landed(self, bench: TierBench) -> None:
        """Each block has landed with the right bytes, or is counted as aborted; the tier still holds all."""
        keys = block_keys(*range(16))
        bench.store(*keys)
        load = bench.begin_load(keys)
        bench.tier.cancel(load)
        bench.wait(load)
        bench.check_content(load)
        assert load.failures[Reason.ABORTED] == np.count_nonzero(~load.landed)
        bench.complete(load)
        assert bench.load(*keys).landed.all()

    def test_two_stores_of_a_key_at_a_time(self, bench: TierBench) -> None:
        """The second is refused for that key and for no other, and the bytes are right."""
        first = bench.begin_store(block_keys(1, 2))
        second = bench.begin_store(block_keys(2, 3))
        assert second.failures == {Reason.ALREADY_BEING_STORED: 1}
        for store in (second, first):
            bench.wait(store)
            bench.complete(store)
        assert bench.load(*block_keys(1, 2, 3)).landed.all()

    def test_a_block_that_is_held_is_not_stored_again(self, bench: TierBench) -> None:
        """No room is taken twice, and the block counts as landed."""
        bench.store(*block_keys(1, 2))
        before = bench.tier.snapshot()["num_bytes"]
        again = bench.store(*block_keys(1, 2))
        assert again.landed.all()
        assert not again.failures
        assert bench.tier.snapshot()["num_bytes"] == before

    def test_capacity_is_never_exceeded(self, bench: TierBench) -> None:
        """Three times what fits: the tier occupies at most its capacity and reports every block that it evicts."""
        capacity = bench.tier.capabilities.capacity_bytes
        keys = block_keys(*range(3 * capacity // BLOCK_BYTES))
        expected: dict[BlockKey, None] = {}
        for at in range(0, len(keys), 8):
            store = bench.begin_store(keys[at : at + 8])
            assert bench.tier.snapshot()["num_bytes"] <= capacity
            bench.wait(store)
            bench.complete(store)
            expected.update(dict.fromkeys(key for key, landed in zip(store.keys, store.landed, strict=True) if landed))
            for key in store.evicted:
                del expected[key]
            assert bench.tier.snapshot()["num_bytes"] <= capacity
        assert bench.held(keys) == list(expected)
        assert len(expected) >= capacity // BLOCK_BYTES // 4, "the tier uses its room"
        assert keys[-1] in expected
        for at in range(0, len(expected), 8):
            assert bench.load(*list(expected)[at : at + 8]).landed.all()

    def test_pinned_blocks_are_never_evicted(self, bench: TierBench) -> None:
        """An open load keeps its blocks while other blocks fill the tier twice."""
        pinned = block_keys(1, 2, 3)
        bench.store(*pinned)
        load = bench.wait(bench.begin_load(pinned))
        for start in range(10, 10 + 2 * bench.tier.capabilities.capacity_bytes // BLOCK_BYTES, 8):
            assert not set(bench.store(*block_keys(*range(start, start + 8))).evicted) & set(pinned)
        assert bench.held(pinned) == pinned
        bench.check_content(load)
        assert bench.load(*pinned).landed.all()
        bench.complete(load)

    def test_a_missing_block_is_counted(self, bench: TierBench) -> None:
        """The other blocks of the load land."""
        bench.store(*block_keys(1, 3))
        load = bench.load(*block_keys(1, 2, 3))
        assert load.failures == {Reason.BLOCK_MISSING: 1}
        assert int(np.count_nonzero(load.landed)) == 2
        assert load.error is not None
        assert load.error.reason is Reason.BLOCK_MISSING

    def test_two_loads_of_a_block_at_a_time(self, bench: TierBench) -> None:
        """Both land; the block stays pinned until the second is completed."""
        keys = block_keys(1, 2)
        bench.store(*keys)
        loads = [bench.begin_load(keys), bench.begin_load(keys)]
        for load in loads:
            assert bench.wait(load).landed.all()
            bench.check_content(load)
            assert bench.tier.snapshot()["num_pinned"] == 2
            bench.complete(load)

    def test_a_copy_is_completed_once(self, bench: TierBench) -> None:
        """The second call is refused, so no pin of another load is ended."""
        store = bench.wait(bench.begin_store(block_keys(1)))
        bench.complete(store)
        assert refusal(bench.tier.complete_store, store) is Reason.INVALID_REQUEST
        load = bench.wait(bench.begin_load(block_keys(1)))
        bench.complete(load)
        assert refusal(bench.tier.complete_load, load) is Reason.INVALID_REQUEST

    def test_a_store_that_has_not_ended_cannot_be_completed(self, bench: TierBench) -> None:
        """Its slots may still be read or written."""
        store = bench.begin_store(block_keys(*range(8)))
        if not store.has_ended:
            assert refusal(bench.tier.complete_store, store) is Reason.INVALID_REQUEST
        bench.complete(bench.wait(store))

    def test_wrong_keys_and_batches_are_refused(self, bench: TierBench) -> None:
        """A key of another length is absent, and cannot be stored."""
        assert bench.tier.look_up([b"", b"short", bytes(KEY_BYTES + 1)]).tolist() == [Presence.ABSENT] * 3
        assert refusal(bench.tier.look_up, [block_key(1)] * (MAX_BATCH + 1)) is Reason.INVALID_REQUEST
        assert refusal(bench.begin_store, [bytes(KEY_BYTES - 1)]) is Reason.INVALID_REQUEST

    def test_a_look_up_is_quick(self, bench: TierBench) -> None:
        """Under a microsecond a block, held or not."""
        held = block_keys(*range(16))
        bench.store(*held)
        for keys in (block_keys(*range(100, 10_100)), held * 600):
            seconds = []
            for _ in range(5):
                began_at = time.perf_counter()
                bench.tier.look_up(keys)
                seconds.append(time.perf_counter() - began_at)
                bench.poll()
            assert min(seconds) / len(keys) < LOOK_UP_SECONDS

    def test_a_closed_tier_refuses_calls(self, bench: TierBench) -> None:
        """Twice closed is closed; open copies end as failed."""
        bench.store(*block_keys(1))
        load = bench.begin_load(block_keys(1))
        bench.tier.close()
        bench.tier.close()
        assert load.has_ended
        assert refusal(bench.tier.look_up, []) is Reason.CLOSED
        assert refusal(bench.tier.complete_load, load) is Reason.CLOSED
        assert refusal(bench.begin_store, block_keys(2)) is Reason.CLOSED


class LowerTierSuite(TierSuite):
    """What every tier below host memory must do as well."""

    @abstractmethod
    def open_tier(self, region: Region, place: Path) -> LowerTier:
        """Open the tier at a place, empty or not."""

    @abstractmethod
    def damage(self, tier: LowerTier, place: Path, key: BlockKey) -> None:
        """Change a byte of a stored block without the tier's knowledge."""

    def open_bench(self, place: Path) -> LowerBench:
        """Open the tier with a slab of its own."""
        return LowerBench(lambda region: self.open_tier(region, place))

    def test_blocks_of_many_lengths(self, bench: LowerBench) -> None:
        """Lengths that no device or page divides, in one batch."""
        keys = block_keys(*range(9))
        sizes = [1, 7, 511, 512, 4096, 4097, 50_001, BLOCK_BYTES - 1, BLOCK_BYTES]
        lengths = dict(zip(keys, sizes, strict=True))
        assert bench.store(*keys, lengths=lengths).landed.all()
        assert bench.load(*keys[::-1], lengths=lengths).landed.all()

    def test_a_slot_of_another_length_gets_no_block(self, bench: LowerBench) -> None:
        """Nor a part of one; the bytes around the slot stay."""
        bench.store(*block_keys(1, 2))
        for length in (100, BLOCK_BYTES - 1):
            load = bench.load(*block_keys(1, 2), lengths={block_key(1): length})
            assert load.landed.tolist() == [False, True]
            assert load.failures == {Reason.BLOCK_SIZE_MISMATCH: 1}

    def test_a_load_writes_into_its_slots_only(self, bench: LowerBench) -> None:
        """Slots with gaps between them, in any order."""
        keys, length = block_keys(1, 2, 3), 5000
        bench.store(*keys, lengths=dict.fromkeys(keys, length))
        base = bench.memory.region.base_address
        ctypes.memset(base, 0x3C, 32 * BLOCK_BYTES)
        places = [9 * BLOCK_BYTES, 4 * BLOCK_BYTES, 20 * BLOCK_BYTES]
        load = bench.tier.prepare_load(keys, Slots.of([base + place for place in places], [length] * 3))
        assert bench.wait(load).landed.all()
        expected = bytearray(b"\x3c" * 32 * BLOCK_BYTES)
        for key, place in zip(keys, places, strict=True):
            expected[place : place + length] = content_of(key, length)
        assert ctypes.string_at(base, len(expected)) == expected
        bench.tier.complete_load(load)

    def test_a_damaged_block_has_not_landed(self, bench: LowerBench, tmp_path: Path) -> None:
        """A flipped byte is a miss with a reason, and the tier forgets the block."""
        keys = block_keys(1, 2, 3)
        bench.store(*keys)
        self.damage(bench.tier, tmp_path, keys[1])
        load = bench.load(*keys)
        assert load.landed.tolist() == [True, False, True]
        assert load.failures == {Reason.CHECKSUM_MISMATCH: 1}
        assert bench.held(keys) == [keys[0], keys[2]]
        assert bench.store(*keys).landed.all(), "a sound copy can be stored again"
        assert bench.load(*keys).landed.all()

    def test_each_copy_that_ended_is_polled_once(self, bench: LowerBench) -> None:
        """Also one that ended inside its prepare or in cancel."""
        bench.store(*block_keys(1))
        bench.tier.poll()
        copies = [bench.begin_store(block_keys(2)), bench.begin_load(block_keys(1)), bench.begin_load(block_keys(9))]
        bench.tier.cancel(copies[1])
        polled: list[TierCopy] = []
        deadline = time.monotonic() + FINISH_SECONDS
        while len(polled) < 3 and time.monotonic() < deadline:
            polled += bench.tier.poll()
        assert sorted(map(id, polled)) == sorted(map(id, copies))
        assert bench.tier.poll() == []
        for copy in copies:
            assert copy.has_ended
            bench.complete(copy)

    def test_wrong_slots_are_refused(self, bench: LowerBench) -> None:
        """Before a byte moves: outside the region, another number than keys, a key twice, 0 bytes."""
        region = bench.memory.region
        end = region.base_address + region.length
        outside = [(end - 8, 9), (end, 1), (region.base_address - 1, 8), (region.base_address, (1 << 64) - 1)]
        for prepare in (bench.tier.prepare_load, bench.tier.prepare_store):
            for address, length in outside:
                assert refusal(prepare, block_keys(1), Slots.of([address], [length])) is Reason.UNREGISTERED_RANGE
            one = Slots.of([region.base_address], [512])
            assert refusal(prepare, block_keys(1, 2), one) is Reason.INVALID_REQUEST
            assert refusal(prepare, [b"short"], one) is Reason.INVALID_REQUEST
            two = Slots.of([region.base_address] * 2, [512] * 2)
            assert refusal(prepare, block_keys(1, 1), two) is Reason.INVALID_REQUEST
            empty = Slots.of([region.base_address], [0])
            assert refusal(prepare, block_keys(1), empty) is Reason.INVALID_REQUEST

    def test_blocks_survive_a_close_on_disk(self, bench: LowerBench) -> None:
        """The blocks are there or not; no block has other bytes."""
        keys = block_keys(*range(12))
        bench.store(*keys)
        bench.reopen()
        survivors = keys if bench.tier.capabilities.name == "local_disk" else []
        assert bench.held(keys) == survivors
        assert bench.load(*keys).landed.all() == bool(survivors)
        assert bench.store(*block_keys(20)).landed.all()


def tier_machine(open_bench: Callable[[], TierBench]) -> type[RuleBasedStateMachine]:
    """Return a Hypothesis state machine that drives the tier of a bench against a dictionary.

    Wrong bytes never land, the capacity is never exceeded, a pinned block is never evicted, a block is visible exactly
    when the model says so, and at the end nothing is open. Run it with ``run_state_machine_as_test``.
    """
    numbers = st.integers(0, 40)

    class TierMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.bench = open_bench()
            self.visible: set[BlockKey] = set()
            self.stores: list[Store] = []
            self.loads: list[Load] = []
            self.cancelled: set[int] = set()
            # The blocks that the tier held when a copy began.
            self.were_held: dict[int, set[BlockKey]] = {}

        @rule(chosen=st.lists(numbers, unique=True, max_size=6))
        def begin_store(self, chosen: list[int]) -> None:
            store = self.bench.begin_store(block_keys(*chosen))
            evicted = set(store.evicted)
            assert evicted <= self.visible
            assert not any(evicted & self.were_held[id(load)] for load in self.loads), "a pinned block was evicted"
            self.visible -= evicted
            self.were_held[id(store)] = self.visible & set(store.keys)
            self.stores.append(store)

        @rule(chosen=st.lists(numbers, unique=True, max_size=6))
        def begin_load(self, chosen: list[int]) -> None:
            load = self.bench.begin_load(block_keys(*chosen))
            assert load.failures[Reason.BLOCK_MISSING] == len(set(block_keys(*chosen)) - self.visible)
            self.were_held[id(load)] = self.visible & set(load.keys)
            self.loads.append(load)

        @rule(data=st.data())
        @precondition(lambda self: self.stores or self.loads)
        def cancel(self, data: st.DataObject) -> None:
            copy = data.draw(st.sampled_from([*self.stores, *self.loads]))
            if not copy.has_ended:
                self.cancelled.add(id(copy))
            self.bench.tier.cancel(copy)

        @rule(data=st.data())
        @precondition(lambda self: self.stores)
        def complete_store(self, data: st.DataObject) -> None:
            store = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
            self.bench.wait(store)
            landed = set(compress(store.keys, store.landed))
            assert id(store) not in self.cancelled or not landed
            self.cancelled.discard(id(store))  # a later copy may have the same id
            self.bench.complete(store)
            # A block that was held has landed at once, and may have been evicted since.
            self.visible |= landed - self.were_held.pop(id(store))

        @rule(data=st.data())
        @precondition(lambda self: self.loads)
        def complete_load(self, data: st.DataObject) -> None:
            load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
            self.bench.wait(load)
            self.bench.check_content(load)
            not_landed = len(load.keys) - int(np.count_nonzero(load.landed))
            assert not_landed <= sum(load.failures.values())
            self.cancelled.discard(id(load))
            self.bench.complete(load)
            del self.were_held[id(load)]

        @invariant()
        def what_is_visible_is_what_was_stored(self) -> None:
            keys = block_keys(*range(41))
            found = self.bench.tier.look_up(keys).tolist()
            held = {key for key, presence in zip(keys, found, strict=True) if presence == Presence.HELD}
            assert held == self.visible

        @invariant()
        def counts_are_right(self) -> None:
            found = self.bench.tier.snapshot()
            assert found["num_bytes"] <= self.bench.tier.capabilities.capacity_bytes
            assert (found["num_loads"], found["num_stores"]) == (len(self.loads), len(self.stores))

        def teardown(self) -> None:
            for copy in (*self.stores, *self.loads):
                self.bench.tier.cancel(copy)
                self.bench.complete(self.bench.wait(copy))
            found = self.bench.tier.snapshot()
            assert [found[name] for name in ("num_pinned", "num_loads", "num_stores")] == [0, 0, 0]
            self.bench.close()

    return TierMachine
