"""The scheduler's role without an engine: its answers, holds and loads, request by request."""

import gc
import logging
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput

from kvferry.errors import Reason, SettingsError
from kvferry.handoff import remote_holds
from kvferry.handoff.holds import handle_of_transfer, transfer_of
from kvferry.handoff.messages import Handle, Release, Renew
from kvferry.handoff.source import END, BlockList
from kvferry.handoff.wire.client import ask
from kvferry.integrations.vllm.connector import KVFerryConnector
from kvferry.integrations.vllm.scheduler import role as scheduler_role
from kvferry.integrations.vllm.scheduler.blocks import GroupShape, KeptBlocks
from kvferry.integrations.vllm.scheduler.destination import LATE_SECONDS
from kvferry.integrations.vllm.scheduler.params import prompt_digest
from kvferry.integrations.vllm.versions import can_name_loaded_groups
from kvferry.layout.shard import CacheKind

from ..waits import wait_until
from .flows import FLOWS, Flow, to_decode, to_prefill
from .scheduler_requests import (
    A_RANK,
    FULL,
    PROMPT,
    STATE,
    WINDOW,
    BlockPool,
    allocated,
    handle_of,
    kept,
    let_sleep,
    next_step,
    request,
    run_prefill,
    scheduled,
    transfer_id_of,
)


def test_blocks_that_a_load_fills_in_part_are_left_for_the_engine_to_clear(make_role: Any) -> None:
    """What is behind the last token there may be NaN as a key or value. Of pages that move whole no byte is left."""
    prefill = make_role(FULL, STATE)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1], [9])
    foreign = {**(params or {}), "kvferry": {}}
    longer = GroupShape(CacheKind.ATTENTION, 32)
    cases = [((FULL, STATE), params, (0, 1)), ((longer, STATE), params, (1,)), ((FULL, STATE), foreign, ())]
    for groups, asked, filled in cases:
        decode, ours = make_role(*groups), request(PROMPT, asked or {}, "d")
        decode.on_new_request(ours)
        assert decode.groups_filled_whole(ours) == filled


@pytest.mark.skipif(not can_name_loaded_groups(), reason="vLLM clears such blocks since 0.32")
@pytest.mark.parametrize(("source_size", "cleared"), [(16, [1, 2, 3]), (32, [])])
def test_vllm_clears_the_blocks_that_a_load_fills_in_part(source_size: int, cleared: list[int], make_role: Any) -> None:
    """Through vLLM's own manager of blocks, for a model with states."""
    full = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=16, dtype=torch.float32)
    state = MambaSpec(block_size=4096, shapes=((4, 4),), dtypes=(torch.float32,), page_size_padded=full.page_size_bytes)
    groups = [KVCacheGroupSpec(["attention"], full), KVCacheGroupSpec(["state"], state)]
    manager = KVCacheManager(KVCacheConfig(8, [], groups), 4096, 4096, 32, enable_caching=False)
    prefill = make_role(GroupShape(CacheKind.ATTENTION, source_size), STATE)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1], [9])
    decode, ours = make_role(GroupShape(CacheKind.ATTENTION, 32), STATE), request(PROMPT, params or {}, "d")
    decode.on_new_request(ours)
    num_tokens, _ = decode.get_num_new_matched_tokens(ours, 0)
    filled = decode.groups_filled_whole(ours)
    manager.allocate_slots(ours, 0, num_external_computed_tokens=num_tokens, skip_zeroing_group_ids=filled)
    assert manager.take_new_block_ids() == cleared


@pytest.mark.parametrize("other", [STATE, WINDOW])
def test_the_prompt_is_cut_once_and_only_where_its_last_token_does_harm(other: GroupShape, make_role: Any) -> None:
    sampled, plain = make_role(FULL, other), make_role(FULL)
    shared = list(PROMPT)
    samples = [request(shared, {"do_remote_decode": True}, f"{n}_r", max_tokens=9) for n in range(2)]
    for sample in samples:
        sampled.on_new_request(sample)
    assert [(each.num_prompt_tokens, each.num_tokens, each.max_tokens) for each in samples] == [(79, 79, 1)] * 2
    assert shared == PROMPT
    whole = [(sampled, PROMPT[:1], {}), (sampled, PROMPT, {"prompt_logprobs": 1}), (plain, PROMPT, {})]
    for role, prompt, sampling in whole:
        ours = request(list(prompt), {"do_remote_decode": True}, "whole", **sampling)
        role.on_new_request(ours)
        assert ours.num_prompt_tokens == len(prompt)


