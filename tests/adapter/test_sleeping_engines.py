"""An engine that has nothing to compute sleeps whatever it waits for; where it must not sleep, its steps are paced."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import json

from vllm.v1.engine.core import EngineShutdownState

from kvferry.handoff.messages import EndPoint, RankEntry
from kvferry.handoff.wire import bootstrap
from kvferry.integrations.vllm.engine_core import LEAST_SECONDS, LOOK_MOST_SECONDS, Alarm, Looks
from kvferry.integrations.vllm.scheduler import destination as destination_module

from ..waits import wait_until
from .flows import to_decode
from .handoff_engine import HandoffEngine, make_engine
from .model_files import CONFIG
from .offload_engine import prompt_of
from .scheduler_requests import FULL, PROMPT, let_sleep, next_step, request
from .test_forged_parameters import UNIFORM
from .test_tier_waits import EngineWithTier

__all__ = ["make_engine"]
RANK = RankEntry(0, 0, b"", {}, EndPoint("127.0.0.1", 1, 1))


def num_wakes(role: Any) -> int:
    return int(role._engine._core.input_queue.qsize())


def steps_within(engine: HandoffEngine, seconds: float) -> int:
    """Step as vLLM's core does, whenever there is work."""
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until and engine.scheduler.has_requests():
        output = engine.scheduler.schedule()
        engine.scheduler.update_from_output(output, engine._execute(output))
        count += 1
    return count


def hold_a_prompt(make_engine: Any, *, can_wake: bool) -> HandoffEngine:
    engine: HandoffEngine = make_engine(UNIFORM)
    engine.ask("r", list(range(40)), {"do_remote_decode": True}, max_tokens=1)
    assert engine.connector._scheduler._state.holds.num_holds == 1
    engine.connector._scheduler._engine.can_wake = can_wake
    return engine


def test_an_engine_that_must_not_sleep_steps_seldom(make_engine: Any) -> None:
    """It cannot be woken when the hold ends; so does one that finishes its work before it ends."""
    engine = hold_a_prompt(make_engine, can_wake=False)
    steps_within(engine, 0.3)
    assert 1 <= steps_within(engine, 0.5) <= 0.5 / LOOK_MOST_SECONDS + 1
    engine.release()
    assert steps_within(engine, 0.5) == 1, "the hold has ended"


def test_an_engine_that_can_be_woken_does_not_step_for_a_hold(make_engine: Any) -> None:
    assert steps_within(hold_a_prompt(make_engine, can_wake=True), 0.5) == 0


