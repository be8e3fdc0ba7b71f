"""One pair of engines, started once, behind routers of every flow at the same time."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from .concurrent_flow import ConcurrentHandoffs
from .engine_pool import EnginePool, Reference, completion_body, fresh_salt
from .example_proxies import ManyTurnsProxy, tokens_in
from .handoffs import Handoffs, Pair, check_tokens, random_prompt, random_prompts

pytestmark = pytest.mark.vllm

PAIR = Pair("one-way", "gqa-tp1-next", "gqa-tp1")
"""The decode engine holds its answers for the next turn."""
NUM_PROMPTS, NUM_CONVERSATIONS, SAID = 70, 20, (120, 60, 40)
AT_ONCE = 8
ANSWERED = 8
Asked = tuple[list[int], list[int]]
"""A prompt and the tokens of its answer."""


@pytest.mark.engines(PAIR.prefill, PAIR.decode)
def test_two_hundred_interleaved_requests_from_three_routers(engine_pool: EnginePool, reference: Reference) -> None:
    """Tokens are those of one engine alone, the decode engine computes no prompt, and nothing stays held."""
    sequential, concurrent = Handoffs.of(PAIR, engine_pool), ConcurrentHandoffs.of(PAIR, engine_pool)
    many_turns = ManyTurnsProxy(sequential.prefill, sequential.decode, "127.0.0.1")

    def ask(router: Handoffs, prompt: list[int]) -> list[Asked]:
        return [(prompt, router.send(prompt, ANSWERED)[0])]

    def converse(number: int) -> list[Asked]:
        asked, conversation, salt = list[Asked](), list[int](), fresh_salt()
        for turn, count in enumerate(SAID):
            conversation = conversation + random_prompt(8000 + 10 * number + turn, count)
            body = completion_body(conversation, ANSWERED, salt)
            answer = tokens_in(many_turns.answer(str(number), body))
            asked.append((conversation, answer))
            conversation = conversation + answer
        return asked

    requests: list[Callable[[], list[Asked]]] = [partial(converse, number) for number in range(NUM_CONVERSATIONS)]
    for router, seed in ((sequential, 81), (concurrent, 82)):
        requests += [
            partial(ask, router, prompt) for prompt in random_prompts(seed, NUM_PROMPTS, shortest=5, longest=600)
        ]
    random.Random(83).shuffle(requests)
    logs_before = sequential.log_ends()
    before = [engine.prompt_tokens() for engine in (sequential.prefill, sequential.decode)]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        asked = [each for found in threads.map(lambda request: request(), requests) for each in found]
    sequential.check_released(logs_before)
    assert len(asked) == 2 * NUM_PROMPTS + NUM_CONVERSATIONS * len(SAID) == 200
    check_tokens([[answer] for _, answer in asked], PAIR.model, [prompt for prompt, _ in asked], reference)
    moved = [
        engine.prompt_tokens() - then
        for engine, then in zip((sequential.prefill, sequential.decode), before, strict=True)
    ]
    assert moved[0].received > 0, "no turn was loaded from the decode engine"
    assert moved[1].computed <= len(asked)
