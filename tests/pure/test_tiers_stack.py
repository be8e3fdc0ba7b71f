"""The stack: verified before promised, one promotion for many requests, and a failing tier is a miss."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvferry.errors import Reason, TierError
from kvferry.tiers.host_memory import HostMemory, HostStore
from kvferry.tiers.lower_copies import MAX_RAISED, CopySettings
from kvferry.tiers.protocol import BlockKey, Presence
from kvferry.tiers.slab_memory import SlabMemory
from kvferry.tiers.stack import Promise, Stack

from ..counted_work import lines_of
from ..support.dictionary_tier import DictionaryTier
from ..support.offload_state import is_idle, stack_state
from ..support.tier_suite import (
    BLOCK_BYTES,
    block_key,
    block_keys,
    content_of,
    refusal,
    slab_of_blocks,
)

WAIT = 5.0
SETTINGS = CopySettings(chunk_bytes=2 * BLOCK_BYTES, copies_per_tier=2, hang_seconds=10.0, suspend_seconds=20.0)


class Engine:
    """An engine's use of a stack with a disk and a pool, each a dictionary; ``now`` moves with ``step``."""

    def __init__(self, num_blocks: int = 8, lower_blocks: int = 1000) -> None:
        self.memory = SlabMemory(num_blocks * BLOCK_BYTES)
        region = self.memory.region
        self.host = HostMemory(slab_of_blocks(num_blocks, region.base_address))
        self.disk = DictionaryTier(region, lower_blocks * BLOCK_BYTES, blocks_per_poll=2, name="disk")
        self.pool = DictionaryTier(region, lower_blocks * BLOCK_BYTES, blocks_per_poll=2, name="pool")
        self.stack = Stack(self.host, [self.disk, self.pool], SETTINGS, lease_seconds=60.0)
        self.now = 0.0

    def begin_store(self, *numbers: int, num_parts: int = 1) -> HostStore:
        store = self.stack.prepare_store("full", block_keys(*numbers), num_parts)
        for key, address in zip(store.keys, store.slots.addresses.tolist(), strict=True):
            ctypes.memmove(address, content_of(key), BLOCK_BYTES)
        return store

    def store(self, *numbers: int) -> None:
        store = self.begin_store(*numbers)
        if store.keys:
            self.stack.land(store, 0)

    def step(self, seconds: float = 0.01) -> None:
        self.now += seconds
        self.stack.poll(self.now)

    def state(self) -> dict[str, Any]:
        return stack_state(self.stack, self.now)

    def settle(self) -> None:
        """Step until all is written and promoted."""
        for _ in range(500):
            if self.is_still:
                return
            self.step()
        raise AssertionError(self.state())

    @property
    def is_still(self) -> bool:
        lower = self.state()["lower"].values()
        return not any(
            one["queued_chunks"] or one["blocks_to_write"] or one["promotions"] or one["writes"] for one in lower
        )

    def only_below(self, *numbers: int) -> None:
        """Store blocks, write them through, and drive them out of host memory."""
        self.store(*numbers)
        self.settle()
        others = iter(range(10_000 + 1000 * numbers[0], 20_000 + 1000 * numbers[0]))
        while Presence.HELD in self.host.look_up(block_keys(*numbers)):
            self.store(next(others))
            self.settle()

    def ask(self, name: str, *numbers: int, wait_seconds: float = WAIT) -> Promise | None:
        return self.stack.ask(name, {"full": block_keys(*numbers)}, self.now, wait_seconds)

    def answer(self, name: str, *numbers: int, wait_seconds: float = WAIT) -> list[int]:
        """Ask until there is a promise; return the promised numbers."""
        for _ in range(5000):
            promise = self.ask(name, *numbers, wait_seconds=wait_seconds)
            if promise is not None:
                return [number for number, held in zip(numbers, promise.held["full"].tolist(), strict=True) if held]
            self.step()
        raise AssertionError(self.state())

    def load(self, name: str, *numbers: int) -> None:
        """Load promised blocks and compare their bytes."""
        load = self.stack.begin_load(name, {"full": block_keys(*numbers)})["full"]
        self.check(load.keys, load.slots.addresses.tolist())
        self.stack.complete_load(name)

    def check(self, keys: Sequence[BlockKey], addresses: Sequence[int]) -> None:
        for key, address in zip(keys, addresses, strict=True):
            assert ctypes.string_at(address, BLOCK_BYTES) == content_of(key), "wrong bytes"

    def check_nothing_is_left(self) -> None:
        for tier in (self.host, self.disk, self.pool):
            found = tier.snapshot()
            assert [found[name] for name in ("num_pinned", "num_loads", "num_stores")] == [0, 0, 0]
        assert self.state()["blocks_in_chunks"] == 0
        assert is_idle(self.stack)

    def failures(self, tier: str) -> dict[str, int]:
        failures: dict[str, int] = self.state()["lower"][tier]["failures"]
        return failures

    def close(self) -> None:
        self.stack.close()
        self.memory.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_what_is_in_host_memory_is_promised_at_once(engine: Engine) -> None:
    engine.store(1, 2)
    promise = engine.ask("a", 1, 2, 3)
    assert promise is not None
    assert promise.held["full"].tolist() == [True, True, False]
    assert engine.host.snapshot()["num_pinned"] == 2
    engine.load("a", 1, 2)
    engine.settle()
    engine.check_nothing_is_left()


