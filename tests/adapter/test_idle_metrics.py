"""Metrics that change while an engine sleeps: one step tells them, and then the engine sleeps on."""

import socket
import time
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.errors import Reason
from kvferry.handoff.messages import Drain
from kvferry.integrations.vllm.scheduler.role import TELL_SECONDS

from ..waits import wait_until
from .handoff_engine import make_engine
from .scheduler_requests import A_RANK, FULL, PROMPT, allocated, let_sleep, next_step, request, scheduled
from .test_forged_parameters import UNIFORM

__all__ = ["make_engine"]
BLOCKS = [1, 2, 3, 4, 5]
MALFORMED = Reason.MALFORMED_MESSAGE.value


def send_garbage(port: int) -> None:
    """Connect as a program that does not speak kvferry's protocol, and wait until the port closes the connection."""
    with socket.create_connection(("127.0.0.1", port), 10) as peer:
        peer.sendall(b"\x7f" * 64)
        while peer.recv(4096):
            pass


def told(role: Any) -> dict[str, Any]:
    """Let the engine take the step that it asks for, and return what the step tells."""
    wait_until(role.has_pending_work)
    next_step(role)
    assert not role.has_pending_work()
    data: dict[str, Any] = role.take_statistics().data
    return data


def num_steps_within(role: Any, seconds: float) -> int:
    """Step as vLLM's core does, whenever there is work."""
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        if role.has_pending_work():
            next_step(role)
            role.take_statistics()
            count += 1
        time.sleep(0.001)
    return count


@pytest.fixture
def sleeper(make_role: Any) -> Any:
    """An engine without requests that has started."""
    role = make_role(FULL)
    let_sleep(role)
    assert role.take_statistics() is None, "until it has started it is not ready"
    role.publish([A_RANK])
    return role


def test_an_engine_tells_once_that_it_is_ready_and_once_that_it_drains(sleeper: Any) -> None:
    assert told(sleeper)["ready"] == {"": 1}
    assert sleeper._engine._core.input_queue.qsize(), "nothing else would end its sleep"
    assert num_steps_within(sleeper, 1.5 * TELL_SECONDS) == 0
    sleeper._answer(Drain(begin=True))
    assert told(sleeper)["ready"] == {"": 0}
    assert num_steps_within(sleeper, 1.5 * TELL_SECONDS) == 0


def test_an_engine_tells_which_messages_it_has_refused_and_sleeps_on(sleeper: Any) -> None:
    told(sleeper)
    send_garbage(sleeper._server.port)
    assert told(sleeper)["refused_messages"] == {MALFORMED: 1}
    assert num_steps_within(sleeper, 1.5 * TELL_SECONDS) == 0


def test_a_flood_of_refused_messages_does_not_keep_an_engine_awake(sleeper: Any) -> None:
    told(sleeper)
    num_steps, until = 0, time.monotonic() + 2 * TELL_SECONDS
    while time.monotonic() < until:
        send_garbage(sleeper._server.port)
        num_steps += num_steps_within(sleeper, 0.002)
    assert 1 <= num_steps <= 3


def test_a_rank_lets_its_sleeping_engine_tell_what_the_rank_has_refused(make_engine: Any) -> None:
    """A worker's statistics reach vLLM with a step's results only, and no rank can start a step."""
    engine = make_engine(UNIFORM)
    scheduler, rank = engine.connector._scheduler, engine.worker._worker
    engine.ask("a", list(range(20)), {})
    engine.worker.get_kv_connector_stats()
    assert not scheduler.has_pending_work()
    send_garbage(rank._end_point.server.port)
    wait_until(scheduler.has_pending_work)
    output = engine.scheduler.schedule()
    engine.scheduler.update_from_output(output, engine._execute(output))
    assert engine.worker.get_kv_connector_stats().data["refused_messages"] == {MALFORMED: 1}
    time.sleep(1.5 * TELL_SECONDS)
    assert not scheduler.has_pending_work()


@pytest.mark.parametrize(
    ("kv_role", "params", "counted"),
    [
        ("kv_consumer", {}, {"no-parameters": 64}),
        ("kv_consumer", ["no object"], {"no-parameters": 64}),
        ("kv_both", {}, {}),
    ],
)
def test_tokens_of_requests_that_name_no_prefill_engine_are_counted_once(
    kv_role: str, params: Any, counted: dict[str, int], make_role: Any
) -> None:
    role = make_role(FULL, kv_role=kv_role)
    ours = request(PROMPT, params)
    role.on_new_request(ours)
    for _ in range(2):  # the second time it was preempted
        assert role.get_num_new_matched_tokens(ours, 0) == (0, False)
        role.update_state_after_alloc(ours, allocated(BLOCKS), 0)
        # Another connector has loaded 16 tokens.
        role.build_connector_meta(scheduled({ours.request_id: 64}, num_computed={ours.request_id: 16}))
    role.request_finished(ours, (BLOCKS,), is_complete=True)
    taken = role.take_statistics()
    assert ({} if taken is None else taken.data["computed_tokens"]) == counted


def test_a_request_that_ends_before_it_is_computed_is_forgotten(make_role: Any) -> None:
    role = make_role(FULL, kv_role="kv_consumer")
    ours = request(PROMPT, {})
    role.on_new_request(ours)
    role.get_num_new_matched_tokens(ours, 0)
    role.request_finished(ours, ([],), is_complete=False)
    assert (role._unnamed, role._missing, role.take_statistics()) == ({}, {}, None)
