"""A lower tier that raises whatever it likes, on whichever thread: a miss with a counted reason, and nothing kept."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import Reason, TierError
from kvferry.tiers import lower_copies
from kvferry.tiers import stack as stack_module
from kvferry.tiers.disk import runs
from kvferry.tiers.host_memory import Change, HostMemory
from kvferry.tiers.local_disk import LocalDisk
from kvferry.tiers.protocol import BlockKey, Load, LowerTier, Presence, Slots
from kvferry.tiers.stack import Stack

from ..support.dictionary_tier import DictionaryTier
from ..support.offload_state import is_idle
from ..support.tier_suite import block_keys, slab_of_blocks
from .test_tiers_stack import SETTINGS, Engine

VERBS = ("look_up", "prepare_load", "complete_load", "prepare_store", "complete_store", "cancel", "poll")
ERRORS = (
    OSError("stale file handle"),
    RuntimeError("C++"),
    ValueError("a bug"),
    MemoryError(),
    TierError(Reason.TIER_FAILED, "x"),
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that closes a tier may get no core for a while."""
    monkeypatch.setattr(lower_copies, "QUICK_SECONDS", 20.0)


def let_raise(tier: object, verb: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise error

    monkeypatch.setattr(tier, verb, fail)


def pinned(engine: Engine) -> list[int]:
    found = engine.host.snapshot()
    return [found[name] for name in ("num_pinned", "num_loads", "num_stores")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("verb", VERBS)
def test_any_error_of_a_verb_is_a_failure_of_the_tier(
    engine: Engine, verb: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first tier, while the second works; with copies of both directions under way when it begins."""
    engine.only_below(1, 2)
    engine.ask("a", 1, 2)
    engine.store(3, 4)
    engine.step()
    let_raise(engine.disk, verb, error, monkeypatch)
    engine.disk.faults.hangs = verb == "cancel"
    began_at = engine.now
    promised = engine.answer("a", 1, 2)
    assert engine.now - began_at <= 5.1
    engine.load("a", *promised)
    for turn in range(100, 140):
        engine.store(*range(10 * turn, 10 * turn + 3))
        engine.answer("b", 1, 2)
        engine.stack.drop("b")
        engine.step(1.0)
    assert engine.failures("disk")
    monkeypatch.undo()
    engine.disk.faults.hangs = False
    engine.step(1000.0)
    engine.step(1000.0)
    engine.settle()
    assert pinned(engine) == [0, 0, 0]
    assert is_idle(engine.stack)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "cancel"])
def test_a_tier_that_keeps_raising_is_closed_and_gives_back_all(
    engine: Engine, verb: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The time for which it is left alone doubles, so that the log does not fill."""
    engine.only_below(1, 2)
    let_raise(engine.disk, verb, OSError("stale file handle"), monkeypatch)
    caplog.set_level(logging.WARNING)
    for turn in range(600):
        engine.answer("a", 1, 2)
        engine.stack.drop("a")
        engine.store(*range(100 + 3 * turn, 103 + 3 * turn))
        engine.step(5.0)
        engine.step()
        if engine.state()["lower"]["disk"]["is_set_aside"]:
            break
    else:
        raise AssertionError("it was never set aside")
    assert engine.disk._is_closed
    assert turn >= 8, "once is not repeatedly"
    engine.step()
    monkeypatch.undo()
    found = engine.state()["lower"]["disk"]
    assert (found["promotions"], found["writes"], found["stuck_blocks"], found["blocks_to_write"]) == ([], [], 0, 0)
    assert len([record for record in caplog.records if "disk" in record.message]) <= lower_copies.MAX_RAISED + 2
    engine.settle()
    assert engine.answer("b", 1, 2) == [1, 2], "from the pool"
    engine.stack.drop("b")
    assert pinned(engine) == [0, 0, 0]
    assert is_idle(engine.stack)


@pytest.mark.parametrize("verb", ["prepare_load", "prepare_store"])
def test_slots_of_a_copy_that_was_begun_and_not_returned_are_kept_until_the_tier_is_closed(
    engine: Engine, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads may still write into the slots: given back, they would put these bytes into other blocks."""
    engine.only_below(1, 2)
    monkeypatch.setattr(lower_copies, "QUICK_SECONDS", 0.01)
    prepare, close = getattr(engine.disk, verb), engine.disk.close
    may_close = threading.Event()

    def begin_and_raise(*arguments: Any) -> Any:
        prepare(*arguments)
        raise MemoryError

    def close_late() -> None:
        may_close.wait(8)
        close()

    monkeypatch.setattr(engine.disk, verb, begin_and_raise)
    monkeypatch.setattr(engine.disk, "close", close_late)
    if verb == "prepare_load":
        assert engine.answer("a", 1, 2) == [], "its slots are in use"
        engine.stack.drop("a")
    else:
        engine.store(3, 4)
        engine.step()
        engine.step()
    kept = pinned(engine)
    assert engine.state()["lower"]["disk"]["is_set_aside"]
    assert kept != [0, 0, 0]
    engine.step(1000.0)
    assert pinned(engine) != [0, 0, 0]
    may_close.set()
    for _ in range(20_000):
        engine.step()
        time.sleep(0.001)
        if engine.is_still:
            break
    assert pinned(engine) == [0, 0, 0]
    assert is_idle(engine.stack)
    assert engine.answer("b", 1, 2) == [1, 2], "from the pool"
    engine.stack.drop("b")


def test_nothing_that_a_broken_tier_brought_becomes_visible(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.only_below(1, 2)
    engine.pool.blocks.clear()
    prepare = engine.disk.prepare_load

    def begin_and_raise(*arguments: Any) -> Any:
        load = prepare(*arguments)
        load.landed[:] = True
        raise ValueError

    monkeypatch.setattr(engine.disk, "prepare_load", begin_and_raise)
    assert engine.answer("a", 1, 2) == []
    engine.step()
    assert engine.host.look_up(block_keys(1, 2)).tolist() == [Presence.ABSENT] * 2
    engine.stack.drop("a")


def test_a_block_whose_store_could_not_be_completed_is_not_announced(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.host.journal.is_kept = True
    let_raise(engine.disk, "complete_store", OSError("read-only"), monkeypatch)
    engine.store(1)
    engine.settle()
    assert [change.tier for change in engine.stack.journal.take()] == ["host_memory", "pool"]


def test_a_block_that_could_not_be_loaded_is_gone_also_where_the_tier_must_ask(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool knows no more of a block of another engine than that it did not come."""
    engine.only_below(1)
    begin_load = engine.disk.prepare_load

    def misses(keys: Sequence[BlockKey], slots: Slots) -> Load:
        engine.disk._forget(keys[0])
        engine.disk.faults.is_silent = True
        return begin_load(keys, slots)

    monkeypatch.setattr(engine.disk, "prepare_load", misses)
    engine.host.journal.is_kept = True
    assert engine.answer("a", 1) == [1], "the pool has it"
    changes = [change for change in engine.stack.journal.take() if change.tier == "disk"]
    assert changes == [Change("disk", block_keys(1), is_visible=False)]
    engine.stack.drop("a")


def test_a_failure_now_and_then_sets_no_tier_aside(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn in range(3 * lower_copies.MAX_RAISED):
        with monkeypatch.context() as patch:
            let_raise(engine.disk, "poll", OSError("now and then"), patch)
            engine.step()
        engine.step(1000.0)
        engine.store(turn)
        engine.settle()
    assert not engine.state()["lower"]["disk"]["is_set_aside"]
    assert engine.failures("disk") == {"tier-failed": 3 * lower_copies.MAX_RAISED}


# The end.


def closes(error: Exception | None = None, event: threading.Event | None = None) -> Callable[[], None]:
    def close() -> None:
        if event is not None:
            event.wait(60)
        if error is not None:
            raise error

    return close


def stack_of(*tiers: LowerTier) -> Stack:
    return Stack(HostMemory(slab_of_blocks(4, 1 << 30)), tiers)


def tier_of(name: str) -> DictionaryTier:
    return DictionaryTier(slab_of_blocks(4, 1 << 30).regions[0], 1 << 20, name=name)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_of_close_leaves_no_other_tier_open(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the caller hears of it: it must not unmap the slab."""
    first, second = tier_of("first"), tier_of("second")
    monkeypatch.setattr(first, "close", closes(error))
    stack = stack_of(first, second)
    with pytest.raises(TierError) as raised:
        stack.close()
    assert raised.value.reason is Reason.TIER_FAILED
    assert second._is_closed
    assert stack._host._is_closed


def test_a_tier_whose_close_never_returns_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_module, "MAX_CLOSE_SECONDS", 0.1)
    first, second, event = tier_of("first"), tier_of("second"), threading.Event()
    monkeypatch.setattr(first, "close", closes(event=event))
    stack = stack_of(first, second)
    began_at = time.monotonic()
    with pytest.raises(TierError) as raised:
        stack.close()
    assert time.monotonic() - began_at < 5.0
    assert raised.value.reason is Reason.DEADLINE_EXCEEDED
    assert second._is_closed
    event.set()


def test_a_second_close_of_a_tier_that_hangs_does_not_say_that_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that was set aside and could not be closed still moves bytes when the stack is closed."""
    engine = Engine()
    engine.only_below(1)
    error = TierError(Reason.DEADLINE_EXCEEDED, "a copy goes on.")
    monkeypatch.setattr(engine.disk, "close", closes(error))
    prepare = engine.disk.prepare_load

    def begin_and_raise(*arguments: Any) -> Any:
        prepare(*arguments)
        raise MemoryError

    monkeypatch.setattr(engine.disk, "prepare_load", begin_and_raise)
    engine.answer("a", 1)
    monkeypatch.undo()
    engine.step(1000.0)
    assert engine.state()["lower"]["disk"]["stuck_blocks"] == 1
    with pytest.raises(TierError) as raised:
        engine.stack.close()
    assert raised.value.reason is Reason.DEADLINE_EXCEEDED
    engine.memory.close()


# The tier's own threads.


@pytest.mark.parametrize("error", ERRORS[:4], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("task", ["LoadRun", "StoreRun", "HeaderWrite"])
def test_any_error_in_a_thread_of_the_disk_is_a_miss(
    task: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(num_blocks=4)
    disk = LocalDisk(tmp_path, 1 << 20, engine.memory.region)
    engine.stack = Stack(engine.host, [disk], SETTINGS)

    def settle() -> None:
        for _ in range(2000):
            engine.step(0.001)
            time.sleep(0.0005)
            if engine.is_still and not disk.snapshot()["num_waiting"]:
                return
        raise AssertionError(engine.state())

    engine.store(1)
    settle()
    for number in range(10, 14):
        engine.store(number)
        settle()
    assert engine.host.look_up(block_keys(1)).tolist() == [Presence.ABSENT]
    let_raise(getattr(runs, task), "perform", error, monkeypatch)
    engine.store(20)
    settle()
    engine.now += 1000.0
    for _ in range(2000):
        if (promise := engine.ask("a", 1)) is not None:
            break
        engine.step(0.001)
        time.sleep(0.0005)
    assert promise is not None
    assert promise.held["full"].tolist() == [task != "LoadRun"]
    engine.stack.drop("a")
    monkeypatch.undo()
    engine.step(1000.0)
    engine.store(30)
    settle()
    assert pinned(engine) == [0, 0, 0]
    assert disk.look_up(block_keys(30)).tolist() == [Presence.HELD]
    engine.close()