def test_hole_15_the_prompt_of_a_session_is_not_cut(make_role: Any) -> None:
    """Its client sends more tokens later, which follow the prompt's last one."""
    role = make_role(FULL, STATE)
    session = request(PROMPT, {"do_remote_decode": True}, max_tokens=9)
    session.resumable = True
    role.on_new_request(session)
    assert (session.prompt_token_ids, session.num_prompt_tokens, session.max_tokens) == (PROMPT, len(PROMPT), 9)


def test_hole_15_each_parallel_sample_in_one_process_loads_the_prompt(make_role: Any) -> None:
    """VLLM gives all samples of a request one object of parameters; what one has loaded, the others have not."""
    prefill, decode = make_role(FULL), make_role(FULL)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1])
    samples = [request(PROMPT, params or {}, f"{number}_d") for number in range(2)]
    assert samples[0].kv_transfer_params is samples[1].kv_transfer_params
    for sample in samples:
        decode.on_new_request(sample)
    for number, sample in enumerate(samples):
        assert decode.get_num_new_matched_tokens(sample, 0) == (len(PROMPT), True)
        blocks = list(range(11 + 5 * number, 16 + 5 * number))
        decode.update_state_after_alloc(sample, allocated(blocks), len(PROMPT))
        assert decode.get_num_new_matched_tokens(sample, 0) == (0, False), "each is loaded once"
    assert [order.request_id for order in next_step(decode).loads] == ["0_d", "1_d"]


def test_a_state_that_went_past_the_prompt_is_not_exported(make_role: Any) -> None:
    role = make_role(FULL, STATE)
    ours = request(PROMPT, {"do_remote_decode": True})
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([1], [2]), 0)
    ours.num_computed_tokens = ours.num_prompt_tokens + 1
    assert role.request_finished(ours, ([1], [2]), is_complete=True) == (False, None)
    assert role._state.holds.num_holds == 0


def test_the_decode_engine_refuses_a_state_of_the_whole_prompt(make_role: Any) -> None:
    """As where the prefill engine was asked for the prompt's log probabilities and the decode engine was not."""
    prefill, decode = make_role(FULL, STATE), make_role(FULL, STATE)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1], [9], prompt_logprobs=1)
    assert params is not None
    ours = request(PROMPT, params, "d")
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [16]), len(PROMPT) - 1)
    [order] = next_step(decode).loads
    assert order.error is not None
    assert order.error.reason is Reason.INVALID_REQUEST


def test_blocks_that_left_the_window_are_neither_held_nor_loaded(make_role: Any) -> None:
    prefill, decode = make_role(FULL, WINDOW), make_role(FULL, WINDOW)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1], [0, 0, 8, 7, 6])
    assert params is not None
    assert sorted(kept(prefill)) == [1, 2, 3, 4, 5, 6, 7, 8]
    ours = request(PROMPT, params, "d")
    decode.on_new_request(ours)
    assert decode.get_num_new_matched_tokens(ours, 0) == (len(PROMPT) - 1, True)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [0, 0, 16, 17, 18]), len(PROMPT) - 1)
    [order] = next_step(decode).loads
    assert [blocks.destination_ids.tolist() for blocks in order.blocks] == [[11, 12, 13, 14, 15], [16, 17, 18]]
    assert [blocks.first_token for blocks in order.blocks] == [0, 32]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize(
    ("block_size", "prefix_caching", "is_refused"),
    [(32, True, True), (32, False, False), (24, True, True), (12, True, True), (16, True, False), (8, True, False)],
)
def test_a_window_block_that_a_load_would_fill_in_part_is_not_cached_as_a_whole(
    flow: Flow, block_size: int, prefix_caching: bool, is_refused: bool, make_role: Any
) -> None:
    """Behind 79 tokens the window of 40 begins in blocks of 16 at token 32; a block of 24 holds 24 to 47.

    vLLM would find it again for a prompt that begins alike and ends at 70, which attends to 31.
    """
    prefill = make_role(WINDOW)
    decode = make_role(GroupShape(CacheKind.SLIDING_WINDOW, block_size, 40), prefix_caching=prefix_caching)
    prefill.publish([A_RANK])
    params = to_decode(flow, prefill, run_prefill(prefill, PROMPT, [0, 0, 8, 7, 6]))
    ours = request(PROMPT, params, "d")
    decode.on_new_request(ours)
    while decode.get_num_new_matched_tokens(ours, 0)[0] is None:
        time.sleep(0.01)
    num_blocks = -(-79 // block_size)
    decode.update_state_after_alloc(ours, allocated([*range(11, 11 + num_blocks)]), 79)
    [order] = next_step(decode).loads
    if not is_refused:
        assert order.error is None
        return
    assert order.error.reason is Reason.BLOCK_SIZE_MISMATCH
    assert "--block-size 16, or with --no-enable-prefix-caching" in order.error.remedy


def test_a_window_that_the_prefill_engine_has_lost_is_not_held(
    make_role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = make_role(FULL, WINDOW)
    assert run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1], [0, 0, 0, 7, 6]) is None
    assert (kept(prefill), prefill._state.holds.num_holds) == ([], 0)
    assert "r is not held: its state or its window went past the prompt" in caplog.text
    assert len(next_step(prefill).ended_transfers) == 1, "the ranks were told of it"


