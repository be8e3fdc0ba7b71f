"""Engines that run at the same time and share a pool: what one has computed, the other loads, under another TP too."""

from collections.abc import Callable

import pytest

from kvferry.harness.launch import cache_block_size

from .engine_pool import POOL_BYTES, Engine, EnginePool, Reference, fresh_salt
from .handoffs import random_prompt, wait_until_unused
from .offloads import (
    BYTES_OF_A_TOKEN,
    DOCUMENT_TOKENS,
    MOST_COMPUTED,
    Offload,
    check_identical,
    flip_byte_in_share,
    for_shared,
    forget_own_cache,
    in_share,
    send_pass,
    tier_bytes,
    wait_for_tier_bytes,
)

pytestmark = [pytest.mark.vllm, pytest.mark.matrix]
Recorder = Callable[[str, object], None]
POOL = "remote_pool"
BLOCK = 128
TOKEN_BYTES = BYTES_OF_A_TOKEN["gqa"]


@for_shared()
def test_a_second_engine_loads_what_the_first_has_stored(
    pair: Offload, engine_pool: EnginePool, reference: Reference, record_property: Recorder
) -> None:
    """Each block comes from the pool once, although three questions need it."""
    stores, loads, prompts = engine_pool.running[pair.stores], engine_pool.running[pair.loads], pair.prompts()
    num_bytes = sum(DOCUMENT_TOKENS) * TOKEN_BYTES
    written, read = tier_bytes(stores, POOL, "down"), tier_bytes(loads, POOL, "up")
    first = send_pass(stores, prompts, pair.salt)
    check_identical(first, pair, prompts, reference)
    wait_for_tier_bytes(stores, POOL, "down", written + num_bytes)
    second = send_pass(loads, prompts, pair.salt)
    identical = check_identical(second, pair, prompts, reference)
    record_property("block_size", cache_block_size(loads.server.url))
    record_property("layout", loads.layout)
    record_property("second", {"identical": identical, **second.counts()})
    assert second.computed_part < MOST_COMPUTED
    assert second.counts()["pool"] > 0
    assert tier_bytes(loads, POOL, "up") - read == num_bytes
    wait_until_unused([stores, loads])


@for_shared()
def test_a_salt_keeps_blocks_apart_in_the_pool(pair: Offload, engine_pool: EnginePool, reference: Reference) -> None:
    stores, loads = engine_pool.running[pair.stores], engine_pool.running[pair.loads]
    prompt, salt = random_prompt(83, 300), fresh_salt()
    store(stores, prompt, salt)
    for other, computed in ((fresh_salt(), 300), (salt, 44)):
        sent = send_pass(loads, [prompt], other)
        check_identical(sent, pair, [prompt], reference)
        assert sent.tokens.computed == computed


@for_shared()
def test_a_flipped_byte_in_the_pool_is_a_miss(
    pair: Offload, engine_pool: EnginePool, reference: Reference, record_property: Recorder
) -> None:
    """One byte of each block of a prompt is changed in the memory of the engine that lends it."""
    stores, loads = engine_pool.running[pair.stores], engine_pool.running[pair.loads]
    prompt, salt = random_prompt(84, 1329), fresh_salt()
    others = in_share(stores, POOL_BYTES)
    store(stores, prompt, salt)
    places = [place for key, place in in_share(stores, POOL_BYTES).items() if key not in others]
    assert len(places) == len(prompt) // BLOCK
    for place in places:
        flip_byte_in_share(place)
    failures = num_damaged(loads)
    damaged = send_pass(loads, [prompt], salt)
    check_identical(damaged, pair, [prompt], reference)
    record_property("damaged", {"computed": damaged.tokens.computed, "tokens": len(prompt)})
    assert damaged.tokens.computed == len(prompt)
    assert num_damaged(loads) > failures
    forget_own_cache(loads)
    again = send_pass(loads, [prompt], salt)
    check_identical(again, pair, [prompt], reference)
    assert again.tokens.received == len(prompt) // BLOCK * BLOCK


def store(engine: Engine, prompt: list[int], salt: str) -> None:
    """Let an engine compute a prompt, and wait until its blocks are in the pool."""
    written = tier_bytes(engine, POOL, "down")
    send_pass(engine, [prompt], salt)
    wait_for_tier_bytes(engine, POOL, "down", written + len(prompt) // BLOCK * BLOCK * TOKEN_BYTES)


def num_damaged(engine: Engine) -> float:
    """Return how many blocks of the pool had another checksum than the engine expected."""
    sample = f'kvferry:offload_failures_total{{reason="checksum-mismatch",tier="{POOL}"}}'
    return engine.server.metrics().get(sample, 0)
