"""Engines with keys and without behind vLLM's example proxies; those for several turns are in ``test_turns.py`` too."""

import pytest

from .engine_pool import EnginePool, Reference, RequestFailed, completion_body, fresh_salt
from .example_proxies import NOTHING_HELD, ManyTurnsProxy, OneTurnProxy, prefilled, streamed, tokens_in
from .handoffs import Handoffs, Pair, check_tokens, for_pairs, random_prompt

pytestmark = pytest.mark.vllm


@for_pairs("gqa-2-1", "gemma-2-1")
def test_a_proxy_for_one_turn_moves_the_prompt(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """Without keys, and with them (Gemma): it changes nothing that is signed."""
    handoffs, prompt = Handoffs.of(pair, engine_pool), random_prompt(7200, 500)
    logs_before, before = handoffs.log_ends(), handoffs.decode.prompt_tokens()
    proxy = OneTurnProxy(handoffs.prefill, handoffs.decode)
    options = {"include_usage": True}
    chunks = proxy.answer(completion_body(prompt, 8, fresh_salt(), stream_options=options))
    check_tokens([[tokens_in(chunks)]], pair.model, [prompt], reference)
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert (handoffs.decode.prompt_tokens() - before).computed <= 1
    handoffs.check_released(logs_before)


@for_pairs("gqa-2-1", "gemma-2-1")
def test_a_proxy_that_writes_hosts_must_write_a_signed_one_as_it_is(
    pair: Pair, engine_pool: EnginePool, reference: Reference
) -> None:
    handoffs, prompt = Handoffs.of(pair, engine_pool), random_prompt(7201, 300)
    has_keys = "keys" in handoffs.decode.settings.connector_settings
    assert has_keys == (pair.model == "gemma")
    logs_before, before = handoffs.log_ends(), handoffs.decode.prompt_tokens()
    body = completion_body(prompt, 8, fresh_salt())
    if has_keys:
        params = prefilled(handoffs.prefill, body, NOTHING_HELD, "refused")
        with pytest.raises(RequestFailed, match="permission-denied") as refused:
            list(streamed(handoffs.decode, body, {**params, "remote_host": "localhost"}, "refused"))
        assert refused.value.status == 400
        chunks = list(streamed(handoffs.decode, body, params, "as it was"))
    else:
        chunks = ManyTurnsProxy(handoffs.prefill, handoffs.decode, "localhost").answer("conversation", body)
    check_tokens([[tokens_in(chunks)]], pair.model, [prompt], reference)
    assert (handoffs.decode.prompt_tokens() - before).computed <= 1
    handoffs.check_released(logs_before)
