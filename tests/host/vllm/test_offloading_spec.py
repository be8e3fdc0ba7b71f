"""vLLM's own ``OffloadingConnector`` with kvferry's spec, by the settings that the source documents use."""

import pytest

from kvferry.harness.launch import EngineSettings, wait_until_ready
from kvferry.integrations.vllm.plugin import SPEC_MODULE, SPEC_NAME

from .engine_pool import LAST_CORE, Engine, EnginePool, Reference, fresh_salt, tokens_of
from .handoffs import check_tokens, random_prompt

pytestmark = pytest.mark.vllm
BLOCK, LENGTH = 128, 8 * 128 + 6
SETTINGS = {"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE, "block_size": BLOCK, "num_cpu_blocks": 64}
CACHE_BYTES = 24 << 20
"""Some 12 blocks: less than two of the prompts."""


@pytest.mark.engines("gqa-reference")
@pytest.mark.parametrize(
    "layout", [pytest.param(None, id="per-layer", marks=pytest.mark.matrix), pytest.param("BLHNC", id="one-piece")]
)
def test_the_second_pass_loads_what_the_first_has_stored(
    layout: str | None, engine_pool: EnginePool, reference: Reference
) -> None:
    settings = EngineSettings(
        engine_pool.model_path("gqa"),
        role="kv_both",
        connector="OffloadingConnector",
        connector_settings=SETTINGS,
        kv_cache_bytes=CACHE_BYTES,
        max_model_len=LENGTH + 26,
        layout=layout,
        cores=LAST_CORE,
    )
    shared = random_prompt(7000, 3 * BLOCK)
    prompts = [shared + random_prompt(7001 + index, LENGTH - len(shared)) for index in range(5)]
    salt = fresh_salt()
    with engine_pool.start(f"offloading-{layout}", settings) as server:
        wait_until_ready([server], timeout_seconds=400)
        engine = Engine("offloading", "gqa", server, settings)
        assert engine.layout == (layout or "LBHNC")
        first = [tokens_of(engine.complete(prompt, salt=salt)) for prompt in prompts]
        before = engine.prompt_tokens()
        again = [tokens_of(engine.complete(prompt, salt=salt)) for prompt in prompts]
        second = engine.prompt_tokens() - before
        elsewhere = engine.prompt_tokens()
        engine.complete(prompts[0])
        salted = engine.prompt_tokens() - elsewhere
    check_tokens(first, "gqa", prompts, reference)
    check_tokens(again, "gqa", prompts, reference)
    assert second.computed < 0.1 * len(prompts) * LENGTH, second
    assert second.received >= 4 * (LENGTH - len(shared) - BLOCK), second
    assert (salted.computed, salted.received) == (LENGTH, 0)
