"""Pushes between real engines, behind a tiny router that sends to both at once and behind vllm-router unmodified."""

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
from kvferry.harness.engine_metrics import prompt_tokens
from kvferry.harness.launch import free_port, start_engine, start_router, stop_servers, wait_until_ready

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
    PUSH_PAIRS,
    PUSHED_WAVE,
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
from .pushes import Pushes, bootstrap_address, to_prefill

pytestmark = pytest.mark.vllm

KILLED_SECONDS = 20.0
FAILING_PAIRS = (
    *(pair for pair in PUSH_PAIRS if pair.name in ("push-2-1", "push-granite-2-1", "push-granite-1-2")),
    Pair("push-recomputes", "gqa-push-tp2", "gqa-push-layers"),
)
"""Decode engines of both values of ``kv_load_failure_policy``."""
FEW = random_prompts(seed=22, count=4, shortest=5, longest=1500)


def for_push_pairs(*names: str, matrix: bool = False) -> Any:
    """Parametrize a test over the pairs named, or over all; the argument is ``pair``.

    With ``matrix`` over all in the matrix.
    """
    named = [pair for pair in PUSH_PAIRS if not names or pair.name in names or (matrix and ALL_PAIRS)]
    return over_pairs(named, lambda pair: (pair.prefill, pair.decode))


@for_push_pairs()
def test_pushed_prompts_give_the_tokens_of_one_engine(
    pair: Pair, engine_pool: EnginePool, reference: Reference
) -> None:
    pushes = Pushes.of(pair, engine_pool)
    logs_before, before = pushes.log_ends(), pushes.decode.prompt_tokens()
    answers = pushes.send_all(PUSHED_WAVE)
    pushes.check_released(logs_before)
    moved = pushes.decode.prompt_tokens() - before
    # Of a hybrid the decode engine computes the last token itself.
    num_computed = len(PUSHED_WAVE) if pair.is_hybrid else 0
    assert (moved.received, moved.cached, moved.computed) == (
        sum(map(len, PUSHED_WAVE)) - num_computed,
        0,
        num_computed,
    )
    assert {load["transport"] for load in pushes.decode.loads()[-len(PUSHED_WAVE) :]} == {pair.transport}
    check_tokens(answers, pair.model, PUSHED_WAVE, reference)


@pytest.mark.matrix
@pytest.mark.engines("lora-push-tp2", "lora-push-tp1")
def test_an_adapter_of_other_weights_under_the_same_name_is_not_pushed(engine_pool: EnginePool) -> None:
    """The same adapter in another folder is pushed."""
    pushes = Pushes.of(Pair("lora", "lora-push-tp2", "lora-push-tp1"), engine_pool)
    prompt, before = random_prompt(92, 300), pushes.decode.prompt_tokens()
    pushes.send(prompt)
    assert (pushes.decode.prompt_tokens() - before).received == len(prompt)
    logs_before, transfer_id = pushes.log_ends(), "xfer-of-another-adapter"
    pushes.prefill.complete(prompt, 1, kv_transfer_params=to_prefill(transfer_id), model=OWN_ADAPTER)
    params = pushes.to_decode(transfer_id)
    with pytest.raises(RequestFailed) as refused:
        pushes.decode.complete(prompt, kv_transfer_params=params, model=OWN_ADAPTER)
    check_adapter_is_refused((pushes.prefill, pushes.decode), logs_before, refused.value)


