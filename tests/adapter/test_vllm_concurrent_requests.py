"""Routers' transfers at the scheduler's role, without an engine: orders to workers, holds and loads."""

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.handoff.holds import handle_of_transfer
from kvferry.handoff.messages import Release, Renew
from kvferry.handoff.source import END, BlockList
from kvferry.handoff.wire.bootstrap import id_in_epoch
from kvferry.handoff.wire.client import ask
from kvferry.integrations.vllm.refused_flags import is_data_parallel
from kvferry.integrations.vllm.request_checks import check_params
from kvferry.integrations.vllm.scheduler import source as source_module
from kvferry.integrations.vllm.scheduler.params import prompt_digest
from kvferry.integrations.vllm.scheduler.source import tells_after_the_end

from ..waits import wait_until
from .engine_flags import flag_errors
from .flows import FLOWS, Flow, to_decode, to_prefill
from .scheduler_requests import (
    A_RANK,
    FULL,
    PROMPT,
    STATE,
    WINDOW,
    allocated,
    kept,
    next_step,
    request,
    run_prefill,
    scheduled,
)

TO_PREFILL = to_prefill("concurrent")
OURS_ALONE = SimpleNamespace(kv_connector="KVFerryConnector", kv_connector_extra_config={})
SECONDS = 10.0


def begin(role: Any, prompt: list[int] = PROMPT, request_id: str = "r", **params: Any) -> Request:
    ours = request(list(prompt), {**TO_PREFILL, **params}, request_id)
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated([5, 4, 3, 2, 1]), 0)
    return ours


def step(role: Any, ours: Request, num_tokens: int, *groups: list[int]) -> Any:
    orders = role.build_connector_meta(scheduled({ours.request_id: num_tokens}, {ours.request_id: groups}))
    ours.num_computed_tokens += num_tokens
    return orders


def met_by(role: Any, prefill: Any, **changed: Any) -> tuple[Request, Any]:
    """Let a decode engine meet a request as a router sends it, once it knows where it comes from."""
    ours = request(list(PROMPT), to_decode("concurrent", prefill, None) | changed, "d")
    role.on_new_request(ours)
    return ours, awaited(role, ours)


def awaited(role: Any, ours: Request) -> Any:
    """Ask a decode engine how many tokens are there until it knows."""
    end = time.monotonic() + SECONDS
    while (found := role.get_num_new_matched_tokens(ours, 0))[0] is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def test_workers_learn_the_address_at_which_their_engine_ends_a_hold(make_role: Any) -> None:
    """A rank whose write failed asks it to, as the receiver would."""
    role = make_role(FULL)
    ours = begin(role)
    engine = step(role, ours, 80, [5, 4, 3, 2, 1]).engine.where
    role.request_finished(ours, ([5, 4, 3, 2, 1],), is_complete=True)
    ask(engine.host, engine.port, Release(engine.epoch, (handle_of_transfer("x"),)), SECONDS)
    assert next_step(role).ended_transfers == ["x"]


def test_each_chunk_tells_the_workers_how_far_the_prompt_is_final(make_role: Any) -> None:
    role = make_role(FULL)
    ours = begin(role)
    orders = [step(role, ours, 32, [5, 4]), step(role, ours, 48, [5, 4, 3, 2, 1])]
    [[(first_id, first)], [(last_id, last)]] = [each.prompts for each in orders]
    assert (first_id, first.num_tokens, first.num_final, first.blocks) == ("x", 80, 32, {"0": BlockList(0, [5, 4])})
    assert (last_id, last.num_final, last.blocks["0"].block_ids) == ("x", END, [5, 4, 3, 2, 1])
    assert first.digest == last.digest


def test_a_finished_prompt_is_held_until_it_is_released_and_the_workers_know_first(make_role: Any) -> None:
    role = make_role(FULL)
    ours = begin(role)
    step(role, ours, 80, [5, 4, 3, 2, 1])
    assert role.request_finished(ours, ([5, 4, 3, 2, 1],), is_complete=True) == (False, None)
    assert sorted(kept(role)) == [1, 2, 3, 4, 5]
    assert role._answer(Renew(role._state.epoch, (handle_of_transfer("x"), handle_of_transfer("to come")))).lost == ()
    role._answer(Release(role._state.epoch, (handle_of_transfer("x"),)))
    assert role.has_pending_work()
    assert next_step(role).ended_transfers == ["x"]
    assert kept(role) == []
    assert role._answer(Renew(role._state.epoch, (handle_of_transfer("x"),))).lost == (handle_of_transfer("x"),)


