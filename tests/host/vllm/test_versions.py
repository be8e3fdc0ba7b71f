"""Engines of different vLLM releases in one pair: the tokens of one engine alone, and nothing left over.

Where their caches differ, the handshake refuses the pair and both logs name the field.

``make test-versions`` makes an environment for each other release, runs this module, and runs the pairs of
``test_pairs.py`` and ``test_concurrent.py`` with each release on both sides.
"""

import json
import urllib.request
from typing import Any

import pytest

from kvferry.harness.child_process import LaunchError
from kvferry.harness.launch import stop_servers, wait_until_ready

from ...waits import wait_until
from .concurrent_flow import ConcurrentHandoffs
from .engine_pool import CANNOT_START, OTHER_RELEASES, OWN_RELEASE, Engine, EnginePool, Reference, RequestFailed
from .handoffs import (
    CONCURRENT_WAVE,
    FIRST_WAVE,
    Handoffs,
    Pair,
    check_tokens,
    over_pairs,
    random_prompt,
    wait_until_unused,
)

pytestmark = [pytest.mark.vllm, pytest.mark.versions]
OLDEST, OLD = OTHER_RELEASES
MEETINGS = ((OLDEST, OWN_RELEASE), (OLD, OWN_RELEASE), (OLDEST, OLD))


def of_release(engine: str, release: str) -> str:
    """Return the name of this engine with a release."""
    return engine if release == OWN_RELEASE else f"{engine}@{release}"


def mixed_pairs(kind: str) -> list[Pair]:
    """Return pairs of engines of two releases, TP 2 to 1: each release on either side."""
    both_ways = [way for one, other in MEETINGS for way in ((one, other), (other, one))]
    return [
        Pair(f"{kind}-{one}-{other}", of_release(f"{kind}-tp2", one), of_release(f"{kind}-tp1", other))
        for one, other in both_ways
    ]


def unlike_pairs() -> list[Pair]:
    """Return pairs of engines of two releases of which one caches float32 and the other bfloat16, either way."""
    pairs = []
    for one, other in MEETINGS:
        wide, narrow = of_release("gqa-tp1", one), of_release("gqa-bfloat16", other)
        pairs += [Pair(f"gqa-{one}-{other}", wide, narrow), Pair(f"gqa-{other}-{one}", narrow, wide)]
    return pairs


def for_mixed(*kinds: str) -> Any:
    """Parametrize a test over the mixed pairs of these engines; the argument is ``pair``."""
    return over_pairs([pair for kind in kinds for pair in mixed_pairs(kind)], lambda pair: (pair.prefill, pair.decode))


def release_of(engine: Engine) -> str:
    """Return the release that the engine says it is of."""
    with urllib.request.urlopen(f"{engine.server.url}/version", timeout=30) as response:
        return ".".join(json.load(response)["version"].split(".")[:2])


def check_releases(handoffs: Handoffs) -> None:
    """Each engine is of the release that the pair names: else two of one release would have met."""
    found = [release_of(engine) for engine in (handoffs.prefill, handoffs.decode)]
    assert found == handoffs.pair.name.rsplit("-", 2)[1:]


@for_mixed("gqa", "gemma")
def test_engines_of_two_releases_hand_prompts_over(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    handoffs = Handoffs.of(pair, engine_pool)
    check_releases(handoffs)
    reference.tokens(pair.model, FIRST_WAVE)
    logs_before, before = handoffs.log_ends(), handoffs.decode.prompt_tokens()
    answers = handoffs.send_all(FIRST_WAVE)
    handoffs.check_released(logs_before)
    moved = handoffs.decode.prompt_tokens() - before
    assert moved.computed == (len(FIRST_WAVE) if pair.is_hybrid else 0)
    assert moved.received + moved.computed == sum(map(len, FIRST_WAVE))
    check_tokens(answers, pair.model, FIRST_WAVE, reference)


@for_mixed("gqa")
def test_engines_of_two_releases_behind_a_concurrent_router(
    pair: Pair, engine_pool: EnginePool, reference: Reference
) -> None:
    handoffs = ConcurrentHandoffs.of(pair, engine_pool)
    check_releases(handoffs)
    logs_before, before = handoffs.log_ends(), handoffs.decode.prompt_tokens()
    answers = handoffs.send_all(CONCURRENT_WAVE)
    handoffs.check_released(logs_before)
    moved = handoffs.decode.prompt_tokens() - before
    assert (moved.received, moved.computed) == (sum(map(len, CONCURRENT_WAVE)), 0)
    check_tokens(answers, pair.model, CONCURRENT_WAVE, reference)


@over_pairs(unlike_pairs(), lambda pair: (pair.prefill, pair.decode))
def test_two_releases_whose_caches_differ_are_refused_by_the_field(pair: Pair, engine_pool: EnginePool) -> None:
    handoffs = Handoffs.of(pair, engine_pool)
    check_releases(handoffs)
    engines = handoffs.prefill, handoffs.decode
    logs_before, dtypes = handoffs.log_ends(), [engine.settings.dtype for engine in engines]
    assert sorted(dtypes) == ["bfloat16", "float32"]
    with pytest.raises(RequestFailed) as refused:
        handoffs.send(random_prompt(106, 300))
    assert refused.value.status == 500
    told = "kv_dtype: prefill has {!r}, decode has {!r}; compute_dtype: ".format(*dtypes)
    for engine, start in zip(engines, logs_before, strict=True):
        wait_until(lambda engine=engine, start=start: told in engine.log()[start:])
        assert "[dtype-mismatch]" in engine.log()[start:]
    wait_until_unused(engines)


@pytest.mark.parametrize(("release", "model"), [(each, model) for each in CANNOT_START for model in CANNOT_START[each]])
def test_a_model_is_left_out_that_a_release_itself_cannot_start(
    release: str, model: str, engine_pool: EnginePool
) -> None:
    """Without a connector. Where it starts, take the model out of ``CANNOT_START``: its pairs can run."""
    name = of_release(f"{model}-reference", release)
    server = engine_pool.start(name, engine_pool.settings(name))
    try:
        with pytest.raises(LaunchError):
            wait_until_ready([server], timeout_seconds=400)
        assert server.process.exit_status() not in (None, 0)
        assert CANNOT_START[release][model] in server.process.log_path.read_text(errors="replace")
    finally:
        stop_servers([server])
