"""The connector by ``kv_connector_module_path``, in an engine that loads no plugin."""

import pytest

from .engine_pool import EnginePool, Reference
from .handoffs import Handoffs, Pair, check_tokens, for_pairs, random_prompts

pytestmark = pytest.mark.vllm


@for_pairs("gqa-128-64")
def test_an_engine_without_the_plugin(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """Its CPU attention names no layout but ``LBHNC``, which the warning explains; a handoff works all the same."""
    handoffs = Handoffs.of(pair, engine_pool)
    registered = [engine.call("oracle_plugin") for engine in (handoffs.prefill, handoffs.decode)]
    assert registered == [[{"is_registered": True}], [{"is_registered": False}]]
    logs_before, before = handoffs.log_ends(), handoffs.decode.prompt_tokens()
    prompts = random_prompts(seed=6, count=4, shortest=60, longest=600)
    check_tokens(handoffs.send_all(prompts), pair.model, prompts, reference)
    moved = handoffs.decode.prompt_tokens() - before
    assert (moved.received, moved.computed) == (sum(map(len, prompts)), 0)
    handoffs.check_released(logs_before)
    assert (handoffs.prefill.layout, handoffs.decode.layout) == ("BHLNC", "LBHNC")
    assert "kvferry asked for KV cache layout BHLNC and the engine uses LBHNC" in handoffs.decode.log()