@pytest.mark.parametrize("num_tokens", [2, 40, 41, *range(64, 80)])  # every place of an end in a block
def test_no_prompt_loses_what_its_last_token_attends_to(num_tokens: int, make_role: Any) -> None:
    """On both sides vLLM takes back the blocks that left the window, counted behind the tokens that it computed."""

    def listed(first_id: int, num_computed: int) -> list[int]:
        num_skipped = SlidingWindowManager.get_num_skipped_tokens(window, num_computed)
        return [first_id + at if at >= num_skipped // 16 else 0 for at in range(-(-num_computed // 16))]

    window: Any = SimpleNamespace(sliding_window=WINDOW.window, extra_retained_tokens=0)
    prefill, decode = make_role(WINDOW), make_role(WINDOW)
    sent = request(list(range(num_tokens)), {"do_remote_decode": True})
    prefill.on_new_request(sent)
    params = run_prefill(prefill, list(range(num_tokens)), listed(10, sent.num_prompt_tokens))
    ours = request(list(range(num_tokens)), params or {}, "d")
    decode.on_new_request(ours)
    num_loaded, _ = decode.get_num_new_matched_tokens(ours, 0)
    decode.update_state_after_alloc(ours, allocated(listed(30, num_loaded)), num_loaded)
    assert [order.error for order in next_step(decode).loads] == [None] * (num_loaded > 0)


def test_leases_are_renewed_during_a_long_step(make_role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the server's thread of the decode engine runs; each renewal follows from the answer to the last one."""
    monkeypatch.setattr(remote_holds, "RENEW_SHARE", 0.001)
    prefill, decode = make_role(FULL), make_role(FULL)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1])
    decode.on_new_request(request(PROMPT, params or {}, "d"))
    ends = {decode._state.leases._holds.lease_of("d").end}
    wait_until(
        lambda: len(ends) >= 4,
        "the lease is not renewed",
        each=lambda: ends.add(decode._state.leases._holds.lease_of("d").end),
    )


@pytest.mark.parametrize("ending", ["released", "expired", "aborted"])
def test_the_step_that_frees_the_blocks_of_a_hold_ends_its_transfer_first(ending: str, make_role: Any) -> None:
    """Else a rank would write other prompts' blocks to a decode engine that announces late."""
    role = make_role(FULL, lease_seconds=0.3 if ending == "expired" else 60.0)
    ours = request(PROMPT, {"do_remote_decode": True})
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([5, 4, 3, 2, 1]), 0)
    orders = role.build_connector_meta(scheduled({"r": len(PROMPT)}, {"r": ([5, 4, 3, 2, 1],)}))
    [(transfer_id, told)] = orders.finished
    assert (told.num_tokens, told.num_final, told.blocks) == (80, END, {"0": BlockList(0, [5, 4, 3, 2, 1])})
    if ending == "aborted":
        role.request_finished(ours, ([5, 4, 3, 2, 1],), is_complete=False)
    else:
        ours.num_computed_tokens = ours.num_prompt_tokens
        _, params = role.request_finished(ours, ([5, 4, 3, 2, 1],), is_complete=True)
        assert transfer_id_of(params) == transfer_id
        assert next_step(role).ended_transfers == []
        assert sorted(kept(role)) == [1, 2, 3, 4, 5]
    if ending == "released":
        handle = handle_of(params)
        ask("127.0.0.1", params["remote_port"], Release(params["kvferry"]["epoch"], (handle,)), 10.0)
    if ending == "expired":
        time.sleep(0.4)
    assert ending == "aborted" or sorted(kept(role)) == [1, 2, 3, 4, 5], "freed before the workers get the order"
    assert next_step(role).ended_transfers == [transfer_id]
    assert kept(role) == []


