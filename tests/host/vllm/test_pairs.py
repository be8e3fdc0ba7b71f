"""Every pair of engines: the same tokens as one engine alone, the cache received and not recomputed, nothing left over.

Each pair is also seen to fail: with two blocks swapped, or a run of bytes left out, inside the transport.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.harness.launch import cache_block_size

from .engine_pool import BASE_MODEL, OWN_ADAPTER, ROUNDED_STEP, EnginePool, Reference, RequestFailed, tokens_of
from .handoffs import (
    COMPARED_PAIRS,
    FIRST_WAVE,
    NAMED_TOKENS,
    ROUNDED_WAVE,
    SECOND_WAVE,
    Handoffs,
    Pair,
    check_adapter_is_refused,
    check_tokens,
    different_prompts,
    for_pairs,
    random_prompt,
    random_prompts,
    submission_bytes,
    wait_until_unused,
)

pytestmark = pytest.mark.vllm
Recorder = Callable[[str, object], None]


@for_pairs(*COMPARED_PAIRS)
def test_tokens_are_those_of_one_engine_alone(
    pair: Pair, engine_pool: EnginePool, reference: Reference, record_property: Recorder
) -> None:
    handoffs, traffic = Handoffs.of(pair, engine_pool), Counter[str]()
    for prompts in (ROUNDED_WAVE,) if pair.is_rounded else (FIRST_WAVE, SECOND_WAVE):
        reference.tokens(pair.model, prompts)
        logs_before = handoffs.log_ends()
        before = handoffs.decode.prompt_tokens()
        answers = handoffs.send_all(prompts)
        handoffs.check_released(logs_before)
        moved = handoffs.decode.prompt_tokens() - before
        num_different = len(different_prompts(answers, pair.model, prompts, reference))
        traffic.update(requests=len(prompts), identical=len(prompts) - num_different)
        traffic.update(received=moved.received, computed=moved.computed)
        record_property("traffic", dict(traffic))
        check_tokens(answers, pair.model, prompts, reference)
        assert moved.computed <= len(prompts)
        assert moved.received + moved.computed == sum(len(prompt) for prompt in prompts)
    assert f"using the {pair.transport} transport" in handoffs.prefill.log()


@for_pairs("gemma-2-1")
def test_an_engine_with_keys_loads_nothing_that_nobody_has_signed(pair: Pair, engine_pool: EnginePool) -> None:
    """All tests of the keyed models show that signed parameters load."""
    handoffs, prompt = Handoffs.of(pair, engine_pool), random_prompt(77, 200)
    params, logs_before = handoffs.prefill.prefill(prompt), handoffs.log_ends()
    assert params["kvferry"]["signature"]
    unsigned = params | {"kvferry": params["kvferry"] | {"signature": ""}}
    with pytest.raises(RequestFailed):
        handoffs.decode.decode(prompt, unsigned, 4)
    assert "permission-denied" in handoffs.decode.log()[logs_before[1] :]
    logs_before = handoffs.log_ends()
    handoffs.decode.decode(prompt, params, 4)
    handoffs.check_released(logs_before)


@for_pairs()
def test_what_one_request_moves(pair: Pair, engine_pool: EnginePool, record_property: Recorder) -> None:
    """A request of 1000 tokens, alone: each decode rank loads it once, and the ranks' logs say how."""
    handoffs = Handoffs.of(pair, engine_pool)
    handoffs.send(random_prompt(NAMED_TOKENS, NAMED_TOKENS), 1)
    loads = [loads[-1] for loads in handoffs.decode.loads_of_ranks()]
    num_bytes = sum(load["bytes"] for load in loads)
    record_property("layouts", [engine.layout for engine in (handoffs.prefill, handoffs.decode)])
    record_property("block_sizes", [cache_block_size(each.server.url) for each in (handoffs.prefill, handoffs.decode)])
    record_property("descriptors", sum(load["descriptors"] for load in loads))
    record_property("bytes", num_bytes)
    record_property("transport", ", ".join(sorted({load["transport"] for load in loads})))
    assert len({load["remote_request_id"] for load in loads}) == 1
    assert {load["error"] for load in loads} == {None}
    assert {load["transport"] for load in loads} == {pair.transport}
    assert {load["layout"] for load in loads} == {handoffs.decode.layout}


