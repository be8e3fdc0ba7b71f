"""Real engines behind a tiny router that sends to both at once, and behind vllm-router unmodified."""

import os
import signal
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kvferry.errors import Reason
from kvferry.harness.launch import free_port, prompt_tokens, start_engine, start_router, stop_servers, wait_until_ready

from .concurrent_flow import ConcurrentHandoffs, bootstrap_address, to_prefill
from .engine_pool import (
    CHUNKED,
    OWN_ADAPTER,
    Engine,
    EnginePool,
    Reference,
    RequestFailed,
    completion_body,
    fresh_salt,
    post,
    tokens_of,
)
from .handoffs import (
    ALL_PAIRS,
    CONCURRENT_PAIRS,
    CONCURRENT_WAVE,
    Pair,
    check_adapter_is_refused,
    check_prefix_hits,
    check_tokens,
    over_pairs,
    random_prompt,
    random_prompts,
    streaming,
    wait_for_usage,
    wait_until_unused,
)

pytestmark = pytest.mark.vllm

KILLED_SECONDS = 20.0
FAILING_PAIRS = (
    *(
        pair
        for pair in CONCURRENT_PAIRS
        if pair.name in ("concurrent-2-1", "concurrent-granite-2-1", "concurrent-granite-1-2")
    ),
    Pair("concurrent-recomputes", "gqa-tp2", "gqa-layers"),
)
"""Decode engines of both values of ``kv_load_failure_policy``."""
FEW = random_prompts(seed=22, count=4, shortest=5, longest=1500)


def for_concurrent_pairs(*names: str, matrix: bool = False) -> Any:
    """Parametrize a test over the pairs named, or over all; the argument is ``pair``.

    With ``matrix`` over all in the matrix.
    """
    named = [pair for pair in CONCURRENT_PAIRS if not names or pair.name in names or (matrix and ALL_PAIRS)]
    return over_pairs(named, lambda pair: (pair.prefill, pair.decode))


@for_concurrent_pairs()
def test_tokens_of_a_concurrent_router_are_those_of_one_engine(
    pair: Pair, engine_pool: EnginePool, reference: Reference
) -> None:
    handoffs = ConcurrentHandoffs.of(pair, engine_pool)
    logs_before, before = handoffs.log_ends(), handoffs.decode.prompt_tokens()
    answers = handoffs.send_all(CONCURRENT_WAVE)
    handoffs.check_released(logs_before)
    moved = handoffs.decode.prompt_tokens() - before
    # Of a hybrid the decode engine computes the last token itself.
    num_computed = len(CONCURRENT_WAVE) if pair.is_hybrid else 0
    assert (moved.received, moved.cached, moved.computed) == (
        sum(map(len, CONCURRENT_WAVE)) - num_computed,
        0,
        num_computed,
    )
    assert {load["transport"] for load in handoffs.decode.loads()[-len(CONCURRENT_WAVE) :]} == {pair.transport}
    check_tokens(answers, pair.model, CONCURRENT_WAVE, reference)


@pytest.mark.matrix
@pytest.mark.engines("lora-tp2", "lora-tp1")
def test_an_adapter_of_other_weights_under_the_same_name_is_not_written(engine_pool: EnginePool) -> None:
    """The same adapter in another folder is written."""
    handoffs = ConcurrentHandoffs.of(Pair("lora", "lora-tp2", "lora-tp1"), engine_pool)
    prompt, before = random_prompt(92, 300), handoffs.decode.prompt_tokens()
    handoffs.send(prompt)
    assert (handoffs.decode.prompt_tokens() - before).received == len(prompt)
    logs_before, transfer_id = handoffs.log_ends(), "xfer-of-another-adapter"
    handoffs.prefill.complete(prompt, 1, kv_transfer_params=to_prefill(transfer_id), model=OWN_ADAPTER)
    params = handoffs.to_decode(transfer_id)
    with pytest.raises(RequestFailed) as refused:
        handoffs.decode.complete(prompt, kv_transfer_params=params, model=OWN_ADAPTER)
    check_adapter_is_refused((handoffs.prefill, handoffs.decode), logs_before, refused.value)


