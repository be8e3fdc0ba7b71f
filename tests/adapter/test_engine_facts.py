"""What ``GET /ready`` tells ``kvferry check`` of an engine, to whom, and the verdict on engines of vLLM's own parts."""

import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from starlette.testclient import TestClient
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from kvferry.cli.check_pair import Server, Side, judge
from kvferry.handoff.handshake import ask_directory
from kvferry.handoff.wire.trust import Trust, make_keys
from kvferry.harness.launch import free_port
from kvferry.integrations.vllm import facts as engine_facts
from kvferry.integrations.vllm.facts import ASKS, DRAFT, MIDDLEWARE, OPTIONS, ReadyAnswer, facts_of, may_ask, signed_now
from kvferry.integrations.vllm.readiness import Readiness
from kvferry.integrations.vllm.settings import Settings

from .handoff_engine import HandoffEngine
from .handoff_engine import make_engine as make_engine
from .scheduler_requests import FULL
from .vllm_caches import full, window

PROMPT = [(7 * index + 3) % 500 for index in range(64)]
EXPLAINS = "kvferry.integrations.vllm.failed_loads.FailedLoadAnswers"
LOOPBACK, ELSEWHERE = "127.0.0.1", "10.0.0.9"


def config(settings: dict[str, Any]) -> Any:
    """Return the least of vLLM's configuration that an API server needs to answer."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVFerryConnector", kv_connector_extra_config=settings, kv_role="kv_producer"
        ),
        parallel_config=SimpleNamespace(data_parallel_index=0, data_parallel_size_local=1),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )


def answer(settings: dict[str, Any], client: str = LOOPBACK, **headers: str) -> ReadyAnswer:
    """Ask an API server from this address, with both middlewares in the README's order."""
    app = FastAPI()
    origins = {"allowed_origins": ["*"], "allow_credentials": False, "allowed_methods": ["*"], "allowed_headers": ["*"]}
    init_entrypoints_middleware(
        Namespace(middleware=[MIDDLEWARE, EXPLAINS], api_key=None, enable_request_id_headers=False, **origins),
        app,
        ("generate",),
    )
    app.state.engine_client = SimpleNamespace(vllm_config=config(settings))
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    found = TestClient(app, f"http://{LOOPBACK}:8100", client=(client, 50000)).get("/ready", headers=given)
    return msgspec.json.decode(found.content, type=ReadyAnswer)


def test_the_middleware_is_named_as_it_is() -> None:
    assert f"{Readiness.__module__}.{Readiness.__qualname__}" == MIDDLEWARE


def test_an_engine_without_keys_tells_its_own_host_alone(make_role: Any) -> None:
    settings = {"port": make_role(FULL, port=free_port())._server.port}
    asked = {ASKS.replace("-", "_"): ""}
    found = answer(settings, **asked)
    assert found.ready
    assert found.engine is not None
    assert (found.engine.host, found.engine.ports) == (LOOPBACK, (settings["port"],))
    assert answer(settings).engine is None, "a router or a probe does not ask"
    assert answer(settings, ELSEWHERE, **asked).engine is None
    for header in ("x_forwarded_for", "x_forwarded_proto", "x_envoy_attempt_count", "via"):
        assert answer(settings, **asked, **{header: ELSEWHERE}).engine is None, "behind a proxy of this host"
    assert answer(settings, "127.0.0.6", **asked).engine is None, "a side car"
    assert answer(settings, **asked, host="evil.example").engine is None, "a page in a browser"
    for host in ("localhost", "localhost:8100", "[::1]:8100", "127.0.0.1"):
        assert answer(settings, **asked, host=host).engine is not None
    assert answer({}, **asked) == ReadyAnswer(ready=False, reason="invalid-setting")


def test_an_engine_with_keys_tells_whoever_signs_with_a_trusted_one(
    make_role: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, other = make_keys(tmp_path / "keys"), make_keys(tmp_path / "other")
    role = make_role(FULL, keys=str(keys.folder), port=free_port())
    settings, name = {"port": role._server.port, "keys": str(keys.folder)}, ASKS.replace("-", "_")
    signed = signed_now(keys)
    found = answer(settings, ELSEWHERE, **{name: signed})
    assert found.engine is not None
    assert (found.engine.key, found.engine.trusted) == (keys.fingerprint, (keys.fingerprint,))
    told_at, _, signature = signed.partition(".")
    forged = ["", signed_now(other), f"{int(told_at) + 1}.{signature}", f"{told_at}.{'0' * 144}", "9" * 5000, "1."]
    assert [answer(settings, **{name: each}).engine for each in forged] == [None] * len(forged)
    assert not may_ask(Trust(keys), LOOPBACK, [(ASKS.encode(), b"\xe4" * 146)])
    later = time.time() + 2 * engine_facts.CLOCK_SECONDS
    monkeypatch.setattr(engine_facts.time, "time", lambda: later)
    assert answer(settings, **{name: signed}).engine is None, "a question that somebody has recorded"


def side(engine: HandoffEngine, name: str, role: str) -> Side:
    """Ask an engine of this process as the command does."""
    settings = Settings(port=engine.connector._scheduler._server.port)
    vllm_config = engine.scheduler.vllm_config
    vllm_config.kv_transfer_config.kv_role = role
    found = facts_of(vllm_config, settings, None)
    told = msgspec.json.decode(msgspec.json.encode(ReadyAnswer(ready=True, engine=found)), type=ReadyAnswer)
    assert told.engine == found
    directory = ask_directory(LOOPBACK, found.ports[0], "kvferry check", 10.0)
    return Side(Server.parse(name, "http://127.0.0.1:1"), found, "", Trust(), LOOPBACK, (directory,))


def test_engines_that_move_a_prompt_are_found_to_fit(make_engine: Any) -> None:
    layers = {"0": full(1), "1": window(1), "2": full(1)}
    prefill, decode = make_engine(layers), make_engine(layers)
    found = judge(side(prefill, "prefill engine", "kv_producer"), side(decode, "decode engine", "kv_consumer"))
    assert [problem.error for problem in found.problems] == []
    assert found.route is not None
    assert found.route.tokens > 0
    held = prefill.ask("a", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    assert not decode.ask("b", PROMPT, held.params).has_failed
    # Every option that the table names is one of this vLLM.
    assert {*OPTIONS, DRAFT} <= facts_of(prefill.scheduler.vllm_config, Settings(port=1), None).options.keys()


def test_a_draft_model_on_one_side_is_found_before_a_request_fails(make_engine: Any) -> None:
    prefill = make_engine({"0": full(1), "1": full(1)})
    decode = make_engine({"0": full(1), "1": full(1), "draft": full(1)})
    sides = side(prefill, "prefill engine", "kv_producer"), side(decode, "decode engine", "kv_consumer")
    drafting = {**sides[1].facts.options, DRAFT: "method eagle, model m, num_speculative_tokens 2"}
    changed = msgspec.structs.replace(sides[1].facts, options=drafting)
    decode_side = Side(sides[1].server, changed, "", sides[1].trust, LOOPBACK, sides[1].directories)
    [problem] = judge(sides[0], decode_side).problems
    assert problem.error.reason == "layer-mismatch"
    assert [(each.option, each.prefill) for each in problem.options] == [(DRAFT, "none")]
    held = prefill.ask("a", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    assert decode.ask("b", PROMPT, held.params).has_failed
