"""Engines of different vLLM releases in one pair: the tokens of one engine alone, and nothing left over.

``make test-versions`` makes an environment for each other release, runs this module, and runs the pairs of
``test_pairs.py`` and ``test_push.py`` with each release on both sides.
"""

import json
import urllib.request
from typing import Any

import pytest

from kvferry.integrations.vllm.versions import installed_version

from .engine_pool import OTHER_RELEASES, Engine, EnginePool, Reference
from .handoffs import FIRST_WAVE, PUSHED_WAVE, Handoffs, Pair, check_tokens, over_pairs
from .pushes import Pushes

pytestmark = [pytest.mark.vllm, pytest.mark.versions]
OWN = ".".join(installed_version().split(".")[:2])
OLDEST, OLD = OTHER_RELEASES
MEETINGS = ((OLDEST, OWN), (OLD, OWN), (OLDEST, OLD))


def mixed_pairs(kind: str) -> list[Pair]:
    """Return pairs of engines of two releases, TP 2 to 1: each release on either side."""

    def engine(ranks: int, release: str) -> str:
        return f"{kind}-tp{ranks}" + ("" if release == OWN else f"@{release}")

    both_ways = [way for one, other in MEETINGS for way in ((one, other), (other, one))]
    return [Pair(f"{kind}-{one}-{other}", engine(2, one), engine(1, other)) for one, other in both_ways]


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


@for_mixed("gqa-push")
def test_engines_of_two_releases_push(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    pushes = Pushes.of(pair, engine_pool)
    check_releases(pushes)
    logs_before, before = pushes.log_ends(), pushes.decode.prompt_tokens()
    answers = pushes.send_all(PUSHED_WAVE)
    pushes.check_released(logs_before)
    moved = pushes.decode.prompt_tokens() - before
    assert (moved.received, moved.computed) == (sum(map(len, PUSHED_WAVE)), 0)
    check_tokens(answers, pair.model, PUSHED_WAVE, reference)
