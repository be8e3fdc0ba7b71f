"""Engines that keep blocks in host memory and on disk: nothing is computed twice, and no token is wrong.

An engine's own cache is too small for the prompts of a test, so what is not computed again came from the tiers, by the
engine's own count. Every engine fails a request whose load fails (``kv_load_failure_policy`` ``fail``), and no request
fails here, whatever happens to the tiers.
"""

from collections.abc import Callable

import pytest

from kvferry.harness.launch import cache_block_size

from .engine_pool import ADAPTER, BASE_MODEL, OTHER_ADAPTER, Engine, EnginePool, Reference, fresh_salt, tokens_of
from .handoffs import check_tokens, different_prompts, random_prompt, wait_until_unused
from .offloads import (
    BYTES_OF_A_TOKEN,
    MOST_COMPUTED,
    Offload,
    check_identical,
    flip_byte_on_disk,
    for_offloads,
    forget_own_cache,
    kill,
    place_of_a_value,
    send_pass,
    send_until_loaded,
    slab_of,
    start,
    wait_until_on_disk,
)

pytestmark = pytest.mark.vllm
Recorder = Callable[[str, object], None]
GQA_PAGE_BYTES = 128 * 128 * 4
"""Keys and values of one layer and head in a block of 128 tokens, float32."""


@for_offloads()
def test_a_second_pass_computes_almost_nothing(
    pair: Offload, engine_pool: EnginePool, reference: Reference, record_property: Recorder
) -> None:
    engine, prompts = engine_pool.running[pair.stores], pair.prompts()
    first = send_pass(engine, prompts, pair.salt)
    check_identical(first, pair, prompts, reference)
    second = send_pass(engine, prompts, pair.salt)
    identical = check_identical(second, pair, prompts, reference)
    record_property("block_size", cache_block_size(engine.server.url))
    record_property("layout", engine.layout)
    record_property("second", {"identical": identical, **second.counts()})
    assert second.computed_part < MOST_COMPUTED
    assert second.from_tiers["host"] > second.num_tokens / 2
    wait_until_unused([engine])


@for_offloads()
def test_prompts_around_a_block(pair: Offload, engine_pool: EnginePool, reference: Reference) -> None:
    engine, prompts = engine_pool.running[pair.stores], pair.edges()
    for _ in range(2):
        check_identical(send_pass(engine, prompts, pair.salt), pair, prompts, reference)
        forget_own_cache(engine)


@for_offloads()
@pytest.mark.ends_engines
def test_after_sigkill_blocks_come_from_disk(
    pair: Offload, engine_pool: EnginePool, reference: Reference, record_property: Recorder
) -> None:
    """One byte of each block of one more prompt is changed: that prompt is computed, all others are loaded."""
    engine, prompts, folder = engine_pool.running[pair.stores], pair.prompts(), engine_pool.disk_folder(pair.model)
    send_pass(engine, prompts, pair.salt)
    others = wait_until_on_disk(folder)
    victim = random_prompt(77, 1329)
    send_pass(engine, [victim], pair.salt)
    of_victim = [place for key, place in wait_until_on_disk(folder).items() if key not in others]
    kill(engine, engine_pool)
    for place in of_victim:
        flip_byte_on_disk(folder, place)
    survivor = start(pair.loads, engine_pool)
    third = send_pass(survivor, prompts, pair.salt)
    identical = check_identical(third, pair, prompts, reference)
    damaged = send_pass(survivor, [victim], pair.salt)
    check_identical(damaged, pair, [victim], reference)
    record_property("third", {"identical": identical, **third.counts()})
    record_property("damaged", {"computed": damaged.tokens.computed, "tokens": len(victim)})
    assert third.computed_part < MOST_COMPUTED
    # What a request waited for; blocks that came while another one waited count as host memory's.
    assert third.from_tiers["disk"] > 0
    assert damaged.tokens.computed == len(victim)
    wait_until_unused([survivor])
    again = send_pass(survivor, [victim], pair.salt)
    check_identical(again, pair, [victim], reference)