def test_blocks_are_written_through_and_promoted(engine: Engine) -> None:
    engine.only_below(1, 2, 3)
    assert engine.ask("a", 1, 2, 3) is None
    assert engine.answer("a", 1, 2, 3) == [1, 2, 3]
    engine.load("a", 1, 2, 3)
    assert engine.host.look_up(block_keys(1, 2, 3)).tolist() == [Presence.HELD] * 3
    engine.settle()
    engine.check_nothing_is_left()
    lower = engine.state()["lower"]
    assert (lower["disk"]["blocks_up"], lower["pool"]["blocks_up"]) == (3, 0), "the first tier that holds them"
    assert lower["disk"]["bytes_up"] == 3 * BLOCK_BYTES
    assert lower["disk"]["blocks_down"] == lower["pool"]["blocks_down"]


def test_every_promised_block_is_pinned_until_it_is_loaded(engine: Engine) -> None:
    engine.only_below(1, 2, 3)
    assert engine.answer("a", 1, 2, 3) == [1, 2, 3]
    for number in range(500, 530):
        engine.store(number)
        engine.settle()
    load = engine.stack.begin_load("a", {"full": block_keys(1, 2)})["full"]
    for number in range(600, 630):
        engine.store(number)
        engine.settle()
    engine.check(load.keys, load.slots.addresses.tolist())
    assert engine.host.look_up(block_keys(1, 2)).tolist() == [Presence.HELD] * 2
    assert engine.host.look_up(block_keys(3)).tolist() == [Presence.ABSENT], "it was not chosen, so its pin ended"
    engine.stack.complete_load("a")
    engine.settle()
    engine.check_nothing_is_left()


def test_requests_that_share_a_prefix_share_one_promotion(engine: Engine) -> None:
    """Not in line: all are answered in the same step."""
    engine.only_below(1, 2, 3)
    names = [f"r{number}" for number in range(16)]
    assert {engine.ask(name, 1, 2, 3) for name in names} == {None}
    answered_at: dict[str, float] = {}
    while len(answered_at) < 16:
        engine.step()
        for name in names:
            if engine.ask(name, 1, 2, 3) is not None:
                answered_at.setdefault(name, engine.now)
    assert len(set(answered_at.values())) == 1
    assert engine.state()["lower"]["disk"]["blocks_up"] == 3
    for name in names:
        engine.load(name, 1, 2, 3)
    engine.settle()
    engine.check_nothing_is_left()


def test_requests_take_turns_at_a_tier() -> None:
    """A short request does not wait for a long one that asked first."""
    engine = Engine(num_blocks=64)
    engine.only_below(*range(1, 33))
    engine.only_below(100, 101)
    engine.ask("long", *range(1, 33))
    engine.ask("short", 100, 101)
    answered: list[str] = []
    while len(answered) < 2:
        engine.step()
        for name, numbers in (("long", range(1, 33)), ("short", range(100, 102))):
            if name not in answered and engine.ask(name, *numbers) is not None:
                answered.append(name)
                if name == "short":
                    assert engine.state()["lower"]["disk"]["queued_chunks"] > 8
    assert answered == ["short", "long"]
    engine.close()