def test_a_load_may_take_longer_than_the_lease_that_is_renewed_meanwhile(make_role: Any) -> None:
    prefill = make_role(FULL, lease_seconds=5.0)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1])
    decode, ours = make_role(FULL, load_timeout_seconds=30.0), request(PROMPT, params or {}, "d")
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
    [order] = next_step(decode).loads
    assert (order.error, order.timeout_seconds) == (None, 30.0)


def test_hole_6_a_paused_decode_engine_renews_for_the_length_of_a_lease_and_no_longer(make_role: Any) -> None:
    """Its server goes on while no step ends; else it would keep the prefill engine's blocks for ever."""
    prefill, decode = make_role(FULL, lease_seconds=2.0), make_role(FULL, lease_seconds=1.0)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1])
    decode.on_new_request(request(PROMPT, params or {}, "d"))
    living = time.monotonic() + 3.0
    while time.monotonic() < living:
        next_step(decode)
        time.sleep(0.01)
        next_step(prefill)
        assert kept(prefill), "a request in the queue of a living engine has lost its hold"
    paused_at = time.monotonic()
    while kept(prefill):
        assert time.monotonic() < paused_at + 20, "a paused engine renews for ever"
        time.sleep(0.01)
        next_step(prefill)
    assert time.monotonic() > paused_at + 1.0


def test_a_prefill_engine_that_was_stopped_ends_no_hold_before_its_decode_engine_can_renew(
    make_role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = make_role(FULL)
    role._server.close()
    params = run_prefill(role, PROMPT, [5, 4, 3, 2, 1])
    handle = handle_of(params or {})
    role._answer(Renew(params["kvferry"]["epoch"], (handle,)))
    stopped_at = time.monotonic()
    clock = SimpleNamespace(now=stopped_at + 40.0)
    monkeypatch.setattr(scheduler_role, "time", SimpleNamespace(monotonic=lambda: clock.now))
    next_step(role)
    assert kept(role), "the renewals of 40 s wait in a socket"
    for _ in range(12):
        clock.now += 1.0
        next_step(role)
    assert not kept(role), "the decode engine did not come back"


def test_a_hold_that_was_lost_during_a_step_ends_the_load_with_that_reason(make_role: Any) -> None:
    prefill, decode = make_role(FULL), make_role(FULL)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1])
    ours = request(PROMPT, params or {}, "d")
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
    next_step(decode)
    with prefill._state.holds_lock:
        prefill._state.holds.expire(time.monotonic() + 1e6)
    with decode._state.leases._lock:
        decode._state.leases._holds._renew_at = dict.fromkeys(decode._state.leases._holds._renew_at, 0.0)
    lost = wait_until(lambda: next_step(decode).lost, "nothing was lost")
    assert lost == ["d"]