def test_a_prompt_that_is_begun_after_a_reset_ends_with_a_release_for_the_epoch_before_it(make_role: Any) -> None:
    """The decode engine asked this engine before the reset; its load has failed, and it releases what it asked for."""
    role = make_role(FULL)
    former = role._state.epoch
    role.reset_cache()
    ours = begin(role)
    step(role, ours, 80, [5, 4, 3, 2, 1])
    role.request_finished(ours, ([5, 4, 3, 2, 1],), is_complete=True)
    role._answer(Release(former, (handle_of_transfer("x"),)))
    assert next_step(role).ended_transfers == ["x"]
    assert kept(role) == []


def test_two_prompts_of_one_request_id_are_held_one_by_one(make_role: Any) -> None:
    """A client may name a request as it named a former one, whose blocks are still held."""
    role = make_role(FULL)
    blocks = {"x": [5, 4, 3, 2, 1], "y": [10, 9, 8, 7, 6]}
    for transfer_id, held in blocks.items():
        ours = begin(role, transfer_id=transfer_id)
        step(role, ours, 80, held)
        role.request_finished(ours, (held,), is_complete=True)
    assert sorted(kept(role)) == [*range(1, 11)]
    for transfer_id, left in (("y", [1, 2, 3, 4, 5]), ("x", [])):
        role._answer(Release(role._state.epoch, (handle_of_transfer(transfer_id),)))
        next_step(role)
        assert sorted(kept(role)) == left


def test_a_prompt_is_read_once_however_many_chunks_it_takes(make_role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Mock(side_effect=source_module.prompt_digest)
    monkeypatch.setattr(source_module, "prompt_digest", reads)
    role = make_role(FULL)
    ours = begin(role)
    for _ in range(5):
        step(role, ours, 16, [5, 4, 3, 2, 1])
    assert reads.call_count == 1


def test_an_aborted_prompt_ends_in_the_next_step(make_role: Any) -> None:
    role = make_role(FULL)
    ours = begin(role)
    step(role, ours, 32, [5, 4])
    role.request_finished(ours, ([5, 4],), is_complete=False)
    orders = next_step(role)
    assert (orders.ended_transfers, kept(role)) == (["x"], [])


def test_a_prompt_that_ends_before_its_first_step_ends_its_transfer(make_role: Any) -> None:
    """As one that is aborted in the queue, or rejected by the prefill engine: nobody will write it any more."""
    role = make_role(FULL)
    ours = request(list(PROMPT), TO_PREFILL)
    role.on_new_request(ours)
    role.request_finished(ours, ([],), is_complete=False)
    assert role.has_pending_work()
    assert next_step(role).ended_transfers == ["x"]
    assert role._answer(Renew(role._state.epoch, (handle_of_transfer("x"),))).lost == (handle_of_transfer("x"),)


def test_a_sample_that_ends_before_its_first_step_ends_no_transfer_of_another(make_role: Any) -> None:
    role = make_role(FULL)
    ours = begin(role, request_id="0_r")
    other = request(list(PROMPT), TO_PREFILL, "1_r")
    role.on_new_request(other)
    role.request_finished(other, ([],), is_complete=False)
    orders = step(role, ours, 80, [5, 4, 3, 2, 1])
    assert (len(orders.prompts), orders.ended_transfers) == (1, [])


def test_trap_14_a_preempted_prompt_is_named_before_its_blocks_are_reused(make_role: Any) -> None:
    role = make_role(FULL)
    ours = begin(role)
    step(role, ours, 32, [5, 4])
    assert role.build_connector_meta(scheduled({}, preempted={"r", "another"})).preempted == ["x"]


def test_a_transfer_released_before_its_prompt_came_is_not_held(make_role: Any) -> None:
    """As where the decode engine rejects a request before admission, or has the whole prompt."""
    role = make_role(FULL)
    role._answer(Release(role._state.epoch, (handle_of_transfer("x"),)))
    assert role.has_pending_work()
    assert next_step(role).ended_transfers == ["x"], "ranks may know of blocks for it already"
    role._answer(Release(role._state.epoch, (handle_of_transfer("x"),)))
    assert next_step(role).ended_transfers == []
    ours = begin(role)
    orders = step(role, ours, 80, [5, 4, 3, 2, 1])
    role.request_finished(ours, ([5, 4, 3, 2, 1],), is_complete=True)
    assert (orders.prompts, kept(role)) == ([], [])


def test_one_of_several_samples_serves_a_transfer(make_role: Any) -> None:
    role = make_role(FULL)
    samples = [begin(role, request_id=f"{number}_r") for number in range(2)]
    blocks = {sample.request_id: ([5, 4, 3, 2, 1],) for sample in samples}
    assert len(role.build_connector_meta(scheduled(dict.fromkeys(blocks, 80), blocks)).prompts) == 1


def test_trap_14_blocks_that_left_the_window_are_not_named(make_role: Any) -> None:
    role = make_role(FULL, WINDOW)
    ours = begin(role)
    [(_, prompt)] = step(role, ours, 79, [5, 4, 3, 2, 1], [0, 0, 8, 7, 6]).prompts
    assert prompt.blocks["1"] == BlockList(32, [8, 7, 6])


def test_the_last_token_of_a_model_with_windows_is_left_to_the_decode_engine(make_role: Any) -> None:
    """In one prompt of a block's length it would move the first block that this token attends to out of the window."""
    prefill, decode = make_role(FULL, WINDOW), make_role(FULL, WINDOW)
    prefill.publish([A_RANK])
    prefilled = begin(prefill)
    [(_, sent)] = step(prefill, prefilled, 79, [5, 4, 3, 2, 1], [0, 0, 8, 7, 6]).prompts
    ours, _ = met_by(decode, prefill)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [0, 0, 16, 17, 18]), 79)
    [order] = next_step(decode).loads
    assert (sent.num_tokens, sent.num_final, sent.digest) == (79, END, order.announced.digest)
    assert order.announced.num_tokens == 79