def test_no_request_is_starved() -> None:
    """Two long requests advance side by side."""
    engine = Engine(num_blocks=64)
    engine.only_below(*range(1, 17))
    engine.only_below(*range(101, 117))
    engine.ask("first", *range(1, 17))
    engine.ask("second", *range(101, 117))
    for _ in range(12):
        engine.step()
        pinned = [one["pinned"] for one in engine.state()["requests"].values()]
        assert abs(pinned[0] - pinned[1]) <= SETTINGS.copies_per_tier
    assert min(pinned) > 0
    engine.close()


def test_at_the_deadline_what_is_there_is_promised(engine: Engine) -> None:
    engine.only_below(1, 2, 3, 4)
    engine.store(9)
    engine.settle()
    assert engine.ask("a", 9, 1, 2, 3, 4) is None
    engine.step()
    engine.disk.faults.hangs = True
    engine.pool.faults.is_silent = True
    began_at = engine.now
    promised = engine.answer("a", 9, 1, 2, 3, 4)
    assert WAIT - 0.1 < engine.now - began_at < WAIT + 0.1
    assert 9 in promised
    assert promised != [9, 1, 2, 3, 4]
    engine.load("a", *promised)
    engine.disk.faults.hangs = False
    engine.settle()
    engine.check_nothing_is_left()


def test_without_time_to_wait_nothing_is_promoted(engine: Engine) -> None:
    engine.only_below(1)
    assert engine.answer("a", 1, wait_seconds=0.0) == []
    engine.step()
    assert engine.state()["lower"]["disk"]["blocks_up"] == 0
    engine.stack.drop("a")
    engine.check_nothing_is_left()


def test_a_tier_that_hangs_costs_one_wait_and_not_one_for_every_request(engine: Engine) -> None:
    engine.only_below(1, 2)
    engine.pool.faults.is_silent = True
    engine.disk.faults.hangs = True
    assert engine.answer("a", 1, 2) == []
    engine.stack.drop("a")
    engine.step(SETTINGS.hang_seconds)
    assert engine.failures("disk") == {"deadline-exceeded": 2}
    engine.pool.faults.is_silent = False
    engine.pool.blocks.clear()
    for name in ("b", "c"):
        began_at = engine.now
        assert engine.answer(name, 1, 2) == []
        assert engine.now == began_at, "nobody waits for a copy that was given up"
        engine.stack.drop(name)
    found = engine.state()
    assert found["lower"]["disk"]["stuck_blocks"] == 2
    assert found["host_memory"]["num_stores"] == 1, "its slots stay in use: bytes may still land in them"
    engine.disk.faults.hangs = False
    engine.step()
    engine.check_nothing_is_left()
    assert engine.state()["lower"]["disk"]["stuck_blocks"] == 0
    engine.step(SETTINGS.suspend_seconds)
    assert engine.answer("d", 1, 2) == [1, 2], "the tier is asked again"
    engine.load("d", 1, 2)


def test_blocks_that_a_hanging_tier_writes_stay_pinned(engine: Engine) -> None:
    engine.disk.faults.hangs = True
    engine.store(1, 2)
    engine.step()
    engine.step(SETTINGS.hang_seconds + 1)
    for number in range(100, 130):
        engine.store(number)
        engine.step()
    assert engine.host.look_up(block_keys(1, 2)).tolist() == [Presence.HELD] * 2
    engine.disk.faults.hangs = False
    engine.step(SETTINGS.suspend_seconds)
    engine.settle()
    engine.check_nothing_is_left()


@pytest.mark.parametrize("fault", ["fails", "raises"])
def test_a_failing_tier_is_a_miss_and_the_next_tier_is_asked(engine: Engine, fault: str) -> None:
    engine.only_below(1, 2)
    setattr(engine.disk.faults, fault, True)
    began_at = engine.now
    assert engine.answer("a", 1, 2) == [1, 2]
    assert engine.now - began_at < 0.2
    assert engine.failures("disk") == {"tier-failed": 2}
    assert engine.state()["lower"]["pool"]["blocks_up"] == 2
    engine.load("a", 1, 2)
    assert engine.state()["lower"]["disk"]["is_suspended"]
    setattr(engine.disk.faults, fault, False)
    engine.step(SETTINGS.suspend_seconds)
    engine.settle()
    engine.check_nothing_is_left()