def faults_of(pair: Pair, handoffs: Handoffs) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return for each negative control a prompt length and the :class:`FaultPlan` that spoils such prompts.

    A prompt of a block and a bit has two blocks of which swapping moves nearly all tokens out of the prompt. (Blocks
    that are both full may be swapped without harm to the tokens: attention does not care where in the cache a key and
    its value lie.) MLA pages of two layers are swapped for the same reason: its last block is moved without the part
    that has no token. Of other caches the halves are swapped. Of every cache a descriptor is left out, of a prompt so
    short that its first descriptor matters.
    """
    block_size = handoffs.decode.block_size
    left_out: dict[str, Any] = {"drop": 0}
    if not handoffs.is_plain:
        num_tokens = ROUNDED_STEP + 1 if pair.is_rounded else 200
        # Of whole numbers: the pieces of broken ones can be NaN.
        whole = submission_bytes(handoffs, num_tokens) // 64 * 64
        swap = {"swap": {"first": 0, "second": whole // 2, "length": whole // 2}}
        if not pair.is_hybrid:
            return {"swap": (num_tokens, swap), "drop": (block_size - 28, left_out)}
        return {"swap": (num_tokens, swap), "drop": (2 * ROUNDED_STEP + 1 if pair.is_rounded else 700, left_out)}
    if pair.is_mla:
        per_layer = submission_bytes(handoffs, 40) // 4
        page = submission_bytes(handoffs, block_size) // 4
        swap = {"swap": {"first": 0, "second": 2 * per_layer, "length": page}}
        return {"swap": (40, swap), "drop": (block_size, left_out)}
    block = submission_bytes(handoffs, block_size)
    swap = {"swap": {"first": 0, "second": block, "length": block}}
    return {"swap": (block_size + 12, swap), "drop": (block_size - 28, left_out)}


@for_pairs(*COMPARED_PAIRS)
@pytest.mark.parametrize("fault", ["swap", "drop"])
def test_a_fault_in_the_transport_is_seen(
    pair: Pair, fault: str, engine_pool: EnginePool, reference: Reference
) -> None:
    handoffs = Handoffs.of(pair, engine_pool)
    num_tokens, plan = faults_of(pair, handoffs)[fault]
    count = 24 if fault == "drop" and num_tokens < 100 else 6
    prompts = random_prompts(seed=3, count=count, shortest=num_tokens, longest=num_tokens)
    with handoffs.faults(plan):
        answers = handoffs.send_all(prompts)
    with pytest.raises(AssertionError, match="tokens differ"):
        check_tokens(answers, pair.model, prompts, reference)
    check_tokens(handoffs.send_all(prompts), pair.model, prompts, reference)


@pytest.mark.matrix
@pytest.mark.engines("qwennext-reference", "qwennext-tp2-reference")
def test_the_tokens_of_bfloat16_depend_on_the_number_of_ranks(engine_pool: EnginePool) -> None:
    """Of engines without a connector. So no tokens are compared of a cache that moves between unequal sizes."""
    alone, in_ranks = (engine_pool.running[f"qwennext-{name}reference"] for name in ("", "tp2-"))
    answers = [[tokens_of(engine.complete(prompt)) for prompt in ROUNDED_WAVE] for engine in (alone, in_ranks)]
    again = [tokens_of(alone.complete(prompt)) for prompt in ROUNDED_WAVE]
    num_equal = sum(one == other for one, other in zip(*answers, strict=True))
    print(f"{num_equal} of {len(ROUNDED_WAVE)} prompts have the same tokens at TP 1 and TP 2")
    assert answers[0] == again
    assert num_equal < len(ROUNDED_WAVE)


@for_pairs("lora-2-1")
def test_the_tokens_and_the_cache_are_those_of_the_adapter(
    pair: Pair, engine_pool: EnginePool, reference: Reference
) -> None:
    """A cache of the adapter is refused for a request of the model alone, whose tokens are others."""
    handoffs, prompts = Handoffs.of(pair, engine_pool), SECOND_WAVE
    plain = engine_pool.running[f"{pair.model}-reference"]
    with_adapter = reference.tokens(pair.model, prompts)
    without = [tokens_of(plain.complete(prompt, model=BASE_MODEL))[0] for prompt in prompts]
    assert all(tokens != others for tokens, others in zip(with_adapter, without, strict=True))
    for prompt, tokens in zip(prompts, without, strict=True):
        params = handoffs.prefill.prefill(prompt, "salt", model=BASE_MODEL)
        assert handoffs.decode.decode(prompt, params, salt="salt", model=BASE_MODEL) == [tokens]
    params = handoffs.prefill.prefill(prompts[0], "other salt")
    with pytest.raises(RequestFailed):
        handoffs.decode.decode(prompts[0], params, salt="other salt", model=BASE_MODEL)
    wait_until_unused([handoffs.prefill, handoffs.decode])


@for_pairs("lora-2-1")
def test_an_adapter_of_other_weights_under_the_same_name_is_refused(pair: Pair, engine_pool: EnginePool) -> None:
    """Engines that have the same adapters, in folders of their own, are compared above."""
    handoffs, prompt = Handoffs.of(pair, engine_pool), random_prompt(91, 300)
    logs_before = handoffs.log_ends()
    params = handoffs.prefill.prefill(prompt, "salt", model=OWN_ADAPTER)
    with pytest.raises(RequestFailed) as refused:
        handoffs.decode.decode(prompt, params, salt="salt", model=OWN_ADAPTER)
    check_adapter_is_refused((handoffs.prefill, handoffs.decode), logs_before, refused.value)