def test_a_state_that_goes_past_the_prompt_is_no_longer_held(make_role: Any) -> None:
    role = make_role(FULL, STATE)
    ours = begin(role)
    assert ours.num_prompt_tokens == 79
    [(_, prompt)] = step(role, ours, 79, [5, 4, 3, 2, 1], [9]).prompts
    assert (prompt.num_final, prompt.blocks["1"]) == (END, BlockList(0, [9]))
    orders = step(role, ours, 1, [5, 4, 3, 2, 1], [9])
    assert (orders.prompts, orders.ended_transfers) == ([], ["x"])


def test_the_decode_engine_loads_only_the_blocks_that_it_lacks(make_role: Any) -> None:
    prefill, decode = make_role(FULL, WINDOW), make_role(FULL, WINDOW)
    prefill.publish([A_RANK])
    ours, found = met_by(decode, prefill)
    assert found == (79, True)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15], [0, 0, 16, 17, 18]), 79 - 16)
    [order] = next_step(decode).loads
    assert order.error is None
    assert (order.announced.transfer_id, order.announced.num_tokens) == ("x", 79)
    assert (order.hold.port, order.hold.epoch) == (prefill._server.port, prefill._state.epoch)
    lists = [(blocks.first_token, blocks.last_token, blocks.destination_ids.tolist()) for blocks in order.blocks]
    assert lists == [(16, 79, [12, 13, 14, 15]), (32, 79, [16, 17, 18])]


def test_trap_13_a_router_that_repeats_the_former_engines_name_loads_from_the_restarted_engine(make_role: Any) -> None:
    """It asks once, at its start. The decode engine asks the address itself, and takes the epoch that answers."""
    prefill, decode = make_role(FULL), make_role(FULL)
    prefill.publish([A_RANK])
    ours, found = met_by(decode, prefill, remote_engine_id=id_in_epoch(prefill._state.engine_id, 1))
    assert found == (80, True)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), 80)
    [order] = next_step(decode).loads
    assert order.error is None
    assert (order.hold.epoch, order.announced.transfer_id) == (prefill._state.epoch, "x")
    assert order.announced.digest == prompt_digest(ours, 80)


def test_after_a_failed_load_the_prefill_engines_id_is_queried_again(make_role: Any) -> None:
    """Otherwise an engine that was restarted would stay undetected for seconds."""
    prefill, decode = make_role(FULL), make_role(FULL)
    prefill.publish([A_RANK])
    ours, _ = met_by(decode, prefill)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), 80)
    next_step(decode)
    assert len(decode._destination._queries._answers) == 1
    decode.update_connector_output(KVConnectorOutput(finished_recving={"d"}, failed_recving={"d"}))
    assert len(decode._destination._queries._answers) == 0


