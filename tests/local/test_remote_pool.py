"""The pool tier with several engines on one pool, and with masters and engines that fail."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.errors import Reason, TierError
from kvferry.layout.shard import Region
from kvferry.tiers.host_memory import Change, Emptied, HostMemory
from kvferry.tiers.pool import store as pool_store
from kvferry.tiers.pool.index import TRAILER_BYTES, allocated_bytes
from kvferry.tiers.pool.store import PoolStore, object_names
from kvferry.tiers.protocol import BlockKey, Load, LowerTier, Presence, Slots, TierCopy
from kvferry.tiers.remote_pool import SILENT_SECONDS, USABLE_SHARE, RemotePool, check_pool
from kvferry.tiers.slab_memory import SlabMemory
from kvferry.tiers.stack import Stack

from ..support.offload_state import is_idle
from ..support.tier_suite import BLOCK_BYTES, LowerBench, block_keys, content_of, slab_of_blocks
from ..waits import wait_until
from .pool_master import SHARE_BYTES, Master, open_pool, skip_without_mooncake

pytestmark = pytest.mark.mooncake
CALL_SECONDS = 15.0
"""Limit of the time in which a copy ends, whatever the master does; a few seconds where nothing else computes."""
BLOCKS_THAT_FIT = int(USABLE_SHARE * SHARE_BYTES) // allocated_bytes(BLOCK_BYTES)


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for the master and the mark five times as often as engines do."""
    for name in ("LOOK_SECONDS", "FIRST_RETRY_SECONDS", "LONGEST_RETRY_SECONDS"):
        monkeypatch.setattr(pool_store, name, getattr(pool_store, name) / 5)


@pytest.fixture(scope="module")
def shared_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    skip_without_mooncake()
    master = Master(tmp_path_factory.mktemp("master"))
    yield master
    master.kill()


@pytest.fixture
def own_master(tmp_path: Path) -> Iterator[Master]:
    """A master that the test may kill."""
    skip_without_mooncake()
    master = Master(tmp_path)
    yield master
    master.kill()


class Engine(LowerBench):
    """A client of the pool with a slab; it leaves the pool at the end of a ``with``."""

    tier: RemotePool

    def __init__(self, master: Master, share_bytes: int = SHARE_BYTES) -> None:
        def open_tier(region: Region) -> LowerTier:
            return open_pool(master, region, share_bytes)

        super().__init__(open_tier)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        found = self.tier.snapshot()
        self.close()
        assert [found[name] for name in ("num_pinned", "num_loads", "num_stores")] == [0, 0, 0]

    def end(self, copy: TierCopy) -> float:
        """Wait for a copy and complete it; return the seconds."""
        began_at = time.monotonic()
        self.wait(copy)
        seconds = time.monotonic() - began_at
        if isinstance(copy, Load):
            self.check_content(copy)
        self.complete(copy)
        return seconds

    def address_of(self, key: BlockKey) -> int:
        """Return where the pool has a block, in the memory of its engine: of this process."""
        (replica,) = self.tier._store._store.get_replica_desc(object_names([key])[0])
        return int(replica.get_memory_descriptor().buffer_descriptor.buffer_address)

    def is_reachable(self) -> bool:
        """Poll, and return whether the tier has its master."""
        self.poll()
        return bool(self.tier.snapshot()["is_reachable"])

    def finds(self, keys: list[BlockKey]) -> bool:
        """Poll, and return whether the tier holds all these blocks."""
        self.poll()
        return self.held(keys) == keys

    def has_lost_its_blocks(self) -> bool:
        """Poll, and return whether the tier has found a second, empty pool."""
        self.poll()
        return bool(self.tier.snapshot()["num_emptied"] == 2)


@pytest.fixture(scope="module")
def shared_engines(shared_master: Master) -> Iterator[tuple[Engine, Engine]]:
    """An engine takes three seconds to leave a pool."""
    with Engine(shared_master) as first, Engine(shared_master) as second:
        yield first, second


