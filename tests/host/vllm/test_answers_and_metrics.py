"""What the two sides say of a transfer: the answer's usage, /metrics, and the error for an appended token."""

import json
import time
from typing import Any

import pytest

from .engine_pool import Engine, EnginePool, RequestFailed, completion_body, fresh_salt, post, tokens_of
from .handoffs import Handoffs, Pair, random_prompt, streaming, submission_bytes, wait_until_unused

PAIR = Pair("gqa-told", "gqa-tp2", "gqa-tp1")
pytestmark = [pytest.mark.vllm, pytest.mark.engines(PAIR.prefill, PAIR.decode)]
NUM_TOKENS, BLOCK_TOKENS = 300, 128
PREFILL_CACHED = "remote_prefill_cached_tokens"
"""What vLLM adds to the prefill engine's parameters, for the decode engine's usage."""


@pytest.fixture
def handoffs(engine_pool: EnginePool) -> Handoffs:
    return Handoffs.of(PAIR, engine_pool)


def refusal(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """Return the error that answers a request; that of a stream is in an event, behind HTTP 200."""
    if not body["stream"]:
        with pytest.raises(RequestFailed) as failed:
            post(f"{engine.server.url}/v1/completions", body)
        error: dict[str, Any] = json.loads(failed.value.text)["error"]
        assert error["code"] == failed.value.status
        return error
    with streaming(engine, body) as connection:
        events = connection.getresponse().read().decode().split("\n\n")
    [error] = [json.loads(event.removeprefix("data: "))["error"] for event in events if '"error"' in event]
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_with_the_first_token_appended_is_refused(stream: bool, handoffs: Handoffs) -> None:
    """A proxy may append the prefill engine's token (vllm#50558). The engine refuses; the hold ends at once."""
    prompt, salt, decode = random_prompt(4000 + stream, NUM_TOKENS), fresh_salt(), handoffs.decode
    answer = handoffs.prefill.complete(prompt, 1, salt, kv_transfer_params={"do_remote_decode": True})
    [[token]] = tokens_of(answer)
    num_loads, params = len(decode.loads()), answer["kv_transfer_params"]
    body = completion_body([*prompt, token], 8, salt, stream=stream, kv_transfer_params=params)
    error = refusal(decode, body)
    assert (error["code"], error["reason"], error["retry"]) == (400, "invalid-request", False)
    [load] = decode.loads()[num_loads:]
    assert load["error"] == "invalid-request"
    assert f"the first {NUM_TOKENS + 1} of {NUM_TOKENS + 1} prompt tokens of " in load["message"]
    assert f" are not the {NUM_TOKENS} tokens that " in load["message"]
    assert "append no generated token" in load["message"]
    assert not load["bytes"]
    wait_until_unused([handoffs.prefill, decode])


def test_cached_tokens_are_those_of_the_prefill_engine(handoffs: Handoffs) -> None:
    """A prompt that the prefill engine has computed before; where the parameters do not say so, all that was loaded."""
    prompt, logs_before = random_prompt(4010, NUM_TOKENS), handoffs.log_ends()
    prefill_salt, whole_blocks = fresh_salt(), NUM_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    cached = []
    for is_told in (True, True, False):
        params = handoffs.prefill.prefill(prompt, prefill_salt)
        if not is_told:
            del params[PREFILL_CACHED]
        before = handoffs.decode.prompt_tokens()
        usage = handoffs.decode.complete(prompt, 8, kv_transfer_params=params)["usage"]
        assert (handoffs.decode.prompt_tokens() - before).received == NUM_TOKENS
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, whole_blocks, NUM_TOKENS]
    handoffs.check_released(logs_before)


def test_metrics_of_both_sides(handoffs: Handoffs) -> None:
    """The decode engine counts the load, its bytes and its descriptors; the prefill engine counts the hold."""
    prefill, decode, num_loads = handoffs.prefill, handoffs.decode, len(handoffs.decode.loads())
    before = [engine.server.metrics() for engine in (prefill, decode)]

    def grown() -> list[dict[str, float]]:
        """Return what each side has counted since, without what did not change."""
        found = [engine.server.metrics() for engine in (prefill, decode)]
        return [
            {name: grew for name in after if name.startswith("kvferry:") and (grew := after[name] - start.get(name, 0))}
            for after, start in zip(found, before, strict=True)
        ]

    def wait_for(side: int, name: str, value: float) -> None:
        deadline = time.monotonic() + 10.0
        while (found := grown()[side].get(name, 0)) != value:
            assert time.monotonic() < deadline, (name, found)
            time.sleep(0.1)

    prompt, salt = random_prompt(4020, NUM_TOKENS), fresh_salt()
    params = prefill.prefill(prompt, salt)
    wait_for(0, "kvferry:holds", 1)
    decode.decode(prompt, params, 8, salt)
    wait_for(0, "kvferry:holds", 0)
    wait_for(1, "kvferry:loads_total", 1)
    of_prefill, of_decode = grown()
    [load] = decode.loads()[num_loads:]
    assert load["sources"] == prefill.tp
    assert load["descriptors"] >= prefill.tp
    assert of_decode.pop("kvferry:transfer_bytes_sum") == prefill.tp * submission_bytes(handoffs, NUM_TOKENS)
    assert of_decode.pop("kvferry:transfer_descriptors_sum") == load["descriptors"]
    for name in ("kvferry:transfer_bytes_count", "kvferry:transfer_descriptors_count", "kvferry:loads_total"):
        assert of_decode.pop(name) == 1
    assert not [name for name in of_decode if name.endswith("_total")], "nothing failed"
    assert of_prefill == {}, "a prefill engine counts no loads, bytes or descriptors"
