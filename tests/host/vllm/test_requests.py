"""Requests out of the ordinary: samples, prefix hits, very short prompts, aborts, preemption, rejection."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from .engine_pool import EnginePool, Reference, RequestFailed, completion_body, fresh_salt
from .handoffs import (
    Handoffs,
    Pair,
    check_prefix_hits,
    check_tokens,
    for_pairs,
    random_prompt,
    random_prompts,
    streaming,
    wait_for_usage,
)

pytestmark = pytest.mark.vllm


@for_pairs("gqa-2-1", "gqa-1-2", "mla-2-1")
@pytest.mark.parametrize("prefill_samples", [1, 2])
def test_parallel_samples(pair: Pair, prefill_samples: int, engine_pool: EnginePool, reference: Reference) -> None:
    """``n`` of 2 at the decode engine; an unmodified router sends it to the prefill engine too.

    vLLM takes no samples at temperature 0; of the most likely token alone every sample is the greedy one.
    """
    handoffs = Handoffs.of(pair, engine_pool)
    logs_before, prompts = handoffs.log_ends(), random_prompts(seed=4, count=6, shortest=9, longest=500)
    sampling = {"temperature": 1.0, "top_k": 1}

    def send(prompt: Sequence[int]) -> list[list[int]]:
        salt = fresh_salt()
        params = handoffs.prefill.prefill(prompt, salt, n=prefill_samples, **sampling)
        return handoffs.decode.decode(prompt, params, 8, salt, n=2, **sampling)

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(send, prompts))
    handoffs.check_released(logs_before)
    assert [len(answer) for answer in answers] == [2] * len(prompts)
    check_tokens(answers, pair.model, prompts, reference)


@for_pairs("gqa-2-1", "gqa-1-2", "gqa-dp2-1")
def test_prefix_hits_on_the_decode_side(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    check_prefix_hits(Handoffs.of(pair, engine_pool), reference)


@for_pairs("gqa-128-64")
def test_a_prefix_hit_within_a_block_of_the_prefill_side(
    pair: Pair, engine_pool: EnginePool, reference: Reference
) -> None:
    """Blocks of 64 tokens on the decode side: the hit ends, and the load begins, inside a block of 128."""
    handoffs = Handoffs.of(pair, engine_pool)
    logs_before, salt = handoffs.log_ends(), fresh_salt()
    first = random_prompt(52, 513)
    for prompt, expected in [(first, (0, 513, 0)), (first[:330] + random_prompt(53, 200), (320, 210, 0))]:
        before = handoffs.decode.prompt_tokens()
        check_tokens([handoffs.send(prompt, salt=salt)], pair.model, [prompt], reference)
        moved = handoffs.decode.prompt_tokens() - before
        assert (moved.cached, moved.received, moved.computed) == expected
    handoffs.check_released(logs_before)


@for_pairs("gqa-2-1", "mla-1-1")
def test_prompts_around_one_block(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    handoffs = Handoffs.of(pair, engine_pool)
    block_size = handoffs.decode.block_size
    prompts = [random_prompt(60 + n, n) for n in (1, 2, 3, block_size - 1, block_size, block_size + 1)]
    logs_before = handoffs.log_ends()
    answers = handoffs.send_all(prompts)
    handoffs.check_released(logs_before)
    check_tokens(answers, pair.model, prompts, reference)


@for_pairs("gqa-2-1")
@pytest.mark.parametrize("moment", ["while loading", "while decoding"])
def test_the_client_goes_away(pair: Pair, moment: str, engine_pool: EnginePool, reference: Reference) -> None:
    handoffs = Handoffs.of(pair, engine_pool)
    prompt, salt, logs_before = random_prompt(70, 700), fresh_salt(), handoffs.log_ends()
    body = completion_body(prompt, 3000, salt, stream=True)
    with handoffs.faults({"hang": True} if moment == "while loading" else {"delay_seconds": 0.1}):
        body["kv_transfer_params"] = handoffs.prefill.prefill(prompt, salt)
        with streaming(handoffs.decode, body) as connection:
            if moment == "while decoding":
                assert connection.getresponse().readline().startswith(b"data:")
            else:
                wait_for_usage(handoffs.decode)
        handoffs.check_released(logs_before)
    check_tokens([handoffs.send(prompt)], pair.model, [prompt], reference)


@for_pairs("gqa-1-1")
def test_preempted_requests_are_computed_again(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """The decode engine has 63 usable blocks; 14 requests of 4 blocks all soon want a fifth.

    They must be at it together, which a crowded machine does not always grant: up to four waves are sent.
    """
    handoffs = Handoffs.of(pair, engine_pool)
    logs_before, before = handoffs.log_ends(), handoffs.decode.num_preemptions()
    for wave in range(4):
        prompts = random_prompts(seed=80 + wave, count=14, shortest=505, longest=511)
        with ThreadPoolExecutor(len(prompts)) as threads:
            params = list(threads.map(handoffs.prefill.prefill, prompts))
            pairs = zip(prompts, params, strict=True)
            answers = list(threads.map(lambda each: handoffs.decode.decode(*each, 100), pairs))
        handoffs.check_released(logs_before)
        check_tokens(answers, pair.model, prompts, reference)
        if handoffs.decode.num_preemptions() > before:
            return
    pytest.fail("no request was preempted in four waves")


@for_pairs("gqa-1-1")
@pytest.mark.parametrize("reason", ["prompt too long", "invalid sampling"])
def test_a_request_that_the_decode_engine_rejects(pair: Pair, reason: str, engine_pool: EnginePool) -> None:
    """A rejected request never reaches the decode engine's scheduler; the prefill engine must free its blocks."""
    handoffs = Handoffs.of(pair, engine_pool)
    num_tokens = handoffs.decode.settings.max_model_len + 50 if reason == "prompt too long" else 300
    prompt, logs_before = random_prompt(90, num_tokens), handoffs.log_ends()
    params = handoffs.prefill.prefill(prompt)
    wait_for_usage(handoffs.prefill)
    with pytest.raises(RequestFailed) as failure:
        handoffs.decode.decode(prompt, params, n=1 if reason == "prompt too long" else 2)
    assert failure.value.status == 400
    handoffs.check_released(logs_before)
