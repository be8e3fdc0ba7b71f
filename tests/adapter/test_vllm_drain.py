"""An engine that drains: what it holds ends as always, and it holds nothing new. Without an engine."""

import json
import logging
import queue
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from typer.testing import CliRunner
from vllm.v1.engine.core import EngineShutdownState

from kvferry.cli import drain as drain_module
from kvferry.cli.main import app
from kvferry.handoff.messages import Drain, Release
from kvferry.handoff.wire.trust import make_keys
from kvferry.integrations.vllm.scheduler import source as source_module

from .scheduler_requests import A_RANK, FULL, PROMPT, allocated, handle_of, kept, next_step, request, run_prefill

BLOCKS = [5, 4, 3, 2, 1]


@pytest.fixture(autouse=True)
def routers_notice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tests need not wait; those about the wait set it themselves."""
    monkeypatch.setattr(source_module, "NOTICED_SECONDS", 0.0)


def asked(role: Any, *, begin: bool = False) -> tuple[bool, int, int]:
    answer = role._answer(Drain(begin))
    return answer.is_draining, answer.num_holds, answer.num_loads


def release(role: Any, params: dict[str, Any]) -> None:
    handle = handle_of(params)
    role._answer(Release(params["kvferry"]["epoch"], (handle,)))


def test_a_draining_engine_finishes_what_it_holds_and_holds_no_more(
    make_role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    role = make_role(FULL)
    held = run_prefill(role, PROMPT, BLOCKS)
    computing = request(PROMPT, {"do_remote_decode": True}, "computing")
    role.update_state_after_alloc(computing, allocated([6, 7, 8, 9, 10]), 0)
    assert asked(role) == (False, 2, 0)
    assert asked(role, begin=True) == (True, 2, 0)
    # A new prompt is computed as always; without parameters in the answer the decode engine computes it as well.
    late = request(PROMPT, {"do_remote_decode": True}, "late")
    role.update_state_after_alloc(late, allocated([11, 12, 13, 14, 15]), 0)
    assert role.request_finished(late, ([11, 12, 13, 14, 15],), is_complete=True) == (False, None)
    assert "late is not held, since this engine drains" in caplog.text
    computing.num_computed_tokens = computing.num_prompt_tokens
    _, params = role.request_finished(computing, ([6, 7, 8, 9, 10],), is_complete=True)
    assert params["do_remote_prefill"], "a prompt that was begun before is held"
    for each in (held, params):
        release(role, each)
    next_step(role)
    assert kept(role) == []
    assert asked(role) == (True, 0, 0)


def test_a_draining_engine_refuses_transfers_of_new_prompts_and_goes_on_with_others(make_role: Any) -> None:
    role = make_role(FULL)
    for name in ("begun", "new"):
        ours = request(PROMPT, {"do_remote_decode": True, "transfer_id": name}, f"r-{name}")
        role.update_state_after_alloc(ours, allocated(BLOCKS), 0)
        assert asked(role, begin=True) == (True, 1, 0)
    orders = next_step(role)
    assert (orders.refused_transfers, orders.ended_transfers) == (["new"], [])


PLACES = {"router_address": "127.0.0.1:1", "http_address": "127.0.0.1:2"}


@pytest.mark.parametrize(
    ("waits", "settings"),
    [
        ((source_module, "NOTICED_SECONDS"), {}),
        ((source_module, "NOTICED_SECONDS"), {"kv_role": "kv_producer"}),
        ((source_module, "FORGOTTEN_SECONDS"), {"kv_role": "kv_producer", **PLACES}),
    ],
    ids=["of both roles", "prefill", "registered"],
)
def test_an_engine_that_drains_is_not_ready_and_takes_prompts_until_routers_have_noticed(
    waits: tuple[Any, str], settings: dict[str, Any], make_role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*waits, 0.5)
    role = make_role(FULL, **settings)
    role.publish([A_RANK])
    assert asked(role) == (False, 0, 0), "ready"
    assert asked(role, begin=True) == (False, 0, 0), "takes prompts"
    assert asked(role) == (True, 0, 0), "not ready"
    assert asked(role, begin=True) == (False, 0, 0), "asking again does not begin anew"
    ours = request(PROMPT, {"do_remote_decode": True, "transfer_id": "sent by the router"}, "r")
    role.update_state_after_alloc(ours, allocated(BLOCKS), 0)
    deadline = time.monotonic() + 5
    while not asked(role, begin=True)[0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert next_step(role).refused_transfers == []
    assert asked(role, begin=True) == (True, 1, 0), "a prompt that the router sent meanwhile is held"


def test_an_engine_has_something_left_as_long_as_it_has_requests(make_role: Any) -> None:
    """A decode engine still computes answers for prompts that it has loaded: whoever ends it would fail them."""
    role, counts = make_role(FULL), [2, 1]
    role._engine._core = core = SimpleNamespace()
    assert asked(role) == (False, 0, 0), "the core builds its scheduler after the role answers"
    core.scheduler = SimpleNamespace(get_request_counts=lambda: tuple(counts))
    assert asked(role, begin=True) == (True, 0, 3)
    counts[:] = 0, 0
    assert asked(role, begin=True) == (True, 0, 0)


def test_the_loads_of_a_decode_engine_are_waited_for(make_role: Any) -> None:
    prefill, decode = make_role(FULL), make_role(FULL)
    params = run_prefill(prefill, PROMPT, BLOCKS)
    decode.on_new_request(request(PROMPT, params or {}, "d"))
    assert asked(decode, begin=True) == (True, 0, 1)
    decode.request_finished(request(PROMPT, params or {}, "d"), ([],), is_complete=False)
    assert asked(decode) == (True, 0, 0)


@pytest.mark.parametrize(
    ("state", "shutdown_timeout", "stays"),
    [
        (EngineShutdownState.RUNNING, 60, False),
        (EngineShutdownState.SHUTTING_DOWN, 60, True),
        (EngineShutdownState.SHUTTING_DOWN, 0, False),
    ],
)
def test_an_engine_that_finishes_its_requests_before_it_ends_waits_for_its_holds(
    state: EngineShutdownState, shutdown_timeout: int, stays: bool, make_role: Any
) -> None:
    """VLLM's engine ends at SIGTERM once nothing is left to do, and the blocks end with it."""
    role = make_role(FULL)
    params = run_prefill(role, PROMPT, BLOCKS)
    role._engine.can_wake = True
    role._engine._core = SimpleNamespace(
        shutdown_state=state,
        vllm_config=SimpleNamespace(shutdown_timeout=shutdown_timeout),
        get_weight_version=lambda: "default",
        input_queue=queue.Queue(),
    )
    next_step(role)
    assert role.has_pending_work() is stays
    release(role, params or {})
    next_step(role)
    assert not role.has_pending_work()


