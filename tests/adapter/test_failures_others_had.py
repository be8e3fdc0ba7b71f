"""Failures that others had with vLLM's scheduler; ``docs/failures-others-had.md`` says where the others are tested."""

import queue
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine.core import EngineShutdownState
from vllm.v1.outputs import KVConnectorOutput

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import Release
from kvferry.harness.launch import free_port

from ..waits import wait_until
from .scheduler_requests import FULL, PROMPT, STATE, allocated, handle_of, kept, next_step, request, run_prefill

BLOCKS = [5, 4, 3, 2, 1]


def release(role: Any, params: dict[str, Any]) -> None:
    """Release the hold that a prefill engine's answer names."""
    found = params["kvferry"]
    role._answer(Release(found["epoch"], (handle_of(params),)))


def test_vllm_52234_a_failed_load_of_a_hybrid_model_is_named_by_request_and_never_computed_on(make_role: Any) -> None:
    """VLLM#52234: a hybrid has no list of invalid blocks, so that a failed receive was taken for a received prompt."""
    prefill, decode = make_role(FULL, STATE), make_role(FULL, STATE)
    params = run_prefill(prefill, PROMPT, BLOCKS, [9]) or {}
    ours = request(PROMPT, params, "d")
    decode.on_new_request(ours)
    num_tokens, waits = decode.get_num_new_matched_tokens(ours, 0)
    assert waits, "vLLM computes nothing on these blocks before the load is reported"
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [0]), num_tokens)
    [order] = next_step(decode).loads
    assert order.error is not None, "the state has no block: the whole request fails, not its attention alone"
    assert order.request_id == "d"
    decode.update_connector_output(KVConnectorOutput(finished_recving={"d"}, failed_recving={"d"}))
    assert decode.get_num_new_matched_tokens(ours, 0) == (0, False)
    assert not decode._loading
    assert decode._num_loads == 0


def test_lmcache_2933_a_hundred_warm_requests_keep_no_block(make_role: Any) -> None:
    """LMCache#2933: each request with a prefix hit leaked 43 of 320 pages."""
    prefill, decode = make_role(FULL), make_role(FULL)
    for number in range(100):
        params = run_prefill(prefill, PROMPT, BLOCKS) or {}
        ours = request(PROMPT, params, f"d{number}")
        decode.on_new_request(ours)
        num_tokens, _ = decode.get_num_new_matched_tokens(ours, 16 * (number % 5))
        decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), num_tokens)
        next_step(decode, ours.request_id)
        decode.update_connector_output(KVConnectorOutput(finished_recving={ours.request_id}))
        decode.request_finished(ours, ([11, 12, 13, 14, 15],), is_complete=True)
        release(prefill, params)
        next_step(prefill)
    assert kept(prefill) == kept(decode) == []
    assert prefill._state.holds.num_holds == 0
    assert not decode._state.leases._holds._uses
    assert not decode._loading


def test_tensorrt_llm_12313_an_idle_engine_frees_what_ended_without_a_new_request(make_role: Any) -> None:
    """TensorRT-LLM PR #12313: clean-up ran only when new requests came."""
    role = make_role(FULL, lease_seconds=0.2, load_timeout_seconds=0.1)
    woken: queue.Queue[Any] = queue.Queue()
    role._engine.can_wake = True
    role._engine._core = SimpleNamespace(
        input_queue=woken, get_weight_version=lambda: "default", shutdown_state=EngineShutdownState.RUNNING
    )
    run_prefill(role, PROMPT, BLOCKS)
    next_step(role)
    assert sorted(kept(role)) == sorted(BLOCKS)
    assert not role.has_pending_work(), "the engine sleeps"
    woken.get(timeout=20)
    assert role.has_pending_work()
    next_step(role)
    assert kept(role) == []