def embedded(params: dict[str, Any], *, mixed: bool = False) -> Request:
    """A request whose prompt is given as embeddings of three tokens, between tokens perhaps."""
    ids = [0, 1, 2] if mixed else None
    return Request(
        "e",
        ids,
        request(PROMPT, params).sampling_params,
        None,
        prompt_embeds=torch.ones(3, 8),
        prompt_is_token_ids=[True, False, True] if mixed else None,
    )


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("flow", FLOWS)
def test_a_prompt_of_embeddings_is_not_taken_for_another_one(flow: Flow, mixed: bool, make_role: Any) -> None:
    """Both engines compare digests of tokens, and two such prompts of a length would have the same."""
    prefill, decode = make_role(FULL), make_role(FULL)
    ours = embedded(to_prefill(flow), mixed=mixed)
    prefill.on_new_request(ours)
    prefill.update_state_after_alloc(ours, allocated([5]), 0)
    assert prefill.request_finished(ours, ([5],), is_complete=True) == (False, None)
    assert kept(prefill) == []
    with pytest.raises(KVFerryError) as refused:
        prompt_digest(ours, 3)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert refused.value.remedy
    prefill.publish([A_RANK])
    params = to_decode(flow, prefill, run_prefill(make_role(FULL), list(range(3)), [5]))
    theirs = embedded(params, mixed=mixed)
    decode.on_new_request(theirs)
    assert awaited(decode, theirs) == (3, True)
    decode.update_state_after_alloc(theirs, allocated([5]), 3)
    [order] = next_step(decode).loads
    assert order.error.reason is Reason.UNSUPPORTED


@pytest.mark.parametrize("flow", FLOWS)
def test_a_prompt_with_embeddings_is_not_cut(flow: Flow, make_role: Any) -> None:
    """It is not handed over, and its embeddings say where its tokens are."""
    ours = embedded(to_prefill(flow), mixed=True)
    make_role(FULL, WINDOW).on_new_request(ours)
    assert (ours.num_prompt_tokens, ours.prompt_token_ids) == (3, [0, 1, 2])


def test_a_request_that_waits_for_its_turn_is_renewed_as_soon_as_its_source_is_known(make_role: Any) -> None:
    """While all of an engine's places are taken it is not asked how many tokens are there."""
    prefill, decode = make_role(FULL), make_role(FULL)
    prefill.publish([A_RANK])
    decode.on_new_request(request(list(PROMPT), to_decode("concurrent", prefill, None), "d"))

    wait_until(lambda: decode._state.leases._holds.lease_of("d") is not None, each=lambda: next_step(decode))


def test_a_rejected_request_releases_its_transfer(make_role: Any) -> None:
    prefill, decode = make_role(FULL), make_role(FULL)
    prefill.publish([A_RANK])
    prefilled = begin(prefill)
    step(prefill, prefilled, 80, [5, 4, 3, 2, 1])
    prefill.request_finished(prefilled, ([5, 4, 3, 2, 1],), is_complete=True)
    ours = request([0], to_decode("concurrent", prefill, None), "d")
    decode.on_new_request(ours)
    decode.request_finished(ours, ([],), is_complete=False)
    wait_until(lambda: not kept(prefill), each=lambda: (next_step(decode), next_step(prefill)))
    assert not decode.has_pending_work()


def test_parameters_that_name_neither_a_hold_nor_a_transfer_are_an_error(make_role: Any) -> None:
    decode = make_role(FULL)
    ours = request(PROMPT, {"do_remote_prefill": True, "remote_host": "h"}, "d")
    decode.on_new_request(ours)
    assert decode.get_num_new_matched_tokens(ours, 0) == (80, True)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), 80)
    [order] = next_step(decode).loads
    assert order.error.reason is Reason.MALFORMED_MESSAGE


