"""``KVFerryConnector`` and ``KVFerryOffloadConnector`` in one engine, under vLLM's ``MultiConnector``.

Prompts move from engine to engine, and each engine keeps what it computed or received, in host memory. Both engines
have fewer blocks than two of the longest prompts need.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvferry.harness.launch import cached_tokens

from .engine_pool import WATCHED, Engine, EnginePool, Reference, completion_body, fresh_salt, tokens_of
from .handoffs import NOT_RELEASED, Handoffs, Pair, check_tokens, random_prompt, streaming, wait_until_unused
from .offloads import AT_ONCE, MOST_COMPUTED, MOVED_AND_KEPT, NUM_ANSWERED, forget_own_cache, send_pass

pytestmark = pytest.mark.vllm
Recorder = Callable[[str, object], None]
Sent = tuple[str, list[int], list[list[int]]]
"""What was sent: its kind, the prompt and the answer, none where the client has gone away."""

both_connectors = pytest.mark.parametrize(
    "pair",
    [
        pytest.param(
            MOVED_AND_KEPT,
            id=MOVED_AND_KEPT.name,
            marks=pytest.mark.engines(MOVED_AND_KEPT.prefill, MOVED_AND_KEPT.decode),
        )
    ],
)
MANY_AT_ONCE = 6
DOCUMENT_BLOCKS = tuple(3 + index % 8 for index in range(16))
QUESTION_TOKENS = (12, 60, 140, 270)
"""With these behind each document, host memory has too few blocks for all prompts."""
KEPT_SECONDS = WATCHED["lease_seconds"] + 10.0
"""A prompt whose client goes away as it is finished is held until the end of its lease."""
EXPIRED = NOT_RELEASED[0]
BLOCK_TOKENS = 128
STORES_BEHIND = 'kvferry:offload_refused_blocks_total{reason="stores-behind",tier="host_memory"}'


@pytest.mark.matrix
@both_connectors
def test_two_connectors_in_one_engine(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    handoffs = Handoffs.of(pair, engine_pool)
    prompts = [random_prompt(3100 + index, 128 * (3 + index) + 12) for index in range(12)]
    salt, logs_before = fresh_salt(), handoffs.log_ends()
    for number in range(2):
        before = [engine.prompt_tokens() for engine in (handoffs.prefill, handoffs.decode)]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(lambda prompt: handoffs.send(prompt, salt=salt), prompts))
        check_tokens(answers, "gqa", prompts, reference)
        prefill, decode = (
            engine.prompt_tokens() - earlier
            for engine, earlier in zip((handoffs.prefill, handoffs.decode), before, strict=True)
        )
        assert decode.computed <= len(prompts), "the prefill engine's blocks move, even where the tiers have them"
        if number:
            # On a busy machine stores keep half of the engine's few blocks when a prompt's request ends.
            not_stored = BLOCK_TOKENS * handoffs.prefill.server.metrics().get(STORES_BEHIND, 0)
            assert prefill.received
            assert prefill.computed < MOST_COMPUTED * sum(map(len, prompts)) + not_stored
    handoffs.check_released(logs_before)
    kept = send_pass(handoffs.decode, prompts, salt)
    check_tokens(kept.answers, "gqa", prompts, reference)
    assert kept.computed_part < MOST_COMPUTED
    assert cached_tokens(handoffs.decode.server.metrics())["host"] > 0
    wait_until_unused([handoffs.prefill, handoffs.decode])
    check_nothing_is_left(handoffs, engine_pool)


@pytest.mark.matrix
@both_connectors
def test_many_requests_leave_nothing(
    pair: Pair, engine_pool: EnginePool, reference: Reference, record_property: Recorder
) -> None:
    """Requests with shared prefixes, of which some go to the decode engine alone, and some are given up."""
    handoffs, prompts = Handoffs.of(pair, engine_pool), prompts_with_shared_prefixes()
    reference.tokens("gqa", prompts)
    engines, logs_before = (handoffs.prefill, handoffs.decode), handoffs.log_ends()
    before = [counts_of(engine) for engine in engines]
    began_at = time.monotonic()
    with ThreadPoolExecutor(MANY_AT_ONCE) as threads:
        sent = list(threads.map(lambda each: each(), requests(handoffs, prompts, fresh_salt())))
    seconds = time.monotonic() - began_at
    answered = [(prompt, answer) for _, prompt, answer in sent if answer]
    kinds = Counter(kind for kind, _, _ in sent)
    moved = [counts_of(engine) - earlier for engine, earlier in zip(engines, before, strict=True)]
    record_property("many", {"seconds": round(seconds), **kinds, "answered": len(answered)})
    record_property("prefill_tokens", dict(moved[0]))
    record_property("decode_tokens", dict(moved[1]))
    print(f"{len(sent)} requests in {seconds:.0f} s: {dict(kinds)}; {dict(moved[0])}; {dict(moved[1])}")
    check_tokens([answer for _, answer in answered], "gqa", [prompt for prompt, _ in answered], reference)
    assert len(answered) == NUM_ANSWERED
    record_property("identical", len(answered))
    assert all(each["host"] and each["evicted"] for each in moved), "both engines load from full tiers"
    check_nothing_is_left(handoffs, engine_pool, KEPT_SECONDS)
    for engine, start in zip(engines, logs_before, strict=True):
        log = engine.log()[start:]
        assert not [text for text in NOT_RELEASED[1:] if text in log]
        assert log.count(EXPIRED) <= len(sent) - len(answered)
    check_tokens([handoffs.send(prompts[0])], "gqa", prompts[:1], reference)


def prompts_with_shared_prefixes() -> list[list[int]]:
    """Return questions behind documents."""
    documents = [random_prompt(3200 + index, 128 * blocks) for index, blocks in enumerate(DOCUMENT_BLOCKS)]
    return [
        document + random_prompt(3300 + 10 * index + number, length)
        for index, document in enumerate(documents)
        for number, length in enumerate(QUESTION_TOKENS)
    ]


def requests(handoffs: Handoffs, prompts: Sequence[list[int]], salt: str) -> Iterator[Callable[[], Sent]]:
    """Yield what sends each request: ``NUM_ANSWERED`` that are answered, and behind every eighth one that is not."""
    generator = random.Random(500)
    given_up = (give_up_while_prefilling, give_up_while_loading, give_up_while_decoding)
    # Some documents are asked for much more often than others.
    weights = [1 / (1 + index // len(QUESTION_TOKENS)) for index in range(len(prompts))]

    def draw() -> tuple[list[int], float]:
        return generator.choices(prompts, weights)[0], generator.uniform(0.0, 0.03)

    for number in range(NUM_ANSWERED):
        prompt, _ = draw()
        send = at_the_decode_engine if number % 8 == 5 else handed_over
        yield lambda send=send, prompt=prompt: send(handoffs, prompt, salt)  # type: ignore[misc]
        if number % 8 == 3:
            kind, (prompt, seconds) = given_up[number // 8 % 3], draw()
            yield lambda kind=kind, prompt=prompt, seconds=seconds: kind(handoffs, prompt, salt, seconds)  # type: ignore[misc]


def handed_over(handoffs: Handoffs, prompt: list[int], salt: str) -> Sent:
    return "handed over", prompt, handoffs.send(prompt, salt=salt)


def at_the_decode_engine(handoffs: Handoffs, prompt: list[int], salt: str) -> Sent:
    return "decode engine alone", prompt, tokens_of(handoffs.decode.complete(prompt, salt=salt))


def give_up_while_prefilling(handoffs: Handoffs, prompt: list[int], salt: str, seconds: float) -> Sent:
    body = completion_body(prompt, 1, salt, kv_transfer_params={"do_remote_decode": True})
    with streaming(handoffs.prefill, body):
        time.sleep(seconds)
    return "given up while prefilling", prompt, []


def give_up_while_loading(handoffs: Handoffs, prompt: list[int], salt: str, seconds: float) -> Sent:
    params = handoffs.prefill.prefill(prompt, salt)
    with streaming(handoffs.decode, completion_body(prompt, 8, salt, kv_transfer_params=params)):
        time.sleep(seconds)
    return "given up while loading", prompt, []


def give_up_while_decoding(handoffs: Handoffs, prompt: list[int], salt: str, seconds: float) -> Sent:
    params = handoffs.prefill.prefill(prompt, salt)
    body = completion_body(prompt, 400, salt, kv_transfer_params=params, stream=True)
    with streaming(handoffs.decode, body) as connection:
        assert connection.getresponse().readline().startswith(b"data:")
        time.sleep(seconds)
    return "given up while decoding", prompt, []


def counts_of(engine: Engine) -> "Counter[str]":
    """Return an engine's own counts: prompt tokens by origin, blocks that host memory gave up, preemptions."""
    metrics, tokens = engine.server.metrics(), engine.prompt_tokens()
    evicted = metrics.get('kvferry:offload_evicted_blocks_total{tier="host_memory"}', 0)
    return Counter(
        computed=tokens.computed,
        cached=tokens.cached,
        received=tokens.received,
        host=cached_tokens(metrics).get("host", 0),
        evicted=int(evicted),
        preemptions=int(engine.num_preemptions()),
    )


def check_nothing_is_left(handoffs: Handoffs, pool: EnginePool, seconds: float = 10.0) -> None:
    """Both engines soon keep nothing for any request: no block, hold, lease, pin or store."""
    deadline = time.monotonic() + seconds
    while left := {engine.name: found for engine in both(handoffs) if (found := what_is_left(engine, pool))}:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
    for engine in both(handoffs):
        forget_own_cache(engine)


def both(handoffs: Handoffs) -> tuple[Engine, Engine]:
    return handoffs.prefill, handoffs.decode


def what_is_left(engine: Engine, pool: EnginePool) -> dict[str, Any]:
    """Return what an engine says that it keeps, by name, without what is 0."""
    engine.complete(random_prompt(1, 3), 1)  # the engine writes it after a step
    found = json.loads(pool.watch_file(engine.name).read_text())
    return {name: number for name, number in found.items() if number}
