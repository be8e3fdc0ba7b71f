"""Engines that must refuse to start or to load from another, each with one clear error."""

import re
import socket
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from kvferry.errors import Reason
from kvferry.harness.child_process import LaunchError
from kvferry.harness.launch import HOST, stop_servers, wait_until_ready

from ...matrix_refusals import REFUSALS
from .engine_pool import Engine, EnginePool, Reference, RequestFailed
from .handoffs import check_tokens, random_prompt, wait_until_unused

pytestmark = pytest.mark.vllm
Recorder = Callable[[str, str], None]
NOTHING = "nothing refused it"


@pytest.fixture
def record_refusal(record_property: Callable[[str, object], None]) -> Recorder:
    """Return a function that keeps which reasons of the list an engine's log names; the last word counts."""

    def record(name: str, log: str) -> None:
        lines = [line for line in log.splitlines() if reasons_in(line) != NOTHING]
        if name in {refusal.name for refusal in REFUSALS}:
            record_property("refused", {"name": name, "found": reasons_in(log), "message": lines[0] if lines else ""})

    return record


def reasons_in(log: str) -> str:
    """Return the reason codes in an engine's log, each once."""
    return ", ".join(dict.fromkeys(re.findall(rf"\[({'|'.join(Reason)})\]", log))) or NOTHING


@pytest.mark.engines("gqa-tp1-nixl", "mla-tp1", "mla-tp1-other")
def test_a_foreign_model_is_refused_at_the_handshake(
    engine_pool: EnginePool, reference: Reference, record_refusal: Recorder
) -> None:
    """One decode engine fails the request, the other (``recompute``) computes it."""
    prefill = engine_pool.running["gqa-tp1-nixl"]
    failing, recomputing = engine_pool.running["mla-tp1"], engine_pool.running["mla-tp1-other"]
    prompt = random_prompt(102, 300)
    refuse_a_load(prefill, failing, record_refusal, "another-model")
    assert "the engines do not serve the same cache" in failing.log()
    check_tokens([recomputing.decode(prompt, prefill.prefill(prompt))], "mla", [prompt], reference)
    wait_until_unused([prefill, failing, recomputing])


@pytest.mark.matrix
@pytest.mark.engines("gqa-tp1-nixl", "gqa-bfloat16")
def test_another_dtype_is_refused_at_the_handshake(engine_pool: EnginePool, record_refusal: Recorder) -> None:
    prefill, decode = engine_pool.running["gqa-tp1-nixl"], engine_pool.running["gqa-bfloat16"]
    refuse_a_load(prefill, decode, record_refusal, "another-dtype")
    assert "kv_dtype: prefill has 'float32', decode has 'bfloat16'" in decode.log()
    wait_until_unused([prefill, decode])


def refuse_a_load(prefill: Engine, decode: Engine, record_refusal: Recorder, name: str) -> None:
    """One request must fail for the reason that the list of refusals names."""
    refusal = next(refusal for refusal in REFUSALS if refusal.name == name)
    prompt, log_before = random_prompt(104, 300), len(decode.log())
    record_refusal(name, "")
    with pytest.raises(RequestFailed) as failure:
        decode.decode(prompt, prefill.prefill(prompt))
    record_refusal(name, decode.log()[log_before:])
    assert failure.value.status == 500
    assert f"[{refusal.reason}]" in decode.log()[log_before:]


WRONG_SETTINGS = ("unknown-key", "mla-cross-layer")


@pytest.mark.parametrize(
    "names",
    [WRONG_SETTINGS, pytest.param(("port", "concurrent-ranks"), marks=pytest.mark.matrix)],
    ids="-and-".join,
)
def test_wrong_settings_are_refused_at_start(
    names: Sequence[str], engine_pool: EnginePool, record_refusal: Recorder
) -> None:
    """The engines start at once, to save time; each must end by itself and say why."""
    with closing(socket.socket()) as listener:
        listener.bind((HOST, 0))
        listener.listen()
        cases: dict[str, tuple[str, dict[str, Any], str]] = {
            "unknown-key": ("gqa-tp1", {"lease_second": 60}, "Did you mean 'lease_seconds'? [unknown-setting]"),
            "port": ("gqa-tp1", {"port": listener.getsockname()[1]}, "[port-in-use]"),
            "concurrent-ranks": ("gqa-dp2", {"bootstrap_port": 8998}, "[unsupported]"),
            "mla-cross-layer": ("mla-tp1", {}, "[kernel-cannot-read-layout]"),
        }
        servers = {}
        try:
            for name in names:
                engine, settings, _ = cases[name]
                base = engine_pool.settings(engine)
                # VLLM_KV_CACHE_LAYOUT, which wins over the connector's wish
                layout = "BHLNC" if name == "mla-cross-layer" else None
                changed = replace(base, connector_settings={**base.connector_settings, **settings}, layout=layout)
                servers[name] = engine_pool.start(f"refused-{name}", changed)
            for name, server in servers.items():
                record_refusal(name, "")
                with pytest.raises(LaunchError):
                    wait_until_ready([server], timeout_seconds=200)
                log = server.process.log_path.read_text(errors="replace")
                record_refusal(name, log)
                assert server.process.exit_status() not in (None, 0)
                assert cases[name][2] in log, name
        finally:
            stop_servers(list(servers.values()))
