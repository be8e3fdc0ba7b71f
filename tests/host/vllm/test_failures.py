"""What goes wrong: garbage on the control port, a load of states that fails, a killed prefill engine."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from kvferry.handoff.messages import Handle, Noted, Release
from kvferry.handoff.wire.client import ask

from .engine_pool import CONNECTOR_SETTINGS, EnginePool, Reference, RequestFailed
from .handoffs import (
    ROUNDED_WAVE,
    Handoffs,
    Pair,
    check_tokens,
    for_pairs,
    random_prompt,
    submission_bytes,
    wait_until_unused,
)
from .offloads import kill

pytestmark = pytest.mark.vllm


@for_pairs("gqa-1-1")
def test_garbage_leaves_the_listener_alive(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    handoffs = Handoffs.of(pair, engine_pool)
    prompt = random_prompt(101, 300)
    params = handoffs.prefill.prefill(prompt)
    host, port = params["remote_host"], params["remote_port"]
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.sendall(os.urandom(4096))
    for data in (b"", os.urandom(1000), msgspec.msgpack.encode({"type": "renew"})):
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.sendall(len(data).to_bytes(4, "big") + (7).to_bytes(8, "big") + data)
            with connection.makefile("rb") as answers:
                header = answers.read(12)
                refusal = msgspec.msgpack.decode(answers.read(int.from_bytes(header[:4], "big")))
            assert header[4:] == (7).to_bytes(8, "big")
            assert (refusal["type"], refusal["reason"]) == ("refusal", "malformed-message")
    handoffs.decode.set_faults(None)  # forget the peer, so that the next request shakes hands again
    check_tokens([handoffs.decode.decode(prompt, params)], pair.model, [prompt], reference)
    check_tokens([handoffs.send(prompt)], pair.model, [prompt], reference)


@contextmanager
def damage(handoffs: Handoffs, params: dict[str, Any], prompt: Sequence[int]) -> Iterator[None]:
    """Exchange the halves of what is written: only the digests show it, when all of it has landed, states included."""
    half = submission_bytes(handoffs, len(prompt)) // 128 * 64
    handoffs.prefill.set_faults({"swap": {"first": 0, "second": half, "length": half}})
    try:
        yield
    finally:
        handoffs.prefill.set_faults(None)


@contextmanager
def end_the_hold(handoffs: Handoffs, params: dict[str, Any], prompt: Sequence[int]) -> Iterator[None]:
    handle = Handle(params["remote_request_id"], int(params["kvferry"]["generation"], 16))
    release = Release(params["kvferry"]["epoch"], (handle,))
    assert isinstance(ask(params["remote_host"], params["remote_port"], release, 10.0), Noted)
    wait_until_unused([handoffs.prefill])
    yield


def both_policies(*names: str) -> list[Any]:
    """Return pairs of these engines, of which the second one recomputes, in both directions."""
    return [pytest.param(*pair, id=pair[1], marks=pytest.mark.engines(*names)) for pair in (names, names[::-1])]


IN_MATRIX = [
    pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.matrix])
    for each in both_policies("qwennext-tp1", "qwennext-tp1-other")
]


@pytest.mark.parametrize(("prefill", "decode"), [*both_policies("granite-tp1", "granite-tp2"), *IN_MATRIX])
def test_a_failed_load_of_states_is_an_error_or_is_computed(
    prefill: str, decode: str, engine_pool: EnginePool, reference: Reference
) -> None:
    """Of Mamba, and in the matrix of a gated delta net: what has landed is used by nobody, and no block stays."""
    handoffs = Handoffs.of(Pair("states", prefill, decode), engine_pool)
    recomputes = handoffs.decode.settings.load_failure_policy == "recompute"
    prompts = ROUNDED_WAVE[1:3] if handoffs.pair.is_rounded else [random_prompt(401, 500), random_prompt(402, 77)]
    for harm, reasons in ((damage, {"integrity-mismatch"}), (end_the_hold, {"lease-expired", "source-changed"})):
        for prompt in prompts:
            params = handoffs.prefill.prefill(prompt)
            with harm(handoffs, params, prompt):
                before = handoffs.decode.prompt_tokens()
                if recomputes:
                    check_tokens([handoffs.decode.decode(prompt, params)], handoffs.pair.model, [prompt], reference)
                    assert (handoffs.decode.prompt_tokens() - before).computed == len(prompt)
                else:
                    with pytest.raises(RequestFailed) as failed:
                        handoffs.decode.decode(prompt, params)
                    assert failed.value.status == 500
            assert handoffs.decode.loads()[-1]["error"] in reasons
            wait_until_unused([handoffs.prefill, handoffs.decode])
            # In the blocks that had it.
            check_tokens([handoffs.send(prompt)], handoffs.pair.model, [prompt], reference)


@pytest.mark.ends_engines
@pytest.mark.engines("gqa-tp2", "gqa-tp1-nixl", "gqa-tp2-other")
def test_the_prefill_engine_is_killed_before_the_load(engine_pool: EnginePool, reference: Reference) -> None:
    """One decode engine fails its requests, the other (``recompute``) computes them; both go on working."""
    prefill = engine_pool.running["gqa-tp2"]
    failing, recomputing = engine_pool.running["gqa-tp1-nixl"], engine_pool.running["gqa-tp2-other"]
    prompts = [random_prompt(103 + index, 260) for index in range(2)]
    # One of them has met the prefill engine before, the other has not.
    recomputing.decode(prompts[0], prefill.prefill(prompts[0]))
    for_failing = [prefill.prefill(prompt) for prompt in prompts]
    for_recomputing = [prefill.prefill(prompt) for prompt in prompts]
    kill(prefill, engine_pool)
    killed_at = time.monotonic()
    for prompt, params in zip(prompts, for_failing, strict=True):
        with pytest.raises(RequestFailed):
            failing.decode(prompt, params)
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(recomputing.decode, prompts, for_recomputing))
    check_tokens(answers, "gqa", prompts, reference)
    assert time.monotonic() - killed_at < 2 * CONNECTOR_SETTINGS["load_timeout_seconds"]
    wait_until_unused([failing, recomputing])
    pair = Handoffs(Pair("alive", recomputing.name, failing.name), recomputing, failing)
    check_tokens(pair.send_all(prompts), "gqa", prompts, reference)