@for_concurrent_pairs("concurrent-1-1", "concurrent-2-1", matrix=True)
def test_behind_vllm_router_as_it_is(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """In mooncake mode; it sends to the decode engine when the prefill engine has answered."""
    handoffs, prompts = ConcurrentHandoffs.of(pair, engine_pool), CONCURRENT_WAVE if ALL_PAIRS else FEW
    logs_before, before = handoffs.log_ends(), handoffs.decode.prompt_tokens()
    port = bootstrap_address(handoffs.prefill).rpartition(":")[2]
    arguments = ("--prefill", handoffs.prefill.server.url, port, "--kv-connector", "mooncake")
    router = start_router([], [handoffs.decode.server.url], engine_pool.folder, arguments=arguments)
    try:
        wait_until_ready([router])
        url = f"{router.url}/v1/completions"
        with ThreadPoolExecutor(len(prompts)) as threads:
            posted = threads.map(lambda prompt: post(url, completion_body(prompt, 8, fresh_salt())), prompts)
            answers = [tokens_of(answer) for answer in posted]
        handoffs.check_released(logs_before)
    finally:
        stop_servers([router])
    num_computed = len(prompts) if pair.is_hybrid else 0
    assert (handoffs.decode.prompt_tokens() - before).received == sum(map(len, prompts)) - num_computed
    check_tokens(answers, pair.model, prompts, reference)


@for_concurrent_pairs("concurrent-chunked", "concurrent-layers", "concurrent-compiled")
def test_spans_are_written_before_others_have_been_computed(pair: Pair, engine_pool: EnginePool) -> None:
    handoffs, num_tokens = ConcurrentHandoffs.of(pair, engine_pool), 2000
    handoffs.send(random_prompt(33, num_tokens))
    sent = writes_of(handoffs.prefill, num_tokens, handoffs.decode.tp)
    ends = [loads[-1]["events"] for loads in handoffs.decode.loads_of_ranks()]
    for write in sent:
        events, batches = write["events"], write["events"]["batches"]
        steps = [step for step in handoffs.prefill.steps() if events["transfer_id"] in step["prompts"]]
        assert sum(batch["bytes"] for batch in batches) == write["bytes"]
        early = [batch for batch in batches if batch["landed_at"] < steps[-1]["step_ended_at"]]
        assert len(batches) > 1
        assert len(early) >= len(batches) - 2, events
        for batch in batches:
            assert all(ran_at(span, steps, events["transfer_id"]) <= batch["posted_at"] for span in batch["spans"])
    last_landed_at = max(write["events"]["batches"][-1]["landed_at"] for write in sent)
    assert last_landed_at <= max(each["committed_at"] for each in ends)


def ran_at(span: dict[str, Any], steps: Sequence[dict[str, Any]], transfer_id: str) -> float:
    """Return when the layers of a span had run for its last token."""
    step = next(step for step in steps if step["prompts"][transfer_id] >= span["tokens"][1])
    return float(step["ran_at"].get(span["layers"][-1], step["step_ended_at"]))


def writes_of(engine: Engine, num_tokens: int, count: int) -> list[dict[str, Any]]:
    """Return the writes of prompts of this length that the engine's first rank logs, in a step after their end."""
    end = time.monotonic() + 10
    while True:
        writes = [line for line in engine.loads() if "write" in line]
        found = [line for line in writes if line["events"]["num_tokens"] == num_tokens]
        if len(found) == count:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.2)
        engine.complete(random_prompt(34, 3), 1)