@pytest.mark.parametrize("named", [{}, {"transfer_id": "x"}], ids=FLOWS)
def test_why_a_request_cannot_be_loaded_keeps_no_frame_alive(
    named: dict[str, Any], make_role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is known until the request ends, which a client may delay."""
    caplog.set_level(logging.CRITICAL, "kvferry")  # pytest would keep what is logged
    decode, ours = make_role(FULL), request(PROMPT, {"do_remote_prefill": True, **named}, "d")
    alive = weakref.ref(ours)
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
    [order] = next_step(decode).loads
    assert order.error.reason is Reason.MALFORMED_MESSAGE
    assert order.error.remedy
    del ours, order
    gc.collect()
    assert alive() is None


def load_of(prefill: Any, decode: Any) -> Any:
    """Return the order to load a prompt that one engine holds for the other."""
    ours = request(PROMPT, run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}, "d")
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
    [order] = next_step(decode).loads
    return order


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_hold_is_released_once_all_ranks_have_reported_the_load_and_not_before(
    is_aborted: bool, make_role: Any
) -> None:
    """A source may go on writing for a while after the request was aborted."""
    prefill, decode = make_role(FULL), make_role(FULL)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1])
    ours = request(PROMPT, params or {}, "d")
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
    next_step(decode)
    if is_aborted:
        decode.request_finished(ours, ([11, 12, 13, 14, 15],), is_complete=False)
        assert next_step(decode).aborted == ["d"]
    for _ in range(30):
        time.sleep(0.01)
        next_step(decode)
        next_step(prefill)
        assert sorted(kept(prefill)) == [1, 2, 3, 4, 5]
    decode.update_connector_output(KVConnectorOutput(finished_recving={"d"}, failed_recving=set()))
    wait_until(lambda: not kept(prefill), "the hold is not released", each=lambda: next_step(prefill))


def test_references_are_dropped_tail_first_and_the_null_block_has_none() -> None:
    pool, held, handle = BlockPool(), KeptBlocks(), Handle("r", 3)
    held.bind(pool)  # type: ignore[arg-type]
    held.keep(handle, ([0, 0, 3], [4, 5]))
    assert pool.held == [3, 4, 5]
    held.free(handle)
    assert pool.held == []


def test_a_port_that_leaves_none_for_the_rank_is_refused(make_role: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        make_role(FULL, port=65535, dp_rank=1)
    assert refused.value.reason is Reason.INVALID_SETTING


def test_the_workers_learn_of_a_hold_with_the_step_that_computes_its_end(make_role: Any) -> None:
    """Before, more blocks follow; behind it nothing changes what is held."""
    role, ours = make_role(FULL), request(PROMPT, {"do_remote_decode": True}, max_tokens=9)
    let_sleep(role)
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([1, 2, 3]), 0)
    first = role.build_connector_meta(scheduled({"r": 48, "of another kind": 1}, {"r": ([1, 2, 3],)}))
    assert (first.prompts, first.finished, first.computes) == ([], [], True)
    ours.num_computed_tokens = 48
    last = role.build_connector_meta(scheduled({"r": 32}, {"r": ([1, 2, 3, 4, 5, 6],)}))
    [(transfer_id, told)] = last.finished
    assert (last.prompts, told.num_final, told.blocks) == ([], END, {"0": BlockList(0, [1, 2, 3, 4, 5, 6])})
    ours.num_computed_tokens = 80
    assert role.build_connector_meta(scheduled({"r": 1}, {"r": ([1, 2, 3, 4, 5, 6],)})).finished == []
    assert not next_step(role).computes
    ours.num_computed_tokens = 81
    _, params = role.request_finished(ours, ([1, 2, 3, 4, 5, 6],), is_complete=True)
    assert (transfer_id_of(params), params["kvferry"]["is_late"]) == (transfer_id, False)
    assert not role.has_pending_work()
    orders = next_step(role, "r")
    assert (orders.finished, orders.held) == ([], []), "a request of the same id that is not held"


AFTER_THE_END: dict[str, dict[str, Any]] = {
    "the second model runner clears new blocks": {"clears_untold": True},
    "pipeline stages with draft tokens": {"num_stages": 2, "drafts": "of a drafter"},
}


@pytest.mark.parametrize("engine", AFTER_THE_END.values(), ids=AFTER_THE_END)
@pytest.mark.parametrize("flow", FLOWS)
def test_where_a_step_does_not_show_what_is_final_the_workers_learn_it_after_the_requests_end(
    flow: Flow, engine: dict[str, Any], make_role: Any
) -> None:
    """The engine then steps although it is idle; of a hold that has ended before nobody is told."""
    role = make_role(FULL, **engine)
    let_sleep(role)
    for name, is_released in {"r": False, "s": True}.items():
        ours = request(PROMPT, to_prefill(flow, transfer_id=f"of {name}"), name, max_tokens=9)
        role.on_new_request(ours)
        role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5, 6]), 0)
        for num_tokens in (64, 16, 8):
            step = role.build_connector_meta(scheduled({name: num_tokens}, {name: ([1, 2, 3, 4, 5, 6],)}))
            ours.num_computed_tokens += num_tokens
            assert (step.prompts, step.finished, step.held) == ([], [], [])
        _, params = role.request_finished(ours, ([1, 2, 3, 4, 5, 6],), is_complete=True)
        assert params is None if flow == "concurrent" else params["kvferry"]["is_late"]
        handle = handle_of_transfer(f"of {name}") if params is None else handle_of(params)
        assert role.has_pending_work()
        if is_released:
            role._state.holds.release(role._state.epoch, [handle])
        orders = next_step(role)
        told = [(transfer_of(handle), END, {"0": BlockList(0, [1, 2, 3, 4, 5])})]
        assert [(each, held.num_final, held.blocks) for each, held in orders.held] == ([] if is_released else told)
        assert orders.ended_transfers == ([transfer_of(handle)] if is_released else [])
        assert (orders.prompts, orders.finished) == ([], [])
        assert not role.has_pending_work()


@pytest.mark.parametrize("engine", AFTER_THE_END.values(), ids=AFTER_THE_END)
def test_a_load_of_what_is_told_after_the_end_waits_for_that(engine: dict[str, Any], make_role: Any) -> None:
    """The decode engine may announce its blocks before the prefill engine's next step."""
    seconds = [load_of(make_role(FULL, **given), make_role(FULL)).late_seconds for given in (engine, {})]
    assert seconds == [LATE_SECONDS, 0.0]


def test_a_preempted_request_is_voided_and_told_again_once_it_is_computed_again(make_role: Any) -> None:
    """Its blocks are other requests' from this step on."""
    role, ours = make_role(FULL), request(PROMPT, {"do_remote_decode": True}, max_tokens=9)
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
    [(transfer_id, _)] = role.build_connector_meta(scheduled({"r": 80}, {"r": ([1, 2, 3, 4, 5],)})).finished
    ours.num_computed_tokens = 0
    orders = role.build_connector_meta(scheduled({}, preempted={"r"}))
    assert (orders.preempted, orders.ended_transfers, orders.finished) == ([transfer_id], [], [])
    role.update_state_after_alloc(ours, allocated([6, 7, 8, 9, 10]), 0)
    assert role.build_connector_meta(scheduled({"r": 64}, {"r": ([6, 7, 8, 9],)})).finished == []
    ours.num_computed_tokens = 64
    [(again, told)] = role.build_connector_meta(scheduled({"r": 17}, {"r": ([6, 7, 8, 9, 10, 11],)})).finished
    assert (again, told.blocks) == (transfer_id, {"0": BlockList(0, [6, 7, 8, 9, 10, 11])})
    ours.num_computed_tokens = 81
    _, params = role.request_finished(ours, ([6, 7, 8, 9, 10, 11],), is_complete=True)
    assert not params["kvferry"]["is_late"]


@pytest.mark.parametrize("flow", FLOWS)
def test_a_session_whose_prompt_has_grown_is_told_again(flow: Flow, make_role: Any) -> None:
    """Its client has sent more tokens behind what the engine has generated, which belong to the prompt from then on."""
    role, ours = make_role(FULL), request(PROMPT, to_prefill(flow), max_tokens=9)
    ours.resumable = True
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
    first = role.build_connector_meta(scheduled({"r": 80}, {"r": ([1, 2, 3, 4, 5],)}))
    ours.num_computed_tokens = 80
    ours.append_output_token_ids([7])
    grown = [*PROMPT, 7, *range(300, 316)]
    # As vLLM's scheduler takes the session's next part.
    ours.prompt_token_ids, ours._all_token_ids[:], ours.num_prompt_tokens = list(grown), grown, len(grown)
    again = role.build_connector_meta(scheduled({"r": 17}, {"r": ([1, 2, 3, 4, 5, 6, 7],)}))
    ours.num_computed_tokens = 97
    _, params = role.request_finished(ours, ([1, 2, 3, 4, 5, 6, 7],), is_complete=True)
    [(before, told)], [(after, told_again)] = (each.finished or each.prompts for each in (first, again))
    assert before == after
    assert [(each.num_tokens, each.num_final) for each in (told, told_again)] == [(80, END), (97, END)]
    assert told_again.blocks == {"0": BlockList(0, [1, 2, 3, 4, 5, 6, 7])}
    assert told_again.digest == prompt_digest(ours, 97) != told.digest
    if params is not None:
        assert (params["kvferry"]["num_tokens"], params["kvferry"]["is_late"]) == (97, False)


def test_a_hold_and_a_transfer_of_equal_names_are_two(make_role: Any) -> None:
    """A client names a request, a router a transfer: neither knows of the other."""
    role = make_role(FULL)
    named = {"held": ("x", {}, [5, 4]), "sent": ("r", {"transfer_id": "x"}, [3, 2])}
    prompt, answers = PROMPT[:32], {}
    for kind, (name, params, blocks) in named.items():
        ours = request(list(prompt), {"do_remote_decode": True, **params}, name)
        role.on_new_request(ours)
        role.update_state_after_alloc(ours, allocated(blocks), 0)
        orders = role.build_connector_meta(scheduled({name: 32}, {name: (blocks,)}))
        [(transfer_id, told)] = orders.finished if kind == "held" else orders.prompts
        ours.num_computed_tokens = 32
        _, answers[kind] = role.request_finished(ours, (blocks,), is_complete=True)
        assert (transfer_id == "x", told.blocks) == (kind == "sent", {"0": BlockList(0, blocks)})
    assert (answers["sent"], sorted(kept(role))) == (None, [2, 3, 4, 5])
    handle, transfer = handle_of(answers["held"]), handle_of_transfer("x")
    role._answer(Release(role._state.epoch, (transfer,)))
    assert (next_step(role).ended_transfers, sorted(kept(role))) == (["x"], [4, 5])
    assert role._answer(Renew(role._state.epoch, (handle, transfer))).lost == (transfer,)
    role._answer(Release(role._state.epoch, (handle,)))
    assert (next_step(role).ended_transfers, kept(role)) == ([transfer_of(handle)], [])


@pytest.mark.parametrize("generation", ["0" * 16, "0", ""])
def test_parameters_of_generation_0_name_no_hold(generation: str, make_role: Any) -> None:
    """It is that of routers' transfers: a client could have such a transfer released with a changed answer."""
    prefill, decode = make_role(FULL), make_role(FULL)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1]) or {}
    ours = request(PROMPT, {**params, "kvferry": {**params["kvferry"], "generation": generation}}, "d")
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
    [order] = next_step(decode).loads
    assert (order.error.reason, order.hold) == (Reason.MALFORMED_MESSAGE, None)
    assert "generation" in order.error.message