@pytest.fixture
def engines(shared_engines: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """Two engines on one pool, which is empty."""
    for engine in shared_engines:
        engine.tier._remove(engine.tier._index.clear())
        wait_until(lambda: engine.poll() or not engine.tier.snapshot()["num_waiting"], "the pool is empty")  # noqa: B023
        engine.poll()
    return shared_engines


def test_an_engine_loads_what_another_stored(engines: tuple[Engine, Engine]) -> None:
    first, second = engines
    keys = block_keys(*range(200))
    assert second.held(keys) == []
    assert first.store(*keys[:150]).landed.all()
    wait_until(lambda: second.finds(keys[:150]), "an answer is not believed for ever")
    assert second.load(*keys[:150][::-1]).landed.all()
    assert second.tier.snapshot()["num_blocks"] == 0, "the first engine owns them"


def test_a_block_that_another_engine_stored_is_not_stored_again(engines: tuple[Engine, Engine]) -> None:
    """Known before or not; no byte of the second engine's share is used, and the bytes stay where they are."""
    first, second = engines
    keys = block_keys(*range(40))
    first.store(*keys[:20])
    places = [first.address_of(key) for key in keys[:20]]
    assert second.held(keys[:5]) == keys[:5]
    store = second.store(*keys)
    assert store.landed.all()
    assert second.held(keys) == keys
    assert second.tier.snapshot()["num_blocks"] == 20
    assert second.tier.snapshot()["num_bytes"] == 20 * allocated_bytes(BLOCK_BYTES)
    assert [first.address_of(key) for key in keys[:20]] == places
    assert second.load(*keys).landed.all()


def test_a_block_that_its_owner_evicted_is_a_miss(engines: tuple[Engine, Engine]) -> None:
    """Another engine that still believes in it gets a block-missing, and forgets it."""
    first, second = engines
    (key,) = block_keys(1)
    first.store(key)
    assert second.held([key]) == [key]
    others = block_keys(*range(100, 100 + BLOCKS_THAT_FIT))
    evicted = [gone for at in range(0, len(others), 50) for gone in first.store(*others[at : at + 50]).evicted]
    assert key in evicted
    assert first.held([key]) == []
    assert second.tier.look_up([key]).tolist() == [Presence.HELD]
    load = second.load(key)
    assert load.failures == {Reason.BLOCK_MISSING: 1}
    assert second.held([key]) == []


def test_a_damaged_block_is_removed_for_all(engines: tuple[Engine, Engine]) -> None:
    """Its reader removes it; its owner's load misses then, and a sound copy can be stored by anybody."""
    first, second = engines
    keys = block_keys(1, 2, 3)
    first.store(*keys)
    assert second.held(keys) == keys
    ctypes.c_uint8.from_address(first.address_of(keys[1]) + 100).value ^= 1
    load = second.load(*keys)
    assert load.landed.tolist() == [True, False, True]
    assert load.failures == {Reason.CHECKSUM_MISMATCH: 1}
    assert second.held(keys) == [keys[0], keys[2]]
    wait_until(lambda: not second.tier.snapshot()["num_waiting"], "the block is removed")
    assert first.load(*keys).failures == {Reason.BLOCK_MISSING: 1}
    assert second.store(*keys).landed.all()
    assert second.load(*keys).landed.all()


def test_every_byte_of_the_trailer_counts(engines: tuple[Engine, Engine]) -> None:
    """Key, version, length and checksum."""
    first, _ = engines
    keys = block_keys(*range(TRAILER_BYTES))
    first.store(*keys)
    for offset, key in enumerate(keys):
        ctypes.c_uint8.from_address(first.address_of(key) + BLOCK_BYTES + offset).value ^= 1
    assert first.load(*keys).failures == {Reason.CHECKSUM_MISMATCH: TRAILER_BYTES}


def test_a_block_that_the_pool_lost_is_a_miss(engines: tuple[Engine, Engine]) -> None:
    """As when the master evicts it for another use of the pool: its room is free again."""
    first, _ = engines
    keys = block_keys(*range(10))
    first.store(*keys)
    first.tier._store.remove(keys[3:5])
    load = first.load(*keys)
    assert load.failures == {Reason.BLOCK_MISSING: 2}
    assert first.held(keys) == keys[:3] + keys[5:]
    assert first.tier.snapshot()["num_bytes"] == 8 * allocated_bytes(BLOCK_BYTES)
    assert first.store(*keys).landed.all()


@pytest.mark.parametrize("length", [100, 5000, BLOCK_BYTES - 72, BLOCK_BYTES - 1])
def test_another_length_than_another_engine_stored(length: int, engines: tuple[Engine, Engine]) -> None:
    """The bytes around the slot stay; nothing lands; the block goes, since its name promises another one."""
    first, second = engines
    long, short, sound = block_keys(1, 2, 3)
    first.store(long, short, sound, lengths={short: length})
    assert second.held([long, short, sound]) == [long, short, sound]
    load = second.load(long, short, sound, lengths={long: length})
    assert load.landed.tolist() == [False, False, True]
    assert load.failures == {Reason.BLOCK_SIZE_MISMATCH: 2}
    wait_until(lambda: not second.tier.snapshot()["num_waiting"], "the blocks are removed")
    second.poll()
    assert second.held([long, short, sound]) == [sound]
    assert second.store(long, short).landed.all()
    assert second.load(long, short).landed.all()


def test_why_a_master_refuses_is_logged_once(shared_master: Master, caplog: pytest.LogCaptureFixture) -> None:
    """Such as a master of another version, which answers greetings."""
    memory = SlabMemory(BLOCK_BYTES)
    store = PoolStore(shared_master.address, SHARE_BYTES, memory.region, num_threads=1)
    refusing = SimpleNamespace(setup=lambda *_: -7)
    store._package = SimpleNamespace(MooncakeDistributedStore=lambda: refusing)
    for _ in range(3):
        store.renew()
    assert [record.message for record in caplog.records if "code -7" in record.message] == [
        f"no block is shared: Mooncake's master at {shared_master.address} refuses this client (code -7). "
        "Start mooncake_master of the same version. [tier-failed]"
    ]
    assert not store.state.is_reachable
    store.close()
    memory.close()


def test_shares_that_are_too_small_never_fill_the_pool(engines: tuple[Engine, Engine]) -> None:
    """Two engines store three times what fits, in turns: the master evicts nothing, and each has what it says."""
    stored: dict[Engine, dict[BlockKey, None]] = {}
    for engine, first_number in zip(engines, (1000, 5000), strict=True):
        keys = block_keys(*range(first_number, first_number + 3 * BLOCKS_THAT_FIT))
        expected = stored.setdefault(engine, {})
        for at in range(0, len(keys), 60):
            store = engine.store(*keys[at : at + 60])
            assert store.landed.all()
            expected.update(dict.fromkeys(store.keys))
            for key in store.evicted:
                del expected[key]
        assert keys[-1] in expected
    for engine, expected in stored.items():
        kept = list(expected)
        assert engine.tier.snapshot()["num_blocks"] == len(kept) == BLOCKS_THAT_FIT
        assert all(engine.load(*kept[at : at + 100]).landed.all() for at in range(0, len(kept), 100))


def test_a_block_that_fits_nowhere_is_refused(engines: tuple[Engine, Engine]) -> None:
    first, _ = engines
    store = first.tier.prepare_store(block_keys(1), Slots.of([first.memory.region.base_address], [SHARE_BYTES]))
    assert store.has_ended
    assert store.failures == {Reason.TIER_FULL: 1}
    first.tier.complete_store(store)


@pytest.mark.parametrize("milliseconds", [0, 2, 10])
def test_a_master_that_is_killed_while_blocks_are_stored(own_master: Master, milliseconds: int) -> None:
    """The store ends, the blocks are misses, and with a new master the tier works again by itself."""
    with Engine(own_master) as engine:
        old, new = block_keys(*range(20)), block_keys(*range(100, 250))
        engine.store(*old)
        store = engine.begin_store(new)
        time.sleep(milliseconds / 1000)
        own_master.kill()
        assert engine.end(store) < CALL_SECONDS
        assert set(store.failures) <= {Reason.TIER_FAILED, Reason.PEER_UNREACHABLE}
        wait_until(lambda: not engine.is_reachable(), "the master is missed")
        assert engine.held(old + new) == []
        failed = engine.store(*block_keys(900))
        assert failed.failures == {Reason.TIER_FAILED: 1}
        own_master.start()
        wait_until(engine.is_reachable, "the master is found")
        assert engine.held(old + new) == [], "the pool is empty"
        assert engine.tier.snapshot()["num_bytes"] == 0
        assert engine.store(*old, *new).landed.all()
        assert engine.load(*old, *new).landed.all()


@pytest.mark.parametrize("milliseconds", [0, 2, 10])
def test_a_master_that_is_killed_while_blocks_are_loaded(own_master: Master, milliseconds: int) -> None:
    """From the engine's own share and from another's: what landed is right, the rest is a miss."""
    with Engine(own_master) as first, Engine(own_master) as second:
        keys = block_keys(*range(150))
        first.store(*keys)
        assert second.held(keys) == keys
        loads = [(engine, engine.begin_load(keys)) for engine in (first, second)]
        time.sleep(milliseconds / 1000)
        own_master.kill()
        for engine, load in loads:
            assert engine.end(load) < CALL_SECONDS
            assert set(load.failures) <= {Reason.TIER_FAILED, Reason.PEER_UNREACHABLE}
        own_master.start()
        for engine in (first, second):
            wait_until(engine.has_lost_its_blocks, "the new master is found")
            assert engine.held(keys) == []
        assert second.store(*keys).landed.all()
        wait_until(lambda: first.finds(keys), "the first engine finds them")
        assert first.load(*keys).landed.all()


def test_a_master_that_stops_for_a_while(own_master: Master) -> None:
    """Nothing waits for it longer than a copy may take; afterwards the blocks are there as before."""
    with Engine(own_master) as engine:
        keys = block_keys(*range(50))
        engine.store(*keys)
        own_master.stop()
        began_at = time.monotonic()
        copies: list[TierCopy] = [engine.begin_load(keys[:20]), engine.begin_store(block_keys(*range(100, 120)))]
        assert engine.held(block_keys(*range(500, 600))) == []
        for copy in copies:
            engine.end(copy)
            assert set(copy.failures) == {Reason.TIER_FAILED}
        assert engine.held(keys) == []
        assert time.monotonic() - began_at < CALL_SECONDS
        own_master.send(signal.SIGCONT)
        wait_until(engine.is_reachable, "the master is found")
        assert engine.held(keys) == keys
        assert engine.load(*keys).landed.all()
        assert engine.tier.snapshot()["num_emptied"] == 1
        again = engine.store(*block_keys(*range(100, 120)))
        assert again.landed.all()
        assert engine.load(*block_keys(*range(100, 120))).landed.all()


def test_a_question_without_an_answer_makes_blocks_absent(engines: tuple[Engine, Engine]) -> None:
    """Requests need not wait for their deadline; with the answer the blocks are there again."""
    first, _ = engines
    keys, may_end = block_keys(1, 2), threading.Event()
    first.store(*keys)

    class Silence:
        def perform(self) -> None:
            may_end.wait(60.0)

    first.tier._questions.submit([Silence()])
    assert first.held(keys) == keys
    wait_until(lambda: first.held(keys) == [], "the tier notices", seconds=10 * SILENT_SECONDS)
    may_end.set()
    wait_until(lambda: first.finds(keys), "the tier is back")


def test_a_stopped_master_does_not_stop_an_engine_that_starts(own_master: Master) -> None:
    """Mooncake's ``setup`` holds Python's GIL until the master answers, so it is not called before."""
    own_master.stop()
    turns, may_end = [time.monotonic()], threading.Event()

    def take_turns() -> None:
        while not may_end.wait(0.01):
            turns.append(time.monotonic())

    thread = threading.Thread(target=take_turns)
    thread.start()
    memory = SlabMemory(BLOCK_BYTES)
    pool = RemotePool(own_master.address, SHARE_BYTES, memory.region)
    time.sleep(3.0)
    may_end.set()
    thread.join()
    assert pool.look_up(block_keys(1)).tolist() == [Presence.ABSENT]
    own_master.send(signal.SIGCONT)
    wait_until(lambda: pool.poll() == [] and pool.snapshot()["is_reachable"], "the master is found")
    pool.close()
    memory.close()
    assert np.diff(turns).max() < 1.5


def test_an_engine_ends_while_its_master_is_stopped(own_master: Master) -> None:
    """``close`` returns, and the copies have ended."""
    engine = Engine(own_master)
    engine.store(*block_keys(1))
    own_master.stop()
    load = engine.begin_load(block_keys(1))
    began_at = time.monotonic()
    engine.close()
    assert load.has_ended
    assert time.monotonic() - began_at < 2 * CALL_SECONDS


def test_a_master_that_starts_after_the_engine(own_master: Master) -> None:
    own_master.kill()
    memory = SlabMemory(BLOCK_BYTES)
    pool = RemotePool(own_master.address, SHARE_BYTES, memory.region)
    assert pool.look_up(block_keys(1, 2)).tolist() == [Presence.ABSENT] * 2
    assert pool.snapshot()["is_reachable"] is False
    own_master.start()
    wait_until(lambda: pool.poll() == [] and pool.snapshot()["is_reachable"], "the master is found")
    pool.close()
    memory.close()


STORES_AND_WAITS = f"""
import sys, time
from tests.support.tier_suite import LowerBench, block_keys
from kvferry.tiers.remote_pool import RemotePool
engine = LowerBench(lambda region: RemotePool(sys.argv[1], {SHARE_BYTES}, region))
while not engine.tier.snapshot()["is_reachable"]:
    engine.poll()
assert engine.store(*block_keys(*range(100))).landed.all()
print("stored", flush=True)
time.sleep(600)
"""


def test_an_engine_that_is_killed_or_stopped(own_master: Master) -> None:
    """In another process: its blocks can be read while it lives; then they are misses, and others stay."""
    process = subprocess.Popen(
        [sys.executable, "-c", STORES_AND_WAITS, own_master.address],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "stored\n"
        with Engine(own_master) as engine:
            theirs, mine = block_keys(*range(100)), block_keys(*range(200, 250))
            engine.store(*mine)
            assert engine.held(theirs) == theirs
            assert engine.load(*theirs[:50]).landed.all()
            os.kill(process.pid, signal.SIGSTOP)
            load = engine.begin_load(theirs[50:90])
            assert engine.end(load) < CALL_SECONDS
            assert not load.landed.any()
            assert set(load.failures) <= {Reason.TRANSFER_FAILED, Reason.PEER_UNREACHABLE}
            assert engine.held(theirs[50:90]) == [], "nobody waits a second time"
            load = engine.begin_load(theirs[:40])
            assert engine.end(load) < CALL_SECONDS
            assert load.failures == {Reason.PEER_UNREACHABLE: 40}, "the peer is greeted first, once"
            process.kill()
            process.wait()
            load = engine.begin_load(theirs[40:50])
            assert engine.end(load) < CALL_SECONDS
            assert load.failures == {Reason.PEER_UNREACHABLE: 10}
            assert engine.load(*mine).landed.all()
            wait_until(lambda: engine.store(*theirs).landed.all(), "the master has noticed", seconds=40.0)
            assert engine.held(theirs) == theirs
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_no_wrong_byte_lands_while_a_master_comes_and_goes(own_master: Master) -> None:
    """Two engines store and load without pause; in the middle the master is killed or stopped, then it comes back."""
    generator = np.random.default_rng(7)
    with Engine(own_master) as first, Engine(own_master) as second:

        def stored_and_loaded() -> int:
            """Return how many blocks have landed; the bytes of each are compared."""
            num_landed = 0
            for engine in (first, second):
                keys = block_keys(*generator.choice(200, 20, replace=False).tolist())
                engine.end(engine.begin_store(keys[:10]))
                load = engine.begin_load(engine.held(keys))
                assert engine.end(load) < CALL_SECONDS
                num_landed += int(load.landed.sum())
            return num_landed

        for turn in range(6):
            is_killed, num_landed = turn % 2 == 0, 0
            deadline = time.monotonic() + 30.0
            while num_landed < 60 and time.monotonic() < deadline:
                num_landed += stored_and_loaded()
            assert num_landed >= 60, "the pool works"
            fault = threading.Timer(0.003 * turn, own_master.kill if is_killed else own_master.stop)
            fault.start()
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline or fault.is_alive():
                stored_and_loaded()
            if is_killed:
                own_master.start()
            else:
                own_master.send(signal.SIGCONT)


def test_a_stack_promises_what_its_pool_has_and_misses_without_it(own_master: Master) -> None:
    """Two engines' stacks: a prefix stored by one is promised to a request of the other, and verified."""
    stacks, slabs = [], []
    for _ in range(2):
        memory = SlabMemory(64 * BLOCK_BYTES)
        host = HostMemory(slab_of_blocks(64, memory.region.base_address))
        stacks.append(Stack(host, [open_pool(own_master, memory.region)]))
        slabs.append(memory)
    keys = block_keys(*range(32))
    store = stacks[0].prepare_store("full", keys, num_parts=1)
    for key, address in zip(keys, store.slots.addresses.tolist(), strict=True):
        ctypes.memmove(address, content_of(key), BLOCK_BYTES)
    stacks[0].land(store, 0)
    wait_until(lambda: stacks[0].poll(time.monotonic()) is None and is_idle(stacks[0]), "it is written through")

    def asked(stack: Stack, request: str) -> list[bool]:
        promise = None
        while promise is None:
            stack.poll(time.monotonic())
            promise = stack.ask(request, {"full": keys}, time.monotonic(), wait_seconds=5.0)
        return [bool(held) for held in promise.held["full"]]

    assert asked(stacks[1], "first") == [True] * 32
    (load,) = stacks[1].begin_load("first", {"full": keys}).values()
    for key, address in zip(keys, load.slots.addresses.tolist(), strict=True):
        assert ctypes.string_at(address, BLOCK_BYTES) == content_of(key)
    stacks[1].complete_load("first")

    stacks[0].close()
    own_master.kill()
    others = block_keys(*range(500, 510))
    began_at = time.monotonic()
    promise = None
    while promise is None:
        stacks[1].poll(time.monotonic())
        promise = stacks[1].ask("second", {"full": others}, time.monotonic(), wait_seconds=2.0)
    assert not promise.held["full"].any()
    assert time.monotonic() - began_at < 10.0
    stacks[1].drop("second")
    time.sleep(4.0)  # Mooncake now takes longest to close: a heartbeat, a new connection, the unmount
    stacks[1].close()
    for memory in slabs:
        memory.close()


def test_a_stack_notes_that_its_pool_is_empty_since_the_master_was_started_again(own_master: Master) -> None:
    """Once, and not while the master is merely away: routers must hear that the blocks are gone."""
    memory = SlabMemory(64 * BLOCK_BYTES)
    stack = Stack(HostMemory(slab_of_blocks(64, memory.region.base_address)), [open_pool(own_master, memory.region)])
    stack.journal.is_kept = True
    store = stack.prepare_store("full", block_keys(*range(8)), num_parts=1)
    stack.land(store, 0)

    def noted() -> list[Change | Emptied]:
        stack.poll(time.monotonic())
        return [change for change in stack.journal.take() if change.tier == "remote_pool"]

    def is_reachable() -> bool:
        return bool(stack._lower[0]._tier._tier.snapshot()["is_reachable"])  # type: ignore[attr-defined]

    changes: list[Change | Emptied] = []
    wait_until(lambda: changes.extend(noted()) or is_idle(stack), "it is written through")
    assert [sorted(change.keys) for change in changes if isinstance(change, Change)] == [block_keys(*range(8))]
    own_master.stop()
    wait_until(lambda: changes.extend(noted()) or not is_reachable(), "the master is away")
    own_master.send(signal.SIGCONT)
    wait_until(lambda: changes.extend(noted()) or is_reachable(), "the master is back, with all blocks")
    assert not any(isinstance(change, Emptied) for change in changes)
    own_master.kill()
    wait_until(lambda: changes.extend(noted()) or not is_reachable(), "the master has ended")
    own_master.start()
    wait_until(lambda: changes.extend(noted()) or Emptied("remote_pool") in changes, "the loss is noted")
    for _ in range(10):
        changes.extend(noted())
    assert changes.count(Emptied("remote_pool")) == 1
    stack.close()
    memory.close()


@pytest.mark.parametrize("master", ["", "127.0.0.1", ":50051", "host:0", "host:70000", "host:x"])
def test_a_wrong_master_is_refused(master: str) -> None:
    with pytest.raises(TierError) as caught:
        check_pool(master, SHARE_BYTES)
    assert caught.value.reason is Reason.INVALID_SETTING


def test_a_share_that_this_machine_has_not_is_refused() -> None:
    with pytest.raises(TierError) as caught:
        check_pool("127.0.0.1:50051", 1 << 50)
    assert caught.value.reason is Reason.TIER_FAILED