def test_chunks_that_wait_for_a_tier_that_fails_are_answered_at_once(engine: Engine) -> None:
    """Not only those whose copies had begun."""
    engine.only_below(*range(1, 8))
    engine.pool.blocks.clear()
    engine.disk.faults.fails = True
    began_at = engine.now
    assert engine.answer("a", *range(1, 8)) == []
    assert engine.now - began_at < 0.2
    engine.stack.drop("a")
    engine.check_nothing_is_left()


def test_a_damaged_block_is_a_miss_of_that_block(engine: Engine) -> None:
    engine.only_below(1, 2, 3)
    damage(engine.disk, 2)
    damage(engine.pool, 2)
    assert engine.answer("a", 1, 2, 3) == [1, 3]
    for tier in ("disk", "pool"):
        assert engine.failures(tier) == {"checksum-mismatch": 1}
        assert not engine.state()["lower"][tier]["is_suspended"]
    engine.load("a", 1, 3)
    engine.settle()
    engine.check_nothing_is_left()


def test_what_a_slower_tier_brings_is_written_to_the_quicker_ones(engine: Engine) -> None:
    """As after a restart, when the disk has what the pool has lost; and no tier gets what it has brought itself."""
    engine.only_below(1, 2, 3)
    del engine.disk.blocks[block_key(1)], engine.disk.blocks[block_key(3)]
    damage(engine.pool, 3)
    written = engine.state()["lower"]["pool"]["blocks_down"]
    assert engine.answer("a", 1, 2, 3) == [1, 2]
    engine.load("a", 1, 2)
    engine.settle()
    assert block_key(1) in engine.disk.blocks, "the first tier is the quicker one"
    assert block_key(3) not in engine.disk.blocks, "it was damaged"
    assert engine.state()["lower"]["pool"]["blocks_down"] == written
    engine.check_nothing_is_left()


def damage(tier: DictionaryTier, number: int) -> None:
    content, expected = tier.blocks[block_key(number)]
    tier.blocks[block_key(number)] = (content[:9] + bytes([content[9] ^ 4]) + content[10:], expected)


def test_a_block_that_is_being_stored_is_waited_for(engine: Engine) -> None:
    store = engine.begin_store(1, 2, num_parts=2)
    assert engine.ask("a", 1, 2) is None
    engine.stack.land(store, 1)
    engine.step()
    assert engine.ask("a", 1, 2) is None
    engine.stack.land(store, 0)
    assert engine.answer("a", 1, 2) == [1, 2]
    lost = engine.begin_store(3)
    assert engine.ask("b", 3) is None
    engine.stack.cancel(lost)
    engine.stack.land(lost, 0)
    assert engine.answer("b", 3) == []


def test_a_request_that_is_dropped_leaves_nothing(engine: Engine) -> None:
    """Wherever it is: before the promotion has begun, in the middle, promised; twice, and unknown."""
    engine.only_below(1, 2, 3, 4, 5, 6)
    for num_steps in range(8):
        engine.ask("a", 1, 2, 3, 4, 5, 6)
        for _ in range(num_steps):
            engine.step()
        engine.stack.drop("a")
        engine.stack.drop("a")
        engine.settle()
        engine.check_nothing_is_left()
        engine.only_below(1, 2, 3, 4, 5, 6)


def test_an_answer_that_nobody_fetches_ends_with_its_lease(engine: Engine) -> None:
    engine.store(1)
    engine.settle()
    assert engine.answer("a", 1) == [1]
    engine.step(59.0)
    assert engine.answer("a", 1) == [1], "each question extends the lease"
    engine.step(59.0)
    assert engine.host.snapshot()["num_pinned"] == 1
    engine.step(2.0)
    engine.check_nothing_is_left()
    assert engine.state()["counts"]["leases_ended"] == 1