@for_push_pairs("push-1-1", "push-2-1", matrix=True)
def test_behind_vllm_router_as_it_is(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """In mooncake mode; it sends to the decode engine when the prefill engine has answered."""
    pushes, prompts = Pushes.of(pair, engine_pool), PUSHED_WAVE if ALL_PAIRS else FEW
    logs_before, before = pushes.log_ends(), pushes.decode.prompt_tokens()
    port = bootstrap_address(pushes.prefill).rpartition(":")[2]
    arguments = ("--prefill", pushes.prefill.server.url, port, "--kv-connector", "mooncake")
    router = start_router([], [pushes.decode.server.url], engine_pool.folder, arguments=arguments)
    try:
        wait_until_ready([router])
        url = f"{router.url}/v1/completions"
        with ThreadPoolExecutor(len(prompts)) as threads:
            posted = threads.map(lambda prompt: post(url, completion_body(prompt, 8, fresh_salt())), prompts)
            answers = [tokens_of(answer) for answer in posted]
        pushes.check_released(logs_before)
    finally:
        stop_servers([router])
    num_computed = len(prompts) if pair.is_hybrid else 0
    assert (pushes.decode.prompt_tokens() - before).received == sum(map(len, prompts)) - num_computed
    check_tokens(answers, pair.model, prompts, reference)


@for_push_pairs("push-chunked", "push-layers", "push-compiled")
def test_spans_are_pushed_before_others_have_been_computed(pair: Pair, engine_pool: EnginePool) -> None:
    pushes, num_tokens = Pushes.of(pair, engine_pool), 2000
    pushes.send(random_prompt(33, num_tokens))
    sent = pushes_of(pushes.prefill, num_tokens, pushes.decode.tp)
    ends = [loads[-1]["events"] for loads in pushes.decode.loads_of_ranks()]
    for push in sent:
        events, batches = push["events"], push["events"]["batches"]
        steps = [step for step in pushes.prefill.steps() if events["transfer_id"] in step["prompts"]]
        assert sum(batch["bytes"] for batch in batches) == push["bytes"]
        early = [batch for batch in batches if batch["landed_at"] < steps[-1]["step_ended_at"]]
        assert len(batches) > 1
        assert len(early) >= len(batches) - 2, events
        for batch in batches:
            assert all(ran_at(span, steps, events["transfer_id"]) <= batch["posted_at"] for span in batch["spans"])
    last_landed_at = max(push["events"]["batches"][-1]["landed_at"] for push in sent)
    assert last_landed_at <= max(each["committed_at"] for each in ends)


def ran_at(span: dict[str, Any], steps: Sequence[dict[str, Any]], transfer_id: str) -> float:
    """Return when the layers of a span had run for its last token."""
    step = next(step for step in steps if step["prompts"][transfer_id] >= span["tokens"][1])
    return float(step["ran_at"].get(span["layers"][-1], step["step_ended_at"]))


def pushes_of(engine: Engine, num_tokens: int, count: int) -> list[dict[str, Any]]:
    """Return the pushes of prompts of this length that the engine's first rank logs, in a step after their end."""
    end = time.monotonic() + 10
    while True:
        pushes = [line for line in engine.loads() if "push" in line]
        found = [line for line in pushes if line["events"]["num_tokens"] == num_tokens]
        if len(found) == count:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.2)
        engine.complete(random_prompt(34, 3), 1)