def test_the_command_waits_until_nothing_is_held_and_says_so(make_role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    role = make_role(FULL)
    params = run_prefill(role, PROMPT, BLOCKS)
    address = f"127.0.0.1:{role._server.port}"
    runner = CliRunner()
    assert runner.invoke(app, ["ready", address]).exit_code == 0
    left = runner.invoke(app, ["drain", address, "--timeout", "0", "--json"])
    assert left.exit_code == 1
    found = json.loads(left.stdout)
    assert (found["engine_id"], found["draining"], found["holds"], found["requests"]) == ("engine-0", True, 1, 0)
    assert runner.invoke(app, ["ready", address]).exit_code == 1, "the readiness says so"
    monkeypatch.setattr(drain_module.time, "sleep", lambda _: release(role, params or {}))
    done = runner.invoke(app, ["drain", address, "--timeout", "20"])
    assert (done.exit_code, done.stdout) == (0, "engine-0 drains, 0 prompts held, 0 requests under way\n")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", ":5600", "127.0.0.1:99999", "127.0.0.1:²"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    refused = CliRunner().invoke(app, ["drain", address, "--json"])
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["error"]["reason"] == "invalid-setting"


def test_an_engine_with_keys_drains_for_whoever_has_a_trusted_key_and_nobody_else(
    make_role: Any, tmp_path: Path
) -> None:
    for name in ("ours", "foreign"):
        make_keys(tmp_path / name)
    role = make_role(FULL, keys=str(tmp_path / "ours"))
    address = f"127.0.0.1:{role._server.port}"
    runner = CliRunner()
    for keys in ([], ["--keys", str(tmp_path / "foreign")]):
        assert runner.invoke(app, ["drain", address, "--json", *keys]).exit_code == 2
        assert not role._state.holds.is_draining
    assert runner.invoke(app, ["drain", address, "--keys", str(tmp_path / "ours")]).exit_code == 0
    assert role._state.holds.is_draining