@pytest.mark.parametrize("transfer_id", ["hold:", f"hold:{1:016x}", "x" * 513, "", 7])
def test_a_transfer_with_the_name_of_a_hold_or_with_none_is_refused_on_both_sides(
    transfer_id: Any, make_role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A client could name another's hold, whose blocks a decode engine would then announce and release."""
    prefill, decode = make_role(FULL), make_role(FULL)
    prefill.publish([A_RANK])
    prefilled = begin(prefill, transfer_id=transfer_id)
    orders = step(prefill, prefilled, 80, [5, 4, 3, 2, 1])
    assert (orders.prompts, orders.finished, orders.ended_transfers) == ([], [], [])
    assert prefill.request_finished(prefilled, ([5, 4, 3, 2, 1],), is_complete=True) == (False, None)
    assert (prefill._state.holds.num_holds, next_step(prefill).ended_transfers) == (0, [])
    assert "r is not held: its transfer_id" in caplog.text
    ours, _ = met_by(decode, prefill, transfer_id=transfer_id)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), 80)
    [order] = next_step(decode).loads
    assert (order.error.reason, order.hold) == (Reason.MALFORMED_MESSAGE, None)
    with pytest.raises(HandoffError) as refused:  # an API server answers HTTP 400 with it
        check_params(OURS_ALONE, ours.kv_transfer_params | {"do_remote_prefill": True}, "d")
    assert refused.value.reason is Reason.MALFORMED_MESSAGE
    assert "transfer_id" in refused.value.message


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"pipeline_parallel_size": 2, "speculative_config": "of a drafter"}, "draft tokens"),
        ({"pipeline_parallel_size": 2}, ""),
        ({"speculative_config": "of a drafter"}, ""),
        ({"use_ubatching": True}, ""),
        ({"use_v2_model_runner": True, "needs_kv_cache_zeroing": True}, "clears new blocks"),
        ({"needs_kv_cache_zeroing": True}, ""),
    ],
)
def test_engines_whose_workers_learn_after_the_end_what_is_final(changed: dict[str, Any], why: str) -> None:
    plain = {"use_v2_model_runner": False, "use_ubatching": False, "pipeline_parallel_size": 1}
    plain |= {"needs_kv_cache_zeroing": False}
    flat: Any = SimpleNamespace(**(plain | {"speculative_config": None} | changed))
    config: Any = SimpleNamespace(**vars(flat), parallel_config=flat)
    told = tells_after_the_end(config, flat)
    assert why in told
    assert bool(told) is bool(why)


@pytest.mark.parametrize(
    ("changed", "is_one_of_several"),
    [
        ({"data_parallel_size": 2}, True),
        ({"engine_id": "a_dp0"}, True),
        ({"engine_id": "a_dp1", "data_parallel_index": 1}, True),
        ({"engine_id": "a_dp1"}, False),
        ({}, False),
    ],
)
def test_the_id_of_a_data_parallel_rank_shows_it(changed: dict[str, Any], is_one_of_several: bool) -> None:
    flat = SimpleNamespace(**({"data_parallel_size": 1, "data_parallel_index": 0, "engine_id": "a"} | changed))
    config: Any = SimpleNamespace(parallel_config=flat, kv_transfer_config=flat)
    assert is_data_parallel(config, flat.engine_id) is is_one_of_several


@pytest.mark.parametrize(
    "given",
    [{"bootstrap_port": 8998}, {"router_address": "127.0.0.1:9", "http_address": "127.0.0.1:8"}],
    ids=str,
)
def test_a_data_parallel_engine_of_a_router_that_names_no_rank_does_not_start(
    given: dict[str, Any],
) -> None:
    for of_several in ({"data_parallel_size": 2}, {"engine_id": "a_dp0"}):
        [refused] = flag_errors(settings=given, **of_several)
        assert refused.reason is Reason.UNSUPPORTED
        assert next(iter(given)) in refused.message
        assert "Run an engine for each rank" in refused.remedy
    assert flag_errors(settings=given) == []


def test_a_data_parallel_engine_holds_no_transfer_and_answers_no_bootstrap_query(
    make_role: Any, caplog: pytest.LogCaptureFixture
) -> None:
    role = make_role(FULL, num_dp_ranks=2)
    role.publish([A_RANK])
    assert role._source.bootstrap is None
    ours = begin(role)
    assert step(role, ours, 80, [5, 4, 3, 2, 1]).prompts == []
    assert "a router's transfer names no data-parallel rank" in caplog.text
    assert run_prefill(role, PROMPT, [5, 4, 3, 2, 1], request_id="s"), "its own answers name the rank"


def test_peers_are_told_the_advertised_host(make_role: Any) -> None:
    prefill = make_role(FULL, host="0.0.0.0", advertised_host="localhost")
    decode = make_role(FULL)
    prefill.publish([A_RANK])
    ours, _ = met_by(decode, prefill)
    decode.update_state_after_alloc(ours, allocated([11, 12, 13, 14, 15]), 80)
    [order] = next_step(decode).loads
    assert (order.hold.host, order.hold.port) == ("localhost", prefill._server.port)
