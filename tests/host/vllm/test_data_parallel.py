"""Several data-parallel ranks behind several API servers: each is an engine with an end point of its own."""

import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.harness.launch import Server, start_router, wait_until_ready

from .engine_pool import EnginePool, Reference, completion_body, fresh_salt, post, tokens_of
from .handoffs import Handoffs, Pair, check_tokens, for_pairs, random_prompt, random_prompts

pytestmark = pytest.mark.vllm


def engines_loaded(handoffs: Handoffs, num_before: int) -> list[str]:
    """Return the ids of the prefill engines from which the decode engine has loaded since."""
    return [load["remote_engine_id"] for load in handoffs.decode.loads()[num_before:]]


@for_pairs("gqa-dp2-1")
def test_the_rank_that_answered_is_the_one_that_writes(
    pair: Pair, engine_pool: EnginePool, reference: Reference
) -> None:
    """Named by header, as a router that knows of data-parallel ranks does."""
    handoffs = Handoffs.of(pair, engine_pool)
    logs_before, num_before = handoffs.log_ends(), len(handoffs.decode.loads())
    prompts = random_prompts(seed=110, count=4, shortest=60, longest=300)
    held = [handoffs.prefill.prefill(prompt, dp_rank=index % 2) for index, prompt in enumerate(prompts)]
    assert [params["remote_engine_id"][-4:] for params in held] == ["_dp0", "_dp1"] * 2
    assert len({(params["remote_host"], params["remote_port"]) for params in held}) == 2
    answers = [handoffs.decode.decode(prompt, params) for prompt, params in zip(prompts, held, strict=True)]
    handoffs.check_released(logs_before)
    check_tokens(answers, pair.model, prompts, reference)
    assert engines_loaded(handoffs, num_before) == [params["remote_engine_id"] for params in held]


@for_pairs("gqa-dp2-1", "gqa-1-dp2")
def test_the_engine_spreads_requests_over_its_ranks(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """By vLLM's own choice; what a rank computed or loaded is counted by rank."""
    handoffs = Handoffs.of(pair, engine_pool)
    logs_before, num_before = handoffs.log_ends(), len(handoffs.decode.loads())
    before = [tokens_by_rank(engine.server) for engine in (handoffs.prefill, handoffs.decode)]
    prompts = random_prompts(seed=111, count=12, shortest=60, longest=700)
    check_tokens(handoffs.send_all(prompts), pair.model, prompts, reference)
    handoffs.check_released(logs_before)
    after = [tokens_by_rank(engine.server) for engine in (handoffs.prefill, handoffs.decode)]
    for engine, first, last in zip((handoffs.prefill, handoffs.decode), before, after, strict=True):
        assert len(last) == engine.settings.data_parallel_size
        assert all(last[rank] > first.get(rank, 0) for rank in last), f"ranks of {engine.name} were idle: {last}"
    assert len(set(engines_loaded(handoffs, num_before))) == handoffs.prefill.settings.data_parallel_size


def tokens_by_rank(server: Server) -> dict[str, float]:
    """Return the prompt tokens of each data-parallel rank, received ones included."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10.0) as response:
        families = text_string_to_metric_families(response.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return {sample.labels["engine"]: sample.value for sample in samples if sample.name == "vllm:prompt_tokens_total"}


@for_pairs("gqa-dp2-1")
def test_a_router_that_knows_of_data_parallel_ranks(
    pair: Pair, engine_pool: EnginePool, reference: Reference, tmp_path: Path
) -> None:
    """Unmodified vllm-router names the rank; two samples of a request so meet on one."""
    handoffs = Handoffs.of(pair, engine_pool)
    logs_before, num_before = handoffs.log_ends(), len(handoffs.decode.loads())
    arguments = ("--intra-node-data-parallel-size", "2", "--policy", "round_robin")
    prompts = random_prompts(seed=112, count=12, shortest=20, longest=600)
    with start_router(
        [handoffs.prefill.server.url], [handoffs.decode.server.url], tmp_path, arguments=arguments
    ) as router:
        wait_until_ready([router], timeout_seconds=60)

        def send(prompt: Sequence[int], **more: Any) -> list[list[int]]:
            body = completion_body(prompt, 8, fresh_salt(), **more)
            return tokens_of(post(f"{router.url}/v1/completions", body))

        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(send, prompts))
        sampled = random_prompt(113, 300)
        samples = send(sampled, n=2, temperature=1.0, top_k=1)
    handoffs.check_released(logs_before)
    check_tokens(answers, pair.model, prompts, reference)
    assert len(samples) == 2
    check_tokens([samples], pair.model, [sampled], reference)
    assert {name[-4:] for name in engines_loaded(handoffs, num_before)} == {"_dp0", "_dp1"}
