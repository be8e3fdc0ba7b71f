"""Conversations of several turns between two engines, as vLLM's proxy for several turns leads them."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from .engine_pool import Engine, EnginePool, Reference, completion_body, fresh_salt, tokens_of
from .example_proxies import ManyTurnsProxy, tokens_in
from .handoffs import Handoffs, Pair, check_tokens, for_pairs, random_prompt, wait_until_unused
from .offloads import kill

pytestmark = pytest.mark.vllm

SAID = (700, 150, 200)
"""Tokens that the user adds in each turn."""
ANSWERED = 40


def turn(handoffs: Handoffs, prompt: list[int], last: dict[str, Any], salt: str) -> tuple[list[int], dict[str, Any]]:
    """Return the answer to a conversation, and the decode engine's parameters for the next turn, if it gives any."""
    asked = {**last, "do_remote_decode": True, "do_remote_prefill": False}
    prompted = handoffs.prefill.complete(prompt, 1, salt, kv_transfer_params=asked)
    answer = handoffs.decode.complete(prompt, ANSWERED, salt, kv_transfer_params=prompted["kv_transfer_params"])
    return tokens_of(answer)[0], answer.get("kv_transfer_params") or {}


def computed_by(engine: Engine, before: Any) -> int:
    return int((engine.prompt_tokens() - before).computed)


turn_by_turn = for_pairs("gqa-2-1", "gqa-1-2", "gqa-2-2", "gemma-2-1", "granite-1-2")


def converse(
    handoffs: Handoffs, reference: Reference, seed: int, ask: Callable[[list[int], dict[str, Any]], Any]
) -> None:
    """Lead a conversation; ``ask`` returns a turn's answer, and the decode engine's parameters for the next one."""
    logs_before, left_out = handoffs.log_ends(), 1 if handoffs.pair.is_hybrid else 0
    conversation: list[int] = []
    last: dict[str, Any] = {}
    for number, count in enumerate(SAID):
        conversation = conversation + random_prompt(seed + number, count)
        known, before = last.get("remote_num_tokens", 0), handoffs.prefill.prompt_tokens()
        assert known in ((len(conversation) - count - 1, len(conversation) - count) if number else (0,))
        answer, last = ask(conversation, last)
        check_tokens([[answer]], handoffs.pair.model, [conversation], reference)
        assert computed_by(handoffs.prefill, before) == len(conversation) - left_out - known
        conversation = conversation + answer
    handoffs.check_released(logs_before)


@turn_by_turn
def test_the_prefill_engine_computes_only_what_is_new(
    pair: Pair, engine_pool: EnginePool, reference: Reference
) -> None:
    handoffs, salt = Handoffs.of(pair, engine_pool), fresh_salt()
    converse(handoffs, reference, 7000, lambda prompt, last: turn(handoffs, prompt, last, salt))


@turn_by_turn
def test_so_it_does_behind_a_proxy_that_lets_the_decode_engine_stream(
    pair: Pair, engine_pool: EnginePool, reference: Reference
) -> None:
    handoffs, salt = Handoffs.of(pair, engine_pool), fresh_salt()
    proxy = ManyTurnsProxy(handoffs.prefill, handoffs.decode, "127.0.0.1")

    def ask(prompt: list[int], _: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        chunks = proxy.answer("conversation", completion_body(prompt, ANSWERED, salt))
        assert len(chunks) > 1, "the answer came whole"
        return tokens_in(chunks), proxy.held.get("conversation", {})

    converse(handoffs, reference, 7300, ask)


@pytest.mark.ends_engines
@pytest.mark.engines("gqa-tp2", "gqa-tp1", "gqa-tp1-other")
def test_a_decode_engine_that_was_killed_between_turns_costs_a_computation(
    engine_pool: EnginePool, reference: Reference
) -> None:
    prefill, first_decode, decode = (engine_pool.running[name] for name in ("gqa-tp2", "gqa-tp1", "gqa-tp1-other"))
    handoffs = Handoffs(Pair("killed", prefill.name, first_decode.name), prefill, first_decode)
    salt, prompt = fresh_salt(), random_prompt(7100, 300)
    answer, last = turn(handoffs, prompt, {}, salt)
    assert last["remote_num_tokens"] >= len(prompt)
    kill(first_decode, engine_pool)
    conversation = prompt + answer + random_prompt(7101, 100)
    began_at, before = time.monotonic(), prefill.prompt_tokens()
    handoffs = Handoffs(Pair("alive", prefill.name, decode.name), prefill, decode)
    answer, _ = turn(handoffs, conversation, last, salt)
    assert time.monotonic() - began_at < 30.0
    check_tokens([[answer]], "gqa", [conversation], reference)
    moved = prefill.prompt_tokens() - before
    assert (moved.received, moved.cached + moved.computed) == (0, len(conversation))
    wait_until_unused([prefill, decode])