@pytest.mark.parametrize("forced", ["twice", "before the prompt ended", "after the lease"])
def test_vllm_ascend_2899_5431_a_release_at_any_moment_frees_once(forced: str, make_role: Any) -> None:
    """vllm-ascend#2899, #5431: a release before the prompt was registered, or after a forced free, freed twice.

    The pool of these tests raises for a block that it does not keep.
    """
    short = {"lease_seconds": 0.2, "load_timeout_seconds": 0.1} if forced == "after the lease" else {}
    role = make_role(FULL, **short)
    ours = request(PROMPT, {"do_remote_decode": True}, "r")
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated(BLOCKS), 0)
    epoch, handle = role._state.epoch, role._state.holds.open_hold("r").handle
    next_step(role, "r")
    if forced == "before the prompt ended":
        role._answer(Release(epoch, (handle,)))
        next_step(role)
    ours.num_computed_tokens = ours.num_prompt_tokens
    role.request_finished(ours, (BLOCKS,), is_complete=True)
    end = time.monotonic() + 20
    while forced == "after the lease" and kept(role) and time.monotonic() < end:
        next_step(role)
        time.sleep(0.02)
    for _ in range(2):
        role._answer(Release(epoch, (handle,)))
        next_step(role)
    assert kept(role) == []
    assert role._state.holds.num_holds == 0


def test_vllm_ascend_7236_a_full_prefix_hit_is_never_reported_as_received(make_role: Any) -> None:
    """vllm-ascend#7236: a running request that had loaded nothing was reported as received, and vLLM ends."""
    prefill, decode = make_role(FULL), make_role(FULL)
    ours = request(PROMPT, run_prefill(prefill, PROMPT, BLOCKS) or {}, "d")
    decode.on_new_request(ours)
    assert decode.get_num_new_matched_tokens(ours, len(PROMPT) - 1) == (0, False)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), 0)
    orders = next_step(decode, "d")
    assert (orders.loads, decode._loading) == ([], {}), "no rank is asked for anything that it would report"
    assert not decode._state.leases._holds._uses, "the hold is let go"


def test_vllm_ascend_6325_the_two_engines_ids_of_a_request_differ_and_the_prefill_engines_is_carried(
    make_role: Any,
) -> None:
    """vllm-ascend#6325: each engine adds its own suffix, so that a release by the decode engine's id ended nothing."""
    prefill, decode = make_role(FULL), make_role(FULL)
    params = run_prefill(prefill, PROMPT, BLOCKS, request_id="cmpl-a-0-aaaaaaaa") or {}
    ours = request(PROMPT, params, "cmpl-a-0-bbbbbbbb")
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
    [order] = next_step(decode).loads
    assert order.error is None
    assert order.hold.handle.request_id == "cmpl-a-0-aaaaaaaa"
    decode.update_connector_output(KVConnectorOutput(finished_recving={ours.request_id}))
    wait_until(lambda: not kept(prefill), "the decode engine's release ended nothing", each=lambda: next_step(prefill))


def test_vllm_ascend_5960_data_parallel_ranks_name_their_own_ports(make_role: Any) -> None:
    """vllm-ascend#5960: a port that the settings name is that of rank 0; the others' come with the answers."""
    port = free_port()
    ranks = [make_role(FULL, port=port, dp_rank=rank) for rank in range(2)]
    answers = [run_prefill(rank, PROMPT, [5, 4, 3, 2, 1]) or {} for rank in ranks]
    assert [answer["remote_port"] for answer in answers] == [port, port + 1]
    assert [answer["remote_engine_id"] for answer in answers] == ["engine-0", "engine-1"]
    with pytest.raises(HandoffError) as taken:
        make_role(FULL, port=port, dp_rank=1)
    assert taken.value.reason is Reason.PORT_IN_USE
    assert str(port + 1) in str(taken.value)
    free = [run_prefill(make_role(FULL, dp_rank=rank), PROMPT, [5, 4, 3, 2, 1]) or {} for rank in range(2)]
    assert len({answer["remote_port"] for answer in free}) == 2
