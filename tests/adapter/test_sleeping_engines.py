"""An engine that has nothing to compute sleeps whatever it waits for; where it must not sleep, its steps are paced."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import json

from vllm.v1.engine.core import EngineShutdownState

from kvferry.handoff.messages import RankEntry
from kvferry.handoff.wire import bootstrap
from kvferry.integrations.vllm.scheduler import pull
from kvferry.integrations.vllm.scheduler import push as push_module
from kvferry.integrations.vllm.scheduler.waits import LOOK_MOST_SECONDS, Alarm

from ..waits import wait_until
from .handoff_engine import HandoffEngine, make_engine
from .model_files import CONFIG
from .offload_engine import prompt_of
from .scheduler_requests import FULL, let_sleep, next_step, request
from .test_forged_parameters import UNIFORM
from .test_tier_waits import EngineWithTier
from .test_vllm_push_requests import PROMPT, to_decode

__all__ = ["make_engine"]


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
    monkeypatch.setattr(pull, "TURN_ANSWER_SECONDS", 0.6)
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
    prefill, decode = make_role(FULL, mode="push"), make_role(FULL, mode="push")
    prefill.publish([RankEntry(0, 0, b"", {}, 0, 0)])
    let_sleep(decode)
    may_ask, query = threading.Event(), decode._destination._queries._ask
    decode._destination._queries._ask = lambda address: (may_ask.wait(20), query(address))[1]
    ours = request(list(PROMPT), to_decode(prefill), "d")
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
    monkeypatch.setattr(push_module, "LOOK_SECONDS", 0.2)
    prefill, decode = make_role(FULL, mode="push"), make_role(FULL, mode="push")
    prefill.publish([RankEntry(0, 0, b"", {}, 0, 0)])
    let_sleep(decode)
    may_end, ended = threading.Event(), list[str]()
    decode._destination._queries._ask = lambda address: (may_end.wait(20), ended.append(address), [])[2]
    ours = request(list(PROMPT), to_decode(prefill), "d")
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
    for seconds in (30.0, 0.05, 20.0):
        alarm.set(seconds)
    wait_until(lambda: bool(rings))
    assert 0.05 <= rings[0] < 5.0
    alarm.set(0.2)
    alarm.close()
    time.sleep(0.4)
    assert len(rings) == 1
