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
from kvferry.execution.device import HOST
from kvferry.execution.guard_words import GuardWords, StepWords
from kvferry.handoff.messages import RankEntry, Release, Renew
from kvferry.handoff.wire import hold_messages
from kvferry.handoff.wire.bootstrap import id_in_epoch
from kvferry.handoff.wire.client import ask
from kvferry.integrations.vllm.connector import KVFerryConnector
from kvferry.integrations.vllm.scheduler import role as scheduler_role
from kvferry.integrations.vllm.scheduler.blocks import GroupShape
from kvferry.integrations.vllm.scheduler.kept_blocks import KeptBlocks
from kvferry.integrations.vllm.step import MAX_HELD_REQUESTS
from kvferry.integrations.vllm.versions import can_name_loaded_groups
from kvferry.layout.group import CacheKind

from ..waits import wait_until
from .scheduler_requests import (
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
    assert [blocks.source_ids.tolist() for blocks in order.blocks] == [[5, 4, 3, 2, 1], [8, 7, 6]]
    assert [blocks.first_token for blocks in order.blocks] == [0, 32]


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize(
    ("block_size", "prefix_caching", "is_refused"),
    [(32, True, True), (32, False, False), (24, True, True), (12, True, True), (16, True, False), (8, True, False)],
)
def test_a_window_block_that_a_load_would_fill_in_part_is_not_cached_as_a_whole(
    mode: str, block_size: int, prefix_caching: bool, is_refused: bool, make_role: Any
) -> None:
    """Behind 79 tokens the window of 40 begins in blocks of 16 at token 32; a block of 24 holds 24 to 47.

    vLLM would find it again for a prompt that begins alike and ends at 70, which attends to 31.
    """
    prefill = make_role(WINDOW, mode=mode)
    decode = make_role(GroupShape(CacheKind.SLIDING_WINDOW, block_size, 40), prefix_caching=prefix_caching, mode=mode)
    if mode == "push":
        prefill.publish([RankEntry(0, 0, b"", {}, 0, 0)])
        engine_id, address = (
            id_in_epoch(prefill._state.engine_id, prefill._state.epoch),
            f"http://127.0.0.1:{prefill._source.bootstrap.port}",
        )
        params = {"transfer_id": "x", "do_remote_prefill": True}
        params |= {"remote_engine_id": engine_id, "remote_bootstrap_addr": address}
    else:
        params = run_prefill(prefill, PROMPT, [0, 0, 8, 7, 6]) or {}
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


def test_a_window_that_the_prefill_engine_has_lost_is_refused_with_a_reason(make_role: Any) -> None:
    prefill, decode = make_role(FULL, WINDOW), make_role(FULL, WINDOW)
    params = run_prefill(prefill, PROMPT, [5, 4, 3, 2, 1], [0, 0, 0, 7, 6])
    assert params is not None
    ours = request(PROMPT, params, "d")
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [0, 0, 16, 17, 18]), len(PROMPT) - 1)
    [order] = next_step(decode).loads
    assert order.error is not None
    assert "prefill engine has no block number 2 of 5" in str(order.error)


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
    monkeypatch.setattr(hold_messages, "RENEW_SHARE", 0.001)
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
def test_the_step_that_frees_the_blocks_of_a_hold_clears_its_guard_word(ending: str, make_role: Any) -> None:
    """Else a decode engine that reads late would find the word as it was, and other prompts in the blocks."""
    role = make_role(FULL, lease_seconds=0.3 if ending == "expired" else 60.0)
    guard_words = GuardWords(MAX_HELD_REQUESTS)
    words = StepWords(guard_words, HOST)
    ours = request(PROMPT, {"do_remote_decode": True})
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([5, 4, 3, 2, 1]), 0)
    orders = role.build_connector_meta(scheduled({"r": len(PROMPT)}, {"r": ([5, 4, 3, 2, 1],)}))
    words.begin(orders.ended_slots, orders.written)
    [(slot, word, _)] = orders.written
    assert guard_words.array[slot].tobytes() == word != bytes(16)
    if ending == "aborted":
        role.request_finished(ours, ([5, 4, 3, 2, 1],), is_complete=False)
    else:
        ours.num_computed_tokens = ours.num_prompt_tokens
        _, params = role.request_finished(ours, ([5, 4, 3, 2, 1],), is_complete=True)
        assert params["kvferry"]["slot"] == slot
        assert next_step(role).ended_slots == []
        assert sorted(kept(role)) == [1, 2, 3, 4, 5]
    if ending == "released":
        handle = handle_of(params)
        ask("127.0.0.1", params["remote_port"], Release(params["kvferry"]["epoch"], (handle,)), 10.0)
    if ending == "expired":
        time.sleep(0.4)
    assert ending == "aborted" or sorted(kept(role)) == [1, 2, 3, 4, 5], "freed before the workers get the order"
    orders = next_step(role)
    words.begin(orders.ended_slots, orders.written)
    assert guard_words.array[slot].tobytes() == bytes(16)
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


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_why_a_request_cannot_be_loaded_keeps_no_frame_alive(
    mode: str, make_role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is known until the request ends, which a client may delay."""
    caplog.set_level(logging.CRITICAL, "kvferry")  # pytest would keep what is logged
    decode, ours = make_role(FULL, mode=mode), request(PROMPT, {"do_remote_prefill": True}, "d")
    alive = weakref.ref(ours)
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), len(PROMPT))
    [order] = next_step(decode).loads
    assert order.error.reason is Reason.MALFORMED_MESSAGE
    assert order.error.remedy
    del ours, order
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_hold_is_released_once_all_ranks_have_reported_the_load_and_not_before(
    is_aborted: bool, make_role: Any
) -> None:
    """A rank may go on reading for a while after its request was aborted."""
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
    pool, held = BlockPool(), KeptBlocks()
    held.bind(pool)  # type: ignore[arg-type]
    held.keep("r", ([0, 0, 3], [4, 5]))
    assert pool.held == [3, 4, 5]
    held.free("r")
    assert pool.held == []


def test_a_port_that_leaves_none_for_the_rank_is_refused(make_role: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        make_role(FULL, port=65535, dp_rank=1)
    assert refused.value.reason is Reason.INVALID_SETTING


def test_the_step_that_computes_the_prompts_end_sets_the_guard_word(make_role: Any) -> None:
    """Before, more blocks follow; behind it nothing changes what is held."""
    role, ours = make_role(FULL, integrity="off"), request(PROMPT, {"do_remote_decode": True}, max_tokens=9)
    let_sleep(role)
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([1, 2, 3]), 0)
    first = role.build_connector_meta(scheduled({"r": 48, "of another kind": 1}, {"r": ([1, 2, 3],)}))
    assert (first.written, first.computes) == ([], True)
    ours.num_computed_tokens = 48
    last = role.build_connector_meta(scheduled({"r": 32}, {"r": ([1, 2, 3, 4, 5, 6],)}))
    [held] = last.written
    ours.num_computed_tokens = 80
    assert role.build_connector_meta(scheduled({"r": 1}, {"r": ([1, 2, 3, 4, 5, 6],)})).written == []
    assert not next_step(role).computes
    ours.num_computed_tokens = 81
    _, params = role.request_finished(ours, ([1, 2, 3, 4, 5, 6],), is_complete=True)
    assert (params["kvferry"]["slot"], params["kvferry"]["is_late"]) == (held.slot, False)
    assert not role.has_pending_work()
    assert next_step(role, "r").written == [], "a request of the same id that is not held"


@pytest.mark.parametrize("is_packed", [True, False])
def test_digests_of_a_prompt_whose_engine_generates_on_are_of_its_packed_pages_at_the_end(
    is_packed: bool, make_role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine generates changes the page of the prompt's last tokens, whose digest covers the whole page."""
    monkeypatch.setattr(scheduler_role, "on_cpu", lambda: is_packed)
    for max_tokens, is_late in ((1, False), (9, is_packed)):
        role, ours = make_role(FULL), request(PROMPT, {"do_remote_decode": True}, max_tokens=max_tokens)
        let_sleep(role)
        role.on_new_request(ours)
        role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
        orders = role.build_connector_meta(scheduled({"r": 80}, {"r": ([1, 2, 3, 4, 5],)}))
        ours.num_computed_tokens = 80 + max_tokens - 1
        _, params = role.request_finished(ours, ([1, 2, 3, 4, 5],), is_complete=True)
        late = [*next_step(role).late.values()]
        assert (len(orders.written), len(late), params["kvferry"]["is_late"]) == (not is_late, is_late, is_late)
        assert [each.prompt.num_tokens for each in (*orders.written, *late)] == [80]


def test_blocks_that_differ_at_the_end_set_the_word_again_with_the_next_step(make_role: Any) -> None:
    """The engine then steps although it is idle; a hold that has ended before sets no word."""
    role = make_role(FULL)
    let_sleep(role)
    for name, is_released in {"r": False, "s": True}.items():
        ours = request(PROMPT, {"do_remote_decode": True}, name)
        role.on_new_request(ours)
        role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
        [held] = role.build_connector_meta(scheduled({name: 80}, {name: ([1, 2, 3, 4, 5],)})).written
        ours.num_computed_tokens = 80
        _, params = role.request_finished(ours, ([1, 2, 3, 4, 6],), is_complete=True)
        assert params["kvferry"]["is_late"]
        assert role.has_pending_work()
        if is_released:
            handle = handle_of(params)
            role._state.holds.release(params["kvferry"]["epoch"], [handle])
        orders = next_step(role)
        assert [late.slot for late in orders.late.values()] == ([] if is_released else [held.slot])
        assert held.word not in [late.word for late in orders.late.values()]
        assert orders.ended_slots == ([held.slot] if is_released else [])
        assert not role.has_pending_work()


def test_a_preempted_request_has_no_guard_word_until_it_is_computed_again(make_role: Any) -> None:
    """Its blocks are other requests' from this step on."""
    role, ours = make_role(FULL, integrity="off"), request(PROMPT, {"do_remote_decode": True}, max_tokens=9)
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
    [first] = role.build_connector_meta(scheduled({"r": 80}, {"r": ([1, 2, 3, 4, 5],)})).written
    ours.num_computed_tokens = 0
    orders = role.build_connector_meta(scheduled({}, preempted={"r"}))
    assert (orders.ended_slots, orders.written) == ([first.slot], [])
    role.update_state_after_alloc(ours, allocated([6, 7, 8, 9, 10]), 0)
    assert role.build_connector_meta(scheduled({"r": 64}, {"r": ([6, 7, 8, 9],)})).written == []
    ours.num_computed_tokens = 64
    [second] = role.build_connector_meta(scheduled({"r": 17}, {"r": ([6, 7, 8, 9, 10, 11],)})).written
    assert (second.slot, second.word == first.word) == (first.slot, False)
    ours.num_computed_tokens = 81
    _, params = role.request_finished(ours, ([6, 7, 8, 9, 10, 11],), is_complete=True)
    assert not params["kvferry"]["is_late"]


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
    connector._scheduler_role = SimpleNamespace(
        build_connector_meta=lambda output: calls.append(output.num_scheduled_tokens)
    )  # type: ignore[assignment]
    connector._worker_role = SimpleNamespace(finish_step=lambda: calls.append("finished"))  # type: ignore[assignment]
    connector.build_connector_meta(SimpleNamespace(num_scheduled_tokens={"a": 4}))  # type: ignore[arg-type]
    connector.wait_for_save()
    assert calls == [{"a": 4}, "finished"]


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("given", ["text", ["do_remote_prefill"], 7])
def test_parameters_that_are_no_object_are_ignored(mode: str, given: Any, make_role: Any) -> None:
    """An exception in vLLM's scheduler ends the engine."""
    role, ours = make_role(FULL, mode=mode), request(PROMPT, given, "d")
    role.on_new_request(ours)
    assert ours.kv_transfer_params is None
    assert role.get_num_new_matched_tokens(ours, 0) == (0, False)
    role.update_state_after_alloc(ours, allocated([1, 2, 3, 4, 5]), 0)
    assert role.request_finished(ours, ([1, 2, 3, 4, 5],), is_complete=True) == (False, None)