def test_steps_wait_while_a_turn_s_engine_does_not_answer(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM steps as long as a request waits: 1000 times a second where no step waits."""
    monkeypatch.setattr(destination_module, "TURN_ANSWER_SECONDS", 0.6)
    prefill, decode = make_engine(UNIFORM, num_blocks=60), make_engine(UNIFORM, turn_seconds=60.0)
    answer = decode.ask("a", list(range(40)), {"do_remote_prefill": False})
    decode.connector._scheduler.shutdown()
    waits: list[float] = []
    execute = prefill._execute

    def count(output: Any) -> Any:
        waits.append(output.kv_connector_metadata.wait_seconds)
        return execute(output)

    prefill._execute = count
    prompt = [*range(40), *answer.tokens, 5]
    prefill.ask("turn", prompt, {**answer.params, "do_remote_decode": True}, max_tokens=1)
    assert any(waits)
    assert len(waits) < 150


def test_an_engine_sleeps_until_it_knows_whom_to_tell_of_an_ended_request(
    make_role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request has ended before the bootstrap query: its transfer is released once the address is known."""
    prefill, decode = make_role(FULL), make_role(FULL)
    prefill.publish([RANK])
    let_sleep(decode)
    may_ask, query = threading.Event(), decode._destination._queries._ask
    decode._destination._queries._ask = lambda address: (may_ask.wait(20), query(address))[1]
    ours = request(list(PROMPT), to_decode("concurrent", prefill, None), "d")
    decode.on_new_request(ours)
    decode.request_finished(ours, ([],), is_complete=False)
    next_step(decode)
    assert (decode.has_pending_work(), num_wakes(decode)) == (False, 0)
    assert decode._destination.waits
    decode._engine.can_wake = False
    assert decode.has_pending_work(), "nobody would wake it"
    decode._engine.can_wake = True
    may_ask.set()
    wait_until(lambda: num_wakes(decode) > 0)
    assert decode.has_pending_work()
    next_step(decode)
    assert (decode.has_pending_work(), decode._destination.waits) == (False, False)


def test_an_engine_is_woken_to_give_up_a_query_that_takes_too_long(
    make_role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(destination_module, "LOOK_SECONDS", 0.2)
    prefill, decode = make_role(FULL), make_role(FULL)
    prefill.publish([RANK])
    let_sleep(decode)
    may_end, ended = threading.Event(), list[str]()
    decode._destination._queries._ask = lambda address: (may_end.wait(20), ended.append(address), [])[2]
    ours = request(list(PROMPT), to_decode("concurrent", prefill, None), "d")
    decode.on_new_request(ours)
    decode.request_finished(ours, ([],), is_complete=False)
    num_steps = 0
    while decode._destination.waits:
        before = num_wakes(decode)
        wait_until(lambda before=before: num_wakes(decode) > before)
        if decode.has_pending_work():
            next_step(decode)
            num_steps += 1
    assert (num_steps <= 4, ended) == (True, []), "the query's end has woken the engine"
    may_end.set()


@pytest.mark.parametrize("can_wake", [True, False])
def test_an_engine_without_requests_sleeps_while_a_lower_tier_copies(can_wake: bool, tmp_path: Path) -> None:
    """It looks at times; a request that comes meanwhile does not wait for a step that waits."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = EngineWithTier(tmp_path)
    role, waits = engine.role, []
    let_sleep(role)
    role._engine.can_wake = can_wake
    engine.add("last", prompt_of(7, 8))
    while "last" not in engine.finished or role._stores.are_under_way:
        engine.step()
    engine.tier.faults.hangs = True
    while not role._start.tiers.stack.is_moving(engine.now):
        engine.step(is_forced=True)
    for _ in range(1000):
        engine.now += 0.001
        if role.has_pending_work():
            waits.append(engine.wait())
    assert role._start.tiers.stack.is_moving(engine.now)
    if can_wake:
        assert 25 <= len(waits) <= 50
        assert not any(waits), "it sleeps between steps, and not in them"
        wait_until(lambda: num_wakes(role) > 0)
    else:
        assert len(waits) == 1000
        assert all(waits)
    if can_wake:
        role._looks.done(progress=0, now=engine.now)
        assert not role.has_pending_work()
        role._engine._core.shutdown_state = EngineShutdownState.SHUTTING_DOWN
        assert role.has_pending_work(), "vLLM would end at once, without the blocks that are being copied"
        role._engine._core.shutdown_state = EngineShutdownState.RUNNING
    engine.tier.faults.hangs = False
    while role.has_pending_work() or role._start.tiers.stack.is_moving(engine.now):
        engine.now += 0.05
        engine.step(is_forced=True)
    role.shutdown()


def test_an_alarm_rings_at_the_earliest_time_and_not_once_it_is_closed() -> None:
    rings: list[float] = []
    alarm, began_at = Alarm(lambda: rings.append(time.monotonic() - began_at)), time.monotonic()
    alarm.set(30.0)
    time.sleep(0.1)  # until its thread waits
    for seconds in (0.05, 20.0):
        alarm.set(seconds)
    wait_until(lambda: bool(rings))
    assert 0.05 <= rings[0] < 5.0
    alarm.set(0.2)
    alarm.close()
    time.sleep(0.4)
    assert len(rings) == 1
    late = Alarm(lambda: None)
    late.set(30.0)
    closed_at = time.monotonic()
    late.close()
    assert time.monotonic() - closed_at < 3.0, "its thread has been told"


def test_looks_begin_anew_after_a_time_without_them() -> None:
    looks = Looks(wake=lambda: None)
    for now in (0.0, 10.0):
        looks.done(progress=0, now=now)
    assert not looks.are_due(10.0 + LOOK_MOST_SECONDS / 2)
    looks.reset()
    assert looks.are_due(10.0)
    looks.done(progress=0, now=10.0)
    assert looks.are_due(10.0 + LEAST_SECONDS)
    looks.close()


def test_what_an_engine_does_about_its_end(make_role: Any) -> None:
    """Each state of vLLM's core: whether it ends, finishes its requests first, and must not sleep."""
    role = make_role(FULL)
    let_sleep(role)
    engine, core = role._engine, role._engine._core
    found = []
    for can_wake, state, timeout in (
        (True, EngineShutdownState.RUNNING, 9),
        (True, EngineShutdownState.SHUTTING_DOWN, 0),
        (True, EngineShutdownState.SHUTTING_DOWN, 9),
        (False, EngineShutdownState.RUNNING, 9),
    ):
        engine.can_wake, core.shutdown_state, core.vllm_config.shutdown_timeout = can_wake, state, timeout
        found.append((engine.is_ending, engine.finishes, engine.stays_awake))
    assert found == [(False, False, False), (True, False, False), (True, True, True), (False, False, True)]


def test_steps_wait_for_answers_and_for_nothing_else(make_role: Any) -> None:
    """While a query runs for a waiting request; a step that computes or loads does not wait, nor the one after long."""
    prefill, decode = make_role(FULL), make_role(FULL)
    prefill.publish([RANK])
    let_sleep(decode)
    may_ask, query = threading.Event(), decode._destination._queries._ask
    decode._destination._queries._ask = lambda address: (may_ask.wait(20), query(address))[1]
    decode.on_new_request(request(list(PROMPT), to_decode("concurrent", prefill, None), "d"))
    assert decode._destination.waits
    for interrupted in (lambda: next_step(decode, "other"), lambda: load(decode)):
        assert next_step(decode).wait_seconds == LEAST_SECONDS
        time.sleep(16 * LEAST_SECONDS)
        assert next_step(decode).wait_seconds > LEAST_SECONDS
        assert interrupted().wait_seconds == 0
    assert next_step(decode).wait_seconds == LEAST_SECONDS
    may_ask.set()
    wait_until(lambda: (next_step(decode), not decode._destination.waits)[1])
    assert next_step(decode).wait_seconds == 0
    may_ask.clear()
    later = make_role(FULL)
    later.publish([RANK])
    decode.on_new_request(request(list(PROMPT), to_decode("concurrent", later, None), "e"))
    assert next_step(decode).wait_seconds == LEAST_SECONDS
    may_ask.set()


def load(role: Any) -> Any:
    """Return the orders of a step while a request loads."""
    role._loading["loads"] = ()
    try:
        return next_step(role)
    finally:
        del role._loading["loads"]


def test_steps_for_a_hold_begin_anew_after_others(make_engine: Any) -> None:
    role = hold_a_prompt(make_engine, can_wake=False).connector._scheduler
    for interrupted in (lambda: next_step(role, "other"), lambda: load(role)):
        assert next_step(role).wait_seconds == LEAST_SECONDS
        time.sleep(16 * LEAST_SECONDS)
        assert next_step(role).wait_seconds > LEAST_SECONDS
        assert interrupted().wait_seconds == 0


def test_the_end_of_a_query_wakes_an_engine_that_has_a_request_to_release(
    make_role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is time to look; and an answer that has been taken asks for no further step."""
    monkeypatch.setattr(destination_module, "LOOK_SECONDS", 60.0)
    decode, others = make_role(FULL), [make_role(FULL) for _ in range(2)]
    for prefill in others:
        prefill.publish([RANK])
    let_sleep(decode)
    destination, query = decode._destination, decode._destination._queries._ask
    may_end = {to_decode("concurrent", each, None)["remote_bootstrap_addr"]: threading.Event() for each in others}
    destination._queries._ask = lambda address: (may_end[address].wait(20), query(address))[1]
    wakes: list[str] = []
    destination._wake = lambda: wakes.append("a query has ended")
    for index, prefill in enumerate(others):
        ours = request(list(PROMPT), to_decode("concurrent", prefill, None) | {"transfer_id": f"x{index}"}, f"d{index}")
        decode.on_new_request(ours)
        decode.request_finished(ours, ([],), is_complete=False)
    next_step(decode)
    for index, event in enumerate(may_end.values(), 1):
        assert not decode.has_pending_work()
        event.set()
        wait_until(lambda index=index: len(wakes) == index)
        assert decode.has_pending_work()
        next_step(decode)
    assert not destination.waits


def test_a_request_that_waits_for_a_lower_tier_waits_in_its_steps(tmp_path: Path) -> None:
    """VLLM steps while a request waits, also an engine that could sleep; a step that computes ends the looks."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    engine = EngineWithTier(tmp_path)
    let_sleep(engine.role)
    engine.tier.faults.hangs = True
    engine.add("below", prompt_of(1, -1))
    assert engine.wait() == LEAST_SECONDS
    engine.role._looks.done(progress=0, now=engine.now)
    engine.add("computes", prompt_of(100))
    engine.wait()
    assert engine.role._looks.are_due(engine.now)
    engine.tier.faults.hangs = False
    engine.run()
    engine.role.shutdown()
    alarm = engine.role._looks._alarm
    alarm.set(0.0)
    assert alarm._at is None, "a closed alarm takes no time"