def test_a_request_that_ends_while_its_prompt_is_computed_again_is_not_held(make_role: Any) -> None:
    """As vLLM ends it where an output of before the preemption is its last."""
    role, ours = make_role(FULL), request(PROMPT, {"do_remote_decode": True}, max_tokens=9)
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
    role.build_connector_meta(scheduled({"r": 64}, {"r": ([1, 2, 3, 4, 5],)}))
    ours.num_computed_tokens = 64
    assert role.request_finished(ours, ([1, 2, 3, 4, 5],), is_complete=True) == (False, None)
    assert kept(role) == []
    assert role._state.holds.num_holds == 0


def test_the_connector_tells_the_roles_which_requests_a_step_computes_and_when_it_is_launched() -> None:
    connector, calls = object.__new__(KVFerryConnector), []
    connector._scheduler = SimpleNamespace(
        build_connector_meta=lambda output: calls.append(output.num_scheduled_tokens)
    )  # type: ignore[assignment]
    connector._worker = SimpleNamespace(finish_step=lambda: calls.append("finished"))  # type: ignore[assignment]
    connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"a": 4}))  # type: ignore[arg-type]
    connector.wait_for_save()
    assert calls == [{"a": 4}, "finished"]


@pytest.mark.parametrize("given", ["text", ["do_remote_prefill"], 7])
def test_parameters_that_are_no_object_are_ignored(given: Any, make_role: Any) -> None:
    """An exception in vLLM's scheduler ends the engine."""
    role, ours = make_role(FULL), request(PROMPT, given, "d")
    role.on_new_request(ours)
    assert ours.kv_transfer_params is None
    assert role.get_num_new_matched_tokens(ours, 0) == (0, False)
    role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
    assert role.request_finished(ours, ([1, 2, 3, 4, 5],), is_complete=True) == (False, None)