@for_push_pairs("push-2-1", matrix=True)
def test_tokens_depend_on_what_is_pushed(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """Negative control: a descriptor that is silently left out shows in the tokens."""
    pushes, prompt = Pushes.of(pair, engine_pool), random_prompt(31, 700)
    pushes.prefill.set_faults({"drop": 0})
    pushes.decode.set_faults({})  # no fault, but no digests are compared
    try:
        answer = pushes.send(prompt)
    finally:
        pushes.decode.set_faults(None)
        pushes.prefill.set_faults(None)
    assert answer != [reference.tokens(pair.model, [prompt])[0]]
    check_tokens([pushes.send(prompt)], pair.model, [prompt], reference)


@over_pairs(FAILING_PAIRS, lambda pair: (pair.prefill, pair.decode))
def test_a_failed_write_is_an_error_or_is_computed(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """With ``recompute`` the decode engine computes the prompt, its states included, in other blocks; nothing leaks."""
    pushes, prompt = Pushes.of(pair, engine_pool), random_prompt(32, 700)
    recomputes = pushes.decode.settings.load_failure_policy == "recompute"
    before = pushes.decode.prompt_tokens()
    pushes.prefill.set_faults({"fail_after": 0})
    try:
        if recomputes:
            check_tokens([pushes.send(prompt)], pair.model, [prompt], reference)
        else:
            with pytest.raises(RequestFailed):
                pushes.send(prompt)
    finally:
        pushes.prefill.set_faults(None)
    assert pushes.decode.loads()[-1]["error"] == Reason.TRANSFER_FAILED.value
    assert (pushes.decode.prompt_tokens() - before).computed == (len(prompt) if recomputes else 0)
    wait_until_unused([pushes.prefill, pushes.decode])
    check_tokens([pushes.send(prompt)], pair.model, [prompt], reference)


@for_push_pairs("push-2-1", "push-chunked", "push-gemma-2-1")
def test_prefix_hits_on_both_sides(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    check_prefix_hits(Pushes.of(pair, engine_pool), reference)


@for_push_pairs("push-chunked", "push-layers", "push-compiled")
def test_prefix_hits_on_the_prefill_side(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """What the prefill engine had before is pushed all the same, and in no step before it has been computed.

    Prompts that begin alike and come at once share the blocks of one of them, which this very step may compute.
    """
    pushes, salt = Pushes.of(pair, engine_pool), fresh_salt()
    known, new = random_prompt(54, 900), random_prompt(55, 520)
    pushes.prefill.complete(known, 1, salt)
    before = [engine.prompt_tokens() for engine in (pushes.prefill, pushes.decode)]
    prompt = known + random_prompt(56, 600)
    answers = [pushes.send(prompt, salt=salt)]
    moved = [
        engine.prompt_tokens() - then for engine, then in zip((pushes.prefill, pushes.decode), before, strict=True)
    ]
    assert (moved[0].cached, moved[1].cached, moved[1].received) == (896, 0, 1500)
    alike = [new + random_prompt(57 + number, 40 * number) for number in range(1, 6)]
    logs_before = pushes.log_ends()
    answers += pushes.send_all(alike, salt=salt)
    pushes.check_released(logs_before)
    check_tokens(answers, pair.model, [prompt, *alike], reference)


@for_push_pairs("push-2-1", "push-chunked")
def test_the_client_of_the_decode_engine_goes_away(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """While the prompt is being written, and nothing of it ever arrives."""
    pushes = Pushes.of(pair, engine_pool)
    prompt, salt, transfer_id = random_prompt(70, 700), fresh_salt(), f"xfer-{uuid.uuid4()}"
    pushes.prefill.set_faults({"hang": True})
    try:
        to_decode = pushes.to_decode(transfer_id)
        with streaming(pushes.decode, completion_body(prompt, 8, salt, stream=True, kv_transfer_params=to_decode)):
            wait_for_usage(pushes.decode)
            pushes.prefill.complete(prompt, 1, salt, kv_transfer_params=to_prefill(transfer_id))
            time.sleep(0.5)
        wait_until_unused([pushes.prefill, pushes.decode])
    finally:
        pushes.prefill.set_faults(None)
    check_tokens([pushes.send(prompt)], pair.model, [prompt], reference)


@pytest.mark.parametrize("num_not_loading", [0, 3], ids=["while computing", "while waiting for its turn"])
@for_push_pairs("push-chunked")
def test_the_client_of_the_prefill_engine_goes_away(
    pair: Pair, num_not_loading: int, engine_pool: EnginePool, reference: Reference
) -> None:
    """The decode engine's request fails at once, not when its time is over."""
    pushes = Pushes.of(pair, engine_pool)
    others = random_prompts(seed=72, count=num_not_loading, shortest=3500, longest=3600)
    prompt, salt, transfer_id = random_prompt(71, 4000), fresh_salt(), f"xfer-{uuid.uuid4()}"
    body = completion_body(prompt, 1, salt, stream=True, kv_transfer_params=to_prefill(transfer_id))
    with ThreadPoolExecutor(1 + num_not_loading) as threads:
        for other in others:
            threads.submit(pushes.prefill.complete, other, 1)
        answer = threads.submit(
            pushes.decode.complete, prompt, 8, salt, kv_transfer_params=pushes.to_decode(transfer_id)
        )
        wait_for_usage(pushes.decode)
        with streaming(pushes.prefill, body):
            wait_for_usage(pushes.prefill)
            # Behind the others it has no blocks by which to know that it has come.
            time.sleep(0.5 if others else 0.0)
        gone_at = time.monotonic()
        with pytest.raises(RequestFailed):
            answer.result()
    assert time.monotonic() - gone_at < 20
    wait_until_unused([pushes.prefill, pushes.decode])
    short = prompt[:300]
    check_tokens([pushes.send(short)], pair.model, [short], reference)


@for_push_pairs("push-preempted")
def test_a_prompt_is_preempted_while_it_is_pushed(pair: Pair, engine_pool: EnginePool, reference: Reference) -> None:
    """Others that are longer there keep most blocks of the prefill engine; what was pushed goes again."""
    pushes, prompt = Pushes.of(pair, engine_pool), random_prompt(90, 2000)
    logs_before, before = pushes.log_ends(), pushes.prefill.num_preemptions()
    with ThreadPoolExecutor(3) as threads:
        others = random_prompts(seed=91, count=3, shortest=900, longest=1000)
        generated = [threads.submit(pushes.prefill.complete, other, 150) for other in others]
        while pushes.prefill.num_running() < len(others):
            time.sleep(0.05)
        answer = pushes.send(prompt)
        for other in generated:
            other.result()
    assert pushes.prefill.num_preemptions() > before
    pushes.check_released(logs_before)
    check_tokens([answer], pair.model, [prompt], reference)


@pytest.mark.ends_engines
@pytest.mark.engines("gqa-push-layers", "gqa-push-tp2", "gqa-push-tp1")
def test_the_decode_engine_is_killed_while_a_prompt_is_pushed(engine_pool: EnginePool, reference: Reference) -> None:
    """The prefill engine has its blocks back long before a lease ends, and pushes to another one."""
    pair = Pair("push-to-killed", "gqa-push-layers", "gqa-push-tp2")
    kill_while_pushing(pair, engine_pool, pair.decode)
    pushes, prompt = Pushes.of(Pair("push-to-next", pair.prefill, "gqa-push-tp1"), engine_pool), random_prompt(95, 700)
    check_tokens([pushes.send(prompt)], pair.model, [prompt], reference)


@pytest.mark.ends_engines
@pytest.mark.engines("gqa-push-chunked", "gqa-push-tp1-other", "gqa-push-tp1")
def test_the_prefill_engine_is_killed_while_it_pushes(engine_pool: EnginePool, reference: Reference) -> None:
    """The decode engine's request fails at once, its blocks are free, and another engine may push to it."""
    pair = Pair("push-from-killed", "gqa-push-chunked", "gqa-push-tp1-other")
    kill_while_pushing(pair, engine_pool, pair.prefill)
    pushes, prompt = Pushes.of(Pair("push-from-next", "gqa-push-tp1", pair.decode), engine_pool), random_prompt(96, 700)
    check_tokens([pushes.send(prompt)], pair.model, [prompt], reference)


def kill_while_pushing(pair: Pair, pool: EnginePool, victim: str) -> None:
    """Kill one engine of the pair while a prompt is computed and pushed; the other must fail what waits and be free."""
    pushes, killed = Pushes.of(pair, pool), pool.running.pop(victim)
    [survivor] = [engine for engine in (pushes.prefill, pushes.decode) if engine is not killed]
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(pushes.send, random_prompt(94, 4000))
        wait_for_usage(pushes.decode)
        wait_for_usage(pushes.prefill)
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
@pytest.mark.engines("gqa-push-tp1", "gqa-push-hasty")
def test_the_prefill_engine_is_stopped_while_it_pushes(engine_pool: EnginePool, reference: Reference) -> None:
    """It may go on and write whenever it wants: the request fails in time, and its blocks wait for the engine."""
    pair = Pair("push-from-stopped", "gqa-push-tp1", "gqa-push-hasty")
    pushes, prompt, transfer_id = Pushes.of(pair, engine_pool), random_prompt(97, 4000), f"xfer-{uuid.uuid4()}"
    process_ids = pushes.prefill.server.process.process_ids()
    with ThreadPoolExecutor(2) as threads:
        to_decode = pushes.to_decode(transfer_id)
        answer = threads.submit(pushes.decode.complete, prompt, 8, kv_transfer_params=to_decode)
        wait_for_usage(pushes.decode)
        prefilled = threads.submit(pushes.prefill.complete, prompt, 1, kv_transfer_params=to_prefill(transfer_id))
        wait_for_usage(pushes.prefill)
        try:
            for process_id in process_ids:
                os.kill(process_id, signal.SIGSTOP)
            stopped_at = time.monotonic()
            with pytest.raises(RequestFailed):
                answer.result()
            print(f"failed after {time.monotonic() - stopped_at:.1f} s")
            assert time.monotonic() - stopped_at < 15 + 10 + KILLED_SECONDS
            assert pushes.decode.usage() > 0, "who is stopped may still write there"
        finally:
            for process_id in process_ids:
                os.kill(process_id, signal.SIGCONT)
        prefilled.result()
    end = time.monotonic() + KILLED_SECONDS
    while pushes.decode.usage() or pushes.prefill.usage():
        assert time.monotonic() < end
        time.sleep(0.05)
    check_tokens([pushes.send(prompt[:700])], pair.model, [prompt[:700]], reference)


@pytest.mark.matrix
@pytest.mark.parametrize("arguments", [(), CHUNKED], ids=["whole", "chunked"])
def test_behind_vllm_router_that_sends_to_both_at_once(
    arguments: tuple[str, ...], engine_pool: EnginePool, reference: Reference
) -> None:
    """Its moriio mode, as in the demo: engines tell it of themselves, and request ids say which prefill engine."""
    discovery = f"127.0.0.1:{free_port()}"
    servers = []
    for name, role in (("gqa-push-tp1", "kv_producer"), ("gqa-push-tp1-other", "kv_consumer")):
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