def test_a_request_that_loads_has_no_lease_and_cannot_be_dropped(engine: Engine) -> None:
    """Ranks may still read its slots, also when the request was aborted."""
    engine.store(1)
    engine.settle()
    engine.answer("a", 1)
    engine.stack.begin_load("a", {"full": block_keys(1)})
    engine.stack.drop("a")
    engine.step(1000.0)
    assert engine.host.snapshot()["num_pinned"] == 1
    assert "leases_ended" not in engine.state()["counts"]
    assert engine.answer("a", 1) == [], "while it loads, the same request is promised nothing"
    engine.stack.complete_load("a")
    engine.stack.complete_load("a")
    engine.check_nothing_is_left()


def test_only_what_was_promised_can_be_loaded(engine: Engine) -> None:
    engine.store(1, 2)
    engine.settle()
    assert refusal(engine.stack.begin_load, "a", {"full": block_keys(1)}) is Reason.INVALID_REQUEST
    engine.answer("a", 1, 3)
    assert refusal(engine.stack.begin_load, "a", {"full": block_keys(1, 2)}) is Reason.INVALID_REQUEST
    engine.load("a", 1)
    assert refusal(engine.stack.begin_load, "a", {"full": block_keys(1)}) is Reason.INVALID_REQUEST
    engine.check_nothing_is_left()


def test_a_block_is_loaded_once_and_in_its_own_group() -> None:
    """The slots of another group have other numbers: the wrong bytes would reach the engine."""
    engine = Engine()
    engine.store(1, 2)
    engine.settle()
    engine.answer("a", 1, 2)
    for chosen in ({"other": block_keys(1)}, {"full": block_keys(1, 1)}):
        assert refusal(engine.stack.begin_load, "a", chosen) is Reason.INVALID_REQUEST
    engine.load("a", 1, 2)
    engine.check_nothing_is_left()
    engine.close()


def test_writes_of_a_slow_tier_leave_most_of_host_memory_free(engine: Engine) -> None:
    engine.disk.faults.hangs = engine.pool.faults.hangs = True
    engine.store(*range(1, 9))
    engine.step()
    assert engine.host.snapshot()["num_pinned"] == 2, "a quarter, the same blocks for both"
    engine.store(*range(11, 17))
    assert engine.host.look_up(block_keys(*range(11, 17))).tolist() == [Presence.HELD] * 6
    engine.disk.faults.hangs = engine.pool.faults.hangs = False
    engine.settle()
    engine.check_nothing_is_left()


def test_a_tier_whose_verbs_all_raise_leaves_no_pin_and_raises_nothing(engine: Engine) -> None:
    engine.only_below(1, 2)
    assert engine.ask("a", 1, 2) is None
    engine.store(3, 4)
    engine.step(0.0)
    for tier in (engine.disk, engine.pool):
        tier.close()
    engine.step()
    engine.step(SETTINGS.hang_seconds + 1)
    assert engine.answer("a", 1, 2) == []
    assert engine.state()["lower"]["disk"]["is_suspended"]
    engine.stack.drop("a")