@for_concurrent_pairs("concurrent-2-1", matrix=True)
def test_tokens_depend_on_what_is_written(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """Negative control: a descriptor that is silently left out shows in the tokens."""
    handoffs, prompt = ConcurrentHandoffs.of(pair, engine_pool), random_prompt(31, 700)
    with handoffs.faults({"drop": 0}):
        answer = handoffs.send(prompt)
    assert answer != [reference.tokens(pair.model, [prompt])[0]]
    check_tokens([handoffs.send(prompt)], pair.model, [prompt], reference)


@over_pairs(FAILING_PAIRS, lambda pair: (pair.prefill, pair.decode))
def test_a_failed_write_is_an_error_or_is_computed(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """With ``recompute`` the decode engine computes the prompt, its states included, in other blocks; nothing leaks."""
    handoffs, prompt = ConcurrentHandoffs.of(pair, engine_pool), random_prompt(32, 700)
    recomputes = handoffs.decode.settings.load_failure_policy == "recompute"
    before = handoffs.decode.prompt_tokens()
    handoffs.prefill.set_faults({"fail_after": 0})
    try:
        if recomputes:
            check_tokens([handoffs.send(prompt)], pair.model, [prompt], reference)
        else:
            with pytest.raises(RequestFailed):
                handoffs.send(prompt)
    finally:
        handoffs.prefill.set_faults(None)
    assert handoffs.decode.loads()[-1]["error"] == Reason.TRANSFER_FAILED.value
    assert (handoffs.decode.prompt_tokens() - before).computed == (len(prompt) if recomputes else 0)
    wait_until_unused([handoffs.prefill, handoffs.decode])
    check_tokens([handoffs.send(prompt)], pair.model, [prompt], reference)


@for_concurrent_pairs("concurrent-2-1", "concurrent-chunked", "concurrent-gemma-2-1")
def test_prefix_hits_on_both_sides(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    check_prefix_hits(ConcurrentHandoffs.of(pair, engine_pool), reference)


@for_concurrent_pairs("concurrent-chunked", "concurrent-layers", "concurrent-compiled")
def test_prefix_hits_on_the_prefill_side(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """What the prefill engine had before is written all the same, and in no step before it has been computed.

    Prompts that begin alike and come at once share the blocks of one of them, which this very step may compute.
    """
    handoffs, salt = ConcurrentHandoffs.of(pair, engine_pool), fresh_salt()
    known, new = random_prompt(54, 900), random_prompt(55, 520)
    handoffs.prefill.complete(known, 1, salt)
    before = [engine.prompt_tokens() for engine in (handoffs.prefill, handoffs.decode)]
    prompt = known + random_prompt(56, 600)
    answers = [handoffs.send(prompt, salt=salt)]
    moved = [
        engine.prompt_tokens() - then for engine, then in zip((handoffs.prefill, handoffs.decode), before, strict=True)
    ]
    assert (moved[0].cached, moved[1].cached, moved[1].received) == (896, 0, 1500)
    alike = [new + random_prompt(57 + number, 40 * number) for number in range(1, 6)]
    logs_before = handoffs.log_ends()
    answers += handoffs.send_all(alike, salt=salt)
    handoffs.check_released(logs_before)
    check_tokens(answers, pair.model, [prompt, *alike], reference)


@for_concurrent_pairs("concurrent-2-1", "concurrent-chunked")
def test_the_client_of_the_decode_engine_goes_away(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """While the prompt is being written, and nothing of it ever arrives."""
    handoffs = ConcurrentHandoffs.of(pair, engine_pool)
    prompt, salt, transfer_id = random_prompt(70, 700), fresh_salt(), f"xfer-{uuid.uuid4()}"
    handoffs.prefill.set_faults({"hang": True})
    try:
        to_decode = handoffs.to_decode(transfer_id)
        with streaming(handoffs.decode, completion_body(prompt, 8, salt, stream=True, kv_transfer_params=to_decode)):
            wait_for_usage(handoffs.decode)
            handoffs.prefill.complete(prompt, 1, salt, kv_transfer_params=to_prefill(transfer_id))
            time.sleep(0.5)
        wait_until_unused([handoffs.prefill, handoffs.decode])
    finally:
        handoffs.prefill.set_faults(None)
    check_tokens([handoffs.send(prompt)], pair.model, [prompt], reference)


@pytest.mark.parametrize("num_not_loading", [0, 3], ids=["while computing", "while waiting for its turn"])
@for_concurrent_pairs("concurrent-chunked")
def test_the_client_of_the_prefill_engine_goes_away(
    pair: Pair, num_not_loading: int, engine_pool: EnginePool, reference: Reference
) -> None:
    """The decode engine's request fails at once, not when its time is over."""
    handoffs = ConcurrentHandoffs.of(pair, engine_pool)
    others = random_prompts(seed=72, count=num_not_loading, shortest=3500, longest=3600)
    prompt, salt, transfer_id = random_prompt(71, 4000), fresh_salt(), f"xfer-{uuid.uuid4()}"
    body = completion_body(prompt, 1, salt, stream=True, kv_transfer_params=to_prefill(transfer_id))
    with ThreadPoolExecutor(1 + num_not_loading) as threads:
        for other in others:
            threads.submit(handoffs.prefill.complete, other, 1)
        answer = threads.submit(
            handoffs.decode.complete, prompt, 8, salt, kv_transfer_params=handoffs.to_decode(transfer_id)
        )
        wait_for_usage(handoffs.decode)
        with streaming(handoffs.prefill, body):
            wait_for_usage(handoffs.prefill)
            # Behind the others it has no blocks by which to know that it has come.
            time.sleep(0.5 if others else 0.0)
        gone_at = time.monotonic()
        with pytest.raises(RequestFailed):
            answer.result()
    assert time.monotonic() - gone_at < 20
    wait_until_unused([handoffs.prefill, handoffs.decode])
    short = prompt[:300]
    check_tokens([handoffs.send(short)], pair.model, [short], reference)


@for_concurrent_pairs("concurrent-preempted")
def test_a_prompt_is_preempted_while_it_is_written(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """Others that are longer there keep most blocks of the prefill engine; what was written goes again."""
    handoffs, prompt = ConcurrentHandoffs.of(pair, engine_pool), random_prompt(90, 2000)
    logs_before, before = handoffs.log_ends(), handoffs.prefill.num_preemptions()
    with ThreadPoolExecutor(3) as threads:
        others = random_prompts(seed=91, count=3, shortest=900, longest=1000)
        generated = [threads.submit(handoffs.prefill.complete, other, 150) for other in others]
        while handoffs.prefill.num_running() < len(others):
            time.sleep(0.05)
        answer = handoffs.send(prompt)
        for other in generated:
            other.result()
    assert handoffs.prefill.num_preemptions() > before
    handoffs.check_released(logs_before)
    check_tokens([answer], pair.model, [prompt], reference)


@pytest.mark.ends_engines
@pytest.mark.engines("gqa-layers", "gqa-tp2", "gqa-tp1")
def test_the_decode_engine_is_killed_while_a_prompt_is_written(engine_pool: EnginePool, reference: Reference) -> None:
    """The prefill engine has its blocks back long before a lease ends, and writes to another one."""
    pair = Pair("concurrent-to-killed", "gqa-layers", "gqa-tp2")
    kill_while_writing(pair, engine_pool, pair.decode)
    handoffs, prompt = (
        ConcurrentHandoffs.of(Pair("concurrent-to-next", pair.prefill, "gqa-tp1"), engine_pool),
        random_prompt(95, 700),
    )
    check_tokens([handoffs.send(prompt)], pair.model, [prompt], reference)


@pytest.mark.ends_engines
@pytest.mark.engines("gqa-chunked", "gqa-tp1-next", "gqa-tp1")
def test_the_prefill_engine_is_killed_while_it_writes(engine_pool: EnginePool, reference: Reference) -> None:
    """The decode engine's request fails at once, its blocks are free, and another engine may write to it."""
    pair = Pair("concurrent-from-killed", "gqa-chunked", "gqa-tp1-next")
    kill_while_writing(pair, engine_pool, pair.prefill)
    handoffs, prompt = (
        ConcurrentHandoffs.of(Pair("concurrent-from-next", "gqa-tp1", pair.decode), engine_pool),
        random_prompt(96, 700),
    )
    check_tokens([handoffs.send(prompt)], pair.model, [prompt], reference)


def kill_while_writing(pair: Pair, pool: EnginePool, victim: str) -> None:
    """Kill one engine of the pair while a prompt is computed and written; the other fails what waits and is free."""
    handoffs, killed = ConcurrentHandoffs.of(pair, pool), pool.running.pop(victim)
    [survivor] = [engine for engine in (handoffs.prefill, handoffs.decode) if engine is not killed]
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(handoffs.send, random_prompt(94, 4000))
        wait_for_usage(handoffs.decode)
        wait_for_usage(handoffs.prefill)
        killed.server.process.kill()
        killed_at = time.monotonic()
        with pytest.raises((RequestFailed, OSError)):
            answer.result()
    failed_at = time.monotonic()
    while survivor.usage():
        assert time.monotonic() - killed_at < KILLED_SECONDS
        time.sleep(0.05)
    print(f"failed after {failed_at - killed_at:.1f} s, free after {time.monotonic() - killed_at:.1f} s")


@pytest.mark.matrix
@pytest.mark.engines("gqa-tp1", "gqa-hasty")
def test_the_prefill_engine_is_stopped_while_it_writes(engine_pool: EnginePool, reference: Reference) -> None:
    """It may go on and write whenever it wants: the request fails in time, and its blocks wait for the engine."""
    pair = Pair("concurrent-from-stopped", "gqa-tp1", "gqa-hasty")
    handoffs, prompt, transfer_id = (
        ConcurrentHandoffs.of(pair, engine_pool),
        random_prompt(97, 4000),
        f"xfer-{uuid.uuid4()}",
    )
    process_ids = handoffs.prefill.server.process.process_ids()
    with ThreadPoolExecutor(2) as threads:
        to_decode = handoffs.to_decode(transfer_id)
        answer = threads.submit(handoffs.decode.complete, prompt, 8, kv_transfer_params=to_decode)
        wait_for_usage(handoffs.decode)
        prefilled = threads.submit(handoffs.prefill.complete, prompt, 1, kv_transfer_params=to_prefill(transfer_id))
        wait_for_usage(handoffs.prefill)
        try:
            for process_id in process_ids:
                os.kill(process_id, signal.SIGSTOP)
            stopped_at = time.monotonic()
            with pytest.raises(RequestFailed):
                answer.result()
            print(f"failed after {time.monotonic() - stopped_at:.1f} s")
            assert time.monotonic() - stopped_at < 15 + 10 + KILLED_SECONDS
            assert handoffs.decode.usage() > 0, "who is stopped may still write there"
        finally:
            for process_id in process_ids:
                os.kill(process_id, signal.SIGCONT)
        prefilled.result()
    end = time.monotonic() + KILLED_SECONDS
    while handoffs.decode.usage() or handoffs.prefill.usage():
        assert time.monotonic() < end
        time.sleep(0.05)
    check_tokens([handoffs.send(prompt[:700])], pair.model, [prompt[:700]], reference)


@pytest.mark.matrix
@pytest.mark.parametrize("arguments", [(), CHUNKED], ids=["whole", "chunked"])
def test_behind_vllm_router_that_sends_to_both_at_once(
    arguments: tuple[str, ...], engine_pool: EnginePool, reference: Reference
) -> None:
    """Its moriio mode: engines tell it of themselves, and request ids say which prefill engine."""
    discovery = f"127.0.0.1:{free_port()}"
    servers = []
    for name, role in (("gqa-tp1", "kv_producer"), ("gqa-tp1-next", "kv_consumer")):
        port = free_port()
        settings = engine_pool.settings(name)
        connector = {**settings.connector_settings, "router_address": discovery, "http_address": f"127.0.0.1:{port}"}
        given = (*settings.arguments, *arguments)
        settings = replace(settings, role=role, connector_settings=connector, arguments=given)  # type: ignore[arg-type]
        servers.append(start_engine(f"{name}-{role}", settings, engine_pool.folder, port))
    mode = ("--kv-connector", "moriio", "--vllm-discovery-address", discovery)
    servers.append(start_router([], [], engine_pool.folder, arguments=mode))
    try:
        wait_until_ready(servers)
        time.sleep(3)  # an engine says where it is once a second
        url = f"{servers[-1].url}/v1/completions"
        answers = [tokens_of(post(url, completion_body(prompt, 8, fresh_salt()))) for prompt in FEW]
        received = prompt_tokens(servers[1].metrics()).received
    finally:
        stop_servers(servers)
    assert received == sum(map(len, FEW))
    check_tokens(answers, "gqa", FEW, reference)