@for_offloads("offload-1-2")
def test_one_flipped_byte_in_the_slab_changes_the_tokens(
    pair: Offload, engine_pool: EnginePool, reference: Reference
) -> None:
    """What proves that the tokens of the other tests depend on what is loaded."""
    engine, prompt, salt = engine_pool.running[pair.stores], random_prompt(78, 300), fresh_salt()
    slab = slab_of(engine)
    before = slab.copy()
    send_pass(engine, [prompt], salt)
    check_tokens([send_until_loaded(engine, prompt, salt, 256)], "gqa", [prompt], reference)
    place = place_of_a_value(before, slab, GQA_PAGE_BYTES)
    slab[place] ^= 0x40
    answers = [send_until_loaded(engine, prompt, salt, 256)]
    assert different_prompts(answers, "gqa", [prompt], reference)
    slab[place] ^= 0x40
    check_tokens([send_until_loaded(engine, prompt, salt, 256)], "gqa", [prompt], reference)
    forget_own_cache(engine)


@for_offloads("offload-1-2")
def test_a_salt_keeps_blocks_apart(pair: Offload, engine_pool: EnginePool, reference: Reference) -> None:
    engine, prompt, salt = engine_pool.running[pair.stores], random_prompt(79, 300), fresh_salt()
    send_pass(engine, [prompt], salt)
    send_until_loaded(engine, prompt, salt, 256)
    for other in (fresh_salt(), f"{salt} "):
        sent = send_pass(engine, [prompt], other)
        check_tokens(sent.answers, "gqa", [prompt], reference)
        assert sent.tokens.computed == len(prompt)


@for_offloads("offload-mqa-2-1")
def test_what_two_ranks_have_is_stored_once(pair: Offload, engine_pool: EnginePool) -> None:
    """Both ranks have the only KV head: the bytes that ranks copied are those of one of them."""
    engine, prompt = engine_pool.running[pair.stores], random_prompt(82, 1029)
    stored_before, copied_before = num_stored(engine), copied_bytes(engine)
    send_pass(engine, [prompt], fresh_salt())
    forget_own_cache(engine)  # waits for the end of the store
    num_tokens = (num_stored(engine) - stored_before) * cache_block_size(engine.server.url)
    assert num_tokens == 1024
    assert copied_bytes(engine) - copied_before == num_tokens * BYTES_OF_A_TOKEN[pair.model]


@for_offloads("offload-lora-2-1")
@pytest.mark.ends_engines
def test_adapters_keep_blocks_apart(pair: Offload, engine_pool: EnginePool, reference: Reference) -> None:
    """One prompt and salt under two adapters and under none, stored at TP 2 and loaded at TP 1 by another engine."""
    engine, prompt, salt = engine_pool.running[pair.stores], random_prompt(80, 300), fresh_salt()
    plain = engine_pool.running["lora-reference"]
    models = (ADAPTER, OTHER_ADAPTER, BASE_MODEL)
    expected = {model: tokens_of(plain.complete(prompt, model=model)) for model in models}
    assert expected[ADAPTER] == reference.tokens("lora", [prompt])
    assert len({tuple(tokens) for (tokens,) in expected.values()}) == 3
    for model in models:
        sent = send_pass(engine, [prompt], salt, model=model)
        assert sent.answers == [expected[model]]
        assert sent.tokens.computed == len(prompt), f"{model} loaded blocks of another"
    for model in models:
        forget_own_cache(engine)
        again = send_pass(engine, [prompt], salt, model=model)
        assert (again.tokens.received, again.answers) == (256, [expected[model]])
    wait_until_on_disk(engine_pool.disk_folder(pair.model))
    kill(engine, engine_pool)
    survivor = start(pair.loads, engine_pool)
    for model in models:
        loaded = send_pass(survivor, [prompt], salt, model=model)
        assert loaded.answers == [expected[model]]
        assert (loaded.from_tiers["disk"], loaded.tokens.computed) == (256, len(prompt) - 256)


def num_stored(engine: Engine) -> int:
    """Return how many blocks the engine has stored in host memory."""
    return int(engine.server.metrics().get('kvferry:offload_stored_blocks_total{tier="host_memory"}', 0))


def copied_bytes(engine: Engine) -> int:
    """Return how many bytes all ranks of the engine have copied to host memory."""
    return int(engine.server.metrics().get('kvferry:offload_copy_bytes_sum{direction="store"}', 0))