@pytest.mark.parametrize("verb", ["complete_load", "complete_store"])
def test_a_tier_that_cannot_complete_a_copy_leaves_no_pin_in_host_memory(
    engine: Engine, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.only_below(1, 2)

    def fail(copy: object) -> None:
        raise TierError(Reason.TIER_FAILED, "the tier raises on purpose.")

    for tier in (engine.disk, engine.pool):
        monkeypatch.setattr(tier, verb, fail)
    engine.ask("a", 1, 2)
    engine.store(3, 4)
    for _ in range(20):
        engine.step()
    engine.stack.drop("a")
    found = engine.host.snapshot()
    assert [found[name] for name in ("num_pinned", "num_loads", "num_stores")] == [0, 0, 0]


def test_a_tier_that_begins_no_load_makes_nothing_visible(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots hold other bytes: the tier said that it holds the blocks, and then moved none."""
    engine.only_below(1, 2)

    def fail(*arguments: object) -> None:
        raise TierError(Reason.TIER_FAILED, "the tier raises on purpose.")

    for tier in (engine.disk, engine.pool):
        monkeypatch.setattr(tier, "prepare_load", fail)
    assert engine.answer("a", 1, 2) == []
    assert engine.host.look_up(block_keys(1, 2)).tolist() == [Presence.ABSENT] * 2
    engine.stack.drop("a")
    engine.settle()
    engine.check_nothing_is_left()


def test_a_prefetch_takes_no_step_for_each_block_that_is_on_its_way() -> None:
    engine = Engine(num_blocks=400)
    engine.disk.faults.hangs = True
    engine.disk.blocks.update(dict.fromkeys(block_keys(*range(100)), (b"", 0)))
    engine.ask("a", *range(90))
    assert lines_of(lambda: engine.stack.prefetch("full", block_keys(95), engine.now)) < 160
    engine.close()


def test_an_unknown_group_is_refused(engine: Engine) -> None:
    assert refusal(engine.stack.ask, "a", {"other": block_keys(1)}, 0.0, 1.0) is Reason.INVALID_REQUEST
    assert refusal(engine.stack.prefetch, "other", block_keys(1), 0.0) is Reason.INVALID_REQUEST
    engine.check_nothing_is_left()


def test_a_request_that_wants_other_blocks_begins_anew(engine: Engine) -> None:
    engine.store(1, 2)
    engine.settle()
    assert engine.answer("a", 1) == [1]
    assert engine.answer("a", 2) == [2]
    assert engine.host.snapshot()["num_pinned"] == 1
    engine.stack.drop("a")
    engine.check_nothing_is_left()


def test_a_prefetch_brings_blocks_before_the_request_asks() -> None:
    engine = Engine(num_blocks=32)
    engine.only_below(*range(1, 13))
    engine.stack.prefetch("full", block_keys(1, 1, *range(1, 13)), engine.now)
    engine.stack.prefetch("full", block_keys(*range(1, 13)), engine.now)
    engine.settle()
    assert engine.state()["lower"]["disk"]["blocks_up"] == 8, "a quarter of host memory"
    engine.check_nothing_is_left()
    promise = engine.ask("a", *range(1, 9))
    assert promise is not None
    assert promise.held["full"].all()
    engine.stack.drop("a")
    engine.stack.prefetch("full", block_keys(*range(9, 13)), engine.now)
    engine.settle()
    assert engine.state()["lower"]["disk"]["blocks_up"] == 12, "what has come takes no share"
    engine.close()


def test_a_request_that_asks_for_a_prefetched_block_moves_it_ahead() -> None:
    engine = Engine(num_blocks=64)
    engine.only_below(*range(1, 17))
    engine.stack.prefetch("full", block_keys(*range(1, 17)), engine.now)
    engine.ask("a", 15, 16)
    engine.step()
    engine.step()
    promise = engine.ask("a", 15, 16)
    assert promise is not None
    assert promise.held["full"].all()
    assert engine.state()["lower"]["disk"]["queued_chunks"] > 4
    engine.settle()
    assert engine.state()["lower"]["disk"]["blocks_up"] == 16
    engine.stack.drop("a")
    engine.check_nothing_is_left()
    engine.close()


def test_a_request_larger_than_host_memory_gets_its_first_blocks(engine: Engine) -> None:
    engine.only_below(*range(1, 9))
    engine.only_below(*range(21, 29))
    assert engine.answer("a", *range(1, 9), *range(21, 29)) == list(range(1, 9))
    assert engine.state()["lower"]["disk"]["refused_above"] == {"tier-full": 8}
    assert engine.stack.totals["refused_blocks", "host_memory", "tier-full"] == 2 * 8, "for the pool too"
    assert not engine.failures("disk")
    engine.load("a", *range(1, 9))
    engine.settle()
    engine.check_nothing_is_left()


def test_a_tier_without_room_says_so_once_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(lower_blocks=0)
    for number in range(3):
        engine.store(number)
        engine.settle()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition(" is full: 1 of 1 blocks")[0] for text in told] == ["disk", "pool"]
    assert "it uses 0 B of its 0 B" in told[0]
    assert f"no room for {BLOCK_BYTES} bytes" in told[0]
    assert engine.failures("disk")["tier-full"] == 3
    assert engine.stack.totals["refused_blocks", "disk", "tier-full"] == 3
    assert ("failures", "disk", "tier-full") not in engine.stack.totals
    engine.close()


def test_blocks_that_wait_to_be_written_are_bounded(engine: Engine) -> None:
    engine.disk.faults.raises = True
    for number in range(200):
        engine.store(number)
        engine.step()
    assert engine.state()["lower"]["disk"]["blocks_to_write"] <= 16


def test_a_silent_tier_is_waited_for_until_the_deadline(engine: Engine) -> None:
    engine.only_below(1)
    engine.disk.blocks.clear()
    engine.pool.faults.is_silent = True
    assert engine.ask("a", 1) is None
    engine.pool.faults.is_silent = False
    assert engine.answer("a", 1) == [1]
    engine.stack.drop("a")
    engine.pool.faults.is_silent = True
    assert engine.answer("b", 77) == []


class StackMachine(RuleBasedStateMachine):
    """An engine with a host memory of 6 blocks, a disk of 12 and a pool of 12, all of which fail at times."""

    numbers = st.integers(0, 20)

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(num_blocks=6, lower_blocks=12)
        self.stores: list[HostStore] = []
        self.stored: set[int] = set()
        self.promised: dict[str, list[int]] = {}
        self.loading: dict[str, tuple[Sequence[BlockKey], list[int]]] = {}

    @rule(chosen=st.lists(numbers, unique=True, min_size=1, max_size=4), num_parts=st.integers(1, 2))
    def begin_store(self, chosen: list[int], num_parts: int) -> None:
        store = self.engine.begin_store(*chosen, num_parts=num_parts)
        if store.keys:
            self.stores.append(store)

    @rule(data=st.data(), is_whole=st.booleans())
    @precondition(lambda self: self.stores)
    def land(self, data: st.DataObject, is_whole: bool) -> None:
        store = data.draw(st.sampled_from(self.stores))
        part = data.draw(st.sampled_from([one for one in range(store.num_parts) if one not in store.reported]))
        landed = None if is_whole else np.arange(len(store.keys)) % 2 == 0
        self.engine.stack.land(store, part, landed)
        if store.has_ended:
            self.stores.remove(store)
            self.stored.update(
                int.from_bytes(key, "big") for key, one in zip(store.keys, store.landed, strict=True) if one
            )

    @rule(data=st.data())
    @precondition(lambda self: self.stores)
    def cancel_store(self, data: st.DataObject) -> None:
        self.engine.stack.cancel(data.draw(st.sampled_from(self.stores)))

    @rule(name=st.sampled_from("abc"), first=numbers, count=st.integers(1, 5))
    def ask(self, name: str, first: int, count: int) -> None:
        wanted = [*range(first, first + count)]
        promise = self.engine.ask(name, *wanted)
        if promise is None:
            self.promised.pop(name, None)
            return
        held = [number for number, one in zip(wanted, promise.held["full"].tolist(), strict=True) if one]
        assert not (held and name in self.loading)
        assert set(held) <= self.stored, "a promise of a block that nobody stored"
        slots = self.engine.host.prepare_load(block_keys(*held))
        assert len(slots.keys) == len(held), "promised, and not in host memory"
        self.engine.check(slots.keys, slots.slots.addresses.tolist())
        self.engine.host.complete_load(slots)
        if name not in self.loading:
            self.promised[name] = held

    @rule(name=st.sampled_from("abc"), data=st.data())
    def begin_load(self, name: str, data: st.DataObject) -> None:
        if name in self.promised:
            held = self.promised.pop(name)
            chosen = held[: data.draw(st.integers(0, len(held)))]
            load = self.engine.stack.begin_load(name, {"full": block_keys(*chosen)})["full"]
            assert load.keys == block_keys(*chosen)
            self.loading[name] = (load.keys, load.slots.addresses.tolist())

    @rule(name=st.sampled_from("abc"))
    def complete_load(self, name: str) -> None:
        if name in self.loading:
            self.engine.check(*self.loading.pop(name))
        self.engine.stack.complete_load(name)

    @rule(name=st.sampled_from("abc"))
    def drop(self, name: str) -> None:
        self.engine.stack.drop(name)
        self.promised.pop(name, None)

    @rule(first=numbers, count=st.integers(1, 6))
    def prefetch(self, first: int, count: int) -> None:
        self.engine.stack.prefetch("full", block_keys(*range(first, first + count)), self.engine.now)

    @rule(seconds=st.sampled_from([0.01, 0.01, 0.01, 1.0, 11.0]))
    def step(self, seconds: float) -> None:
        self.engine.step(seconds)

    @rule(seconds=st.sampled_from([6.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.engine.step(seconds)
        if seconds > 60:
            self.promised.clear()

    @rule(is_disk=st.booleans(), fault=st.sampled_from(["hangs", "fails", "raises", "is_silent"]), value=st.booleans())
    def set_fault(self, is_disk: bool, fault: str, value: bool) -> None:
        setattr((self.engine.disk if is_disk else self.engine.pool).faults, fault, value)

    @rule(is_disk=st.booleans(), data=st.data())
    def damage(self, is_disk: bool, data: st.DataObject) -> None:
        tier = self.engine.disk if is_disk else self.engine.pool
        if tier.blocks:
            damage(tier, int.from_bytes(data.draw(st.sampled_from(sorted(tier.blocks))), "big"))

    @invariant()
    def capacities_hold(self) -> None:
        for tier in (self.engine.host, self.engine.disk, self.engine.pool):
            assert tier.snapshot()["num_bytes"] <= tier.capabilities.capacity_bytes

    @invariant()
    def what_is_loaded_is_never_overwritten(self) -> None:
        for keys, addresses in self.loading.values():
            self.engine.check(keys, addresses)

    @invariant()
    def what_is_visible_has_the_right_bytes(self) -> None:
        load = self.engine.host.prepare_load(block_keys(*range(26)), counts_as_use=False)
        self.engine.check(load.keys, load.slots.addresses.tolist())
        self.engine.host.complete_load(load)

    def teardown(self) -> None:
        for tier in (self.engine.disk, self.engine.pool):
            for fault in ("hangs", "fails", "raises", "is_silent"):
                setattr(tier.faults, fault, False)
        for name in "abc":
            self.engine.stack.complete_load(name)
            self.engine.stack.drop(name)
        for store in self.stores:
            self.engine.stack.cancel(store)
            for part in set(range(store.num_parts)) - store.reported:
                self.engine.stack.land(store, part)
        self.engine.step()
        self.engine.step(SETTINGS.suspend_seconds + 1.0)  # gives up what has hung, and suspends its tier
        self.engine.step(SETTINGS.suspend_seconds * 2**MAX_RAISED)  # longer than any suspension
        self.engine.settle()
        self.engine.check_nothing_is_left()
        self.engine.close()


def test_no_sequence_of_requests_and_faults_breaks_the_stack() -> None:
    run_state_machine_as_test(StackMachine, settings=settings(max_examples=60, stateful_step_count=50, deadline=None))


# What decides between loading and computing is told where blocks lie.


def test_blocks_are_located_in_the_first_tier_that_holds_them(engine: Engine) -> None:
    engine.only_below(1, 2)
    engine.store(3)
    engine.settle()
    assert engine.stack.locate(block_keys(3, 1, 2, 99), engine.now).tolist() == [0, 1, 1, 3]
    engine.disk.faults.raises = True
    assert engine.stack.locate(block_keys(3, 1), engine.now).tolist() == [0, 2]


def test_blocks_on_their_way_are_located_at_their_origin(engine: Engine) -> None:
    engine.only_below(1, 2, 3)
    engine.ask("a", 1, 2, 3)
    engine.step()
    assert engine.stack.locate(block_keys(1, 2, 3), engine.now).tolist() == [1, 1, 1]
    engine.begin_store(50)
    assert engine.stack.locate(block_keys(50), engine.now).tolist() == [0]


def test_a_promise_says_which_tier_brought_a_block(engine: Engine) -> None:
    engine.only_below(1, 2)
    engine.store(3)
    assert engine.answer("a", 3, 1, 2, 99) == [3, 1, 2]
    promise = engine.ask("a", 3, 1, 2, 99)
    assert promise is not None
    assert promise.brought_by == dict.fromkeys(block_keys(1, 2), "disk")
    later = engine.ask("b", 3, 1, 2)
    assert later is not None
    assert later.brought_by == {}


def test_promotions_are_timed(engine: Engine) -> None:
    engine.only_below(*range(1, 7))
    times = engine.stack.promotion_times["disk"]
    engine.ask("a", *range(1, 7))
    assert times.num_samples == 0
    engine.settle()
    assert times.num_samples == 1
