"""Quarantined blocks, into which a peer may still write: the reports of ranks and the scheduler's actions."""

import time
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import MAX_IDENTIFIER_LENGTH, StillWriting, decode_question, encode
from kvferry.integrations.vllm.scheduler import role as scheduler_role

from .scheduler_requests import FULL, PROMPT, allocated, kept, next_step, request, run_prefill

BLOCKS = [11, 12, 13, 14, 15]


@pytest.fixture
def decode(make_role: Any) -> Any:
    """A decode engine that loads one request."""
    role, ours = (
        make_role(FULL, num_ranks=2),
        request(PROMPT, run_prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1]) or {}, "d"),
    )
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated(BLOCKS), 80)
    assert len(next_step(role).loads) == 1
    return role


def report(role: Any, rank: int, number: int, *request_ids: str) -> list[tuple[int, str]]:
    """Let a rank report, and return the workers' orders of the next step."""
    role._answer(StillWriting(role._state.epoch, role._secret, rank, number, request_ids))
    assert role.has_pending_work()
    orders = next_step(role).quarantined
    assert not role.has_pending_work()
    return list(orders)


@pytest.mark.parametrize(("num_hosts", "host"), [(1, "127.0.0.1"), (2, "203.0.113.1")])
def test_hole_20_ranks_of_this_host_report_where_the_engine_listens(num_hosts: int, host: str, make_role: Any) -> None:
    """A host may not reach itself at the address that other hosts are told, such as that of a NAT."""
    role = make_role(FULL, advertised_host="203.0.113.1", num_hosts=num_hosts)
    assert role._state.answers_at.host == "203.0.113.1"
    first = next_step(role).engine.where
    assert (first.host, first.port, first.epoch) == (host, role._server.port, role._state.epoch)
    role._state.answers_at = msgspec.structs.replace(role._state.answers_at, epoch=7)
    assert next_step(role).engine.where.epoch == 7


@pytest.mark.parametrize("executor", ["ray", type("Executor", (), {}), "package.Executor"], ids=str)
def test_ranks_that_may_be_on_other_hosts_report_where_these_reach_the_engine(executor: Any, make_role: Any) -> None:
    role = make_role(FULL, advertised_host="203.0.113.1", executor=executor)
    assert next_step(role).engine.where.host == "203.0.113.1"


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::", "[::]"])
def test_ranks_report_over_loopback_to_an_engine_that_listens_on_every_interface(host: str, make_role: Any) -> None:
    """Where the host has no IPv6, nobody connects to "::", although its listener takes connections over IPv4."""
    role = make_role(FULL, host=host, advertised_host="203.0.113.1", keys="none")
    assert next_step(role).engine.where.host == "127.0.0.1"


def test_blocks_are_kept_until_no_rank_reports_them(decode: Any) -> None:
    """Each rank learns that they are kept because of its own report: another's may end before its own is heard."""
    assert report(decode, 0, 1, "d") == [(0, "d")]
    assert sorted(kept(decode)) == BLOCKS
    assert report(decode, 1, 1, "d") == [(1, "d")]
    decode.update_connector_output(Reported({"d"}))
    assert report(decode, 0, 2) == []
    assert sorted(kept(decode)) == BLOCKS
    assert report(decode, 1, 2) == []
    assert sorted(kept(decode)) == []


def test_a_late_report_of_a_rank_counts_after_all_others_are_quiet(decode: Any) -> None:
    assert report(decode, 0, 1, "d") == [(0, "d")]
    assert report(decode, 0, 2) == []
    assert sorted(kept(decode)) == []
    assert report(decode, 1, 1, "d") == [(1, "d")]
    assert sorted(kept(decode)) == BLOCKS


def test_late_reports_and_requests_that_are_not_loaded_change_nothing(decode: Any) -> None:
    assert report(decode, 0, 2) == []
    assert report(decode, 1, 1, "of a push of its own") == []
    assert sorted(kept(decode)) == []
    decode._answer(StillWriting(decode._state.epoch, decode._secret, 0, 1, ("d",)))
    assert not decode.has_pending_work()
    assert next_step(decode).quarantined == []


def test_a_report_without_the_engines_secret_is_refused_and_frees_nothing(decode: Any) -> None:
    """The epoch is in every answer: whoever knows it could free blocks, and silence a rank by a large number."""
    assert report(decode, 0, 1, "d") == [(0, "d")]
    for secret in (b"", bytes(len(decode._secret))):
        with pytest.raises(HandoffError) as refused:
            decode._answer(StillWriting(decode._state.epoch, secret, 0, 1 << 60, ()))
        assert refused.value.reason is Reason.PERMISSION_DENIED
    assert next_step(decode).quarantined == []
    assert sorted(kept(decode)) == BLOCKS
    assert report(decode, 0, 2) == []
    assert sorted(kept(decode)) == []


def test_no_more_loads_are_admitted_than_a_report_has(
    decode: Any, make_role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a report would leave out requests, and the blocks of a request left out would be freed."""
    params = run_prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1])
    waiting = request(PROMPT, params or {}, "e")
    decode.on_new_request(waiting)
    assert decode.get_num_new_matched_tokens(waiting, 0) == (80, True)
    monkeypatch.setattr(scheduler_role, "MAX_LOADS", 1)
    assert decode.get_num_new_matched_tokens(waiting, 0) == (None, False)
    assert report(decode, 0, 1, "d") == [(0, "d")]
    decode.update_connector_output(Reported({"d"}))
    assert decode.get_num_new_matched_tokens(waiting, 0) == (80, True), "no load will end and make room"
    decode.update_state_after_alloc(waiting, allocated([21, 22, 23, 24, 25]), 80)
    [order] = next_step(decode).loads
    assert order.error is not None
    assert order.error.reason is Reason.QUARANTINE_FULL
    decode.update_connector_output(Reported({"e"}))
    assert report(decode, 0, 2) == []
    again = request(PROMPT, run_prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1]) or {}, "f")
    decode.on_new_request(again)
    decode.update_state_after_alloc(again, allocated([21, 22, 23, 24, 25]), 80)
    [order] = next_step(decode).loads
    assert order.error is None


@pytest.mark.parametrize("length", [MAX_IDENTIFIER_LENGTH, MAX_IDENTIFIER_LENGTH + 1])
def test_every_request_that_is_loaded_can_be_named_in_a_report(decode: Any, make_role: Any, length: int) -> None:
    """A client chooses the id: a report with an id that is too long would be refused with all others in it."""
    params, request_id = run_prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1]), "x" * length
    ours = request(PROMPT, params or {}, request_id)
    decode.on_new_request(ours)
    decode.update_state_after_alloc(ours, allocated([21, 22, 23, 24, 25]), 80)
    [order] = next_step(decode).loads
    if order.error is None:
        decode_question(encode(StillWriting(decode._state.epoch, decode._secret, 0, 1, ("d", request_id))))
    else:
        assert order.error.reason is Reason.INVALID_REQUEST
    assert (order.error is None) == (length <= MAX_IDENTIFIER_LENGTH)


def test_quarantined_blocks_and_blocks_of_a_hold_are_kept_apart_for_every_name_of_the_hold(decode: Any) -> None:
    """A push's hold is called by the transfer id, which a client can write."""
    assert report(decode, 0, 1, "d") == [(0, "d")]
    held = request(PROMPT, {"do_remote_decode": True}, "quarantine/d")
    decode.update_state_after_alloc(held, allocated([1, 2, 3, 4, 5]), 0)
    held.num_computed_tokens = held.num_prompt_tokens
    decode.request_finished(held, ([1, 2, 3, 4, 5],), is_complete=True)
    assert sorted(kept(decode)) == [1, 2, 3, 4, 5, *BLOCKS]
    decode._answer(StillWriting(decode._state.epoch, decode._secret, 0, 2, ()))
    next_step(decode)
    assert sorted(kept(decode)) == [1, 2, 3, 4, 5]


def test_a_report_of_an_unknown_rank_is_refused(decode: Any) -> None:
    """Whoever reaches the end point could have it remember any number of them."""
    with pytest.raises(HandoffError) as refused:
        decode._answer(StillWriting(decode._state.epoch, decode._secret, 2, 1, ("d",)))
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_sglang_24527_the_blocks_of_an_aborted_request_are_quarantined_too(decode: Any) -> None:
    """VLLM asks nobody when it gives them back."""
    ours = request(PROMPT, {"do_remote_prefill": False}, "d")
    decode.request_finished(ours, ([],), is_complete=False)
    assert next_step(decode).aborted == ["d"]
    assert report(decode, 0, 1, "d") == [(0, "d")]
    assert sorted(kept(decode)) == BLOCKS


class Reported:
    """What the engine tells when all ranks have reported a load."""

    def __init__(self, request_ids: set[str]) -> None:
        self.finished_recving = self.failed_recving = request_ids
        self.kv_connector_worker_meta = None


def test_blocks_in_quarantine_are_counted_now_and_ever(decode: Any) -> None:
    assert decode.take_statistics() is None
    report(decode, 0, 1, "d")
    taken = decode.take_statistics().data
    assert (taken["in_quarantine"], taken["quarantined_blocks"]) == ({"": len(BLOCKS)}, len(BLOCKS))
    assert decode.take_statistics() is None
    report(decode, 0, 2)
    taken = decode.take_statistics().data
    assert (taken["in_quarantine"], taken["quarantined_blocks"]) == ({"": 0}, 0)


@pytest.mark.parametrize(("policy", "counted"), [("recompute", {"load-failed": len(PROMPT)}), ("fail", {})])
def test_tokens_of_a_failed_load_are_counted_where_they_are_computed(policy: str, counted: Any, make_role: Any) -> None:
    role = make_role(FULL, failure_policy=policy)
    ours = request(PROMPT, run_prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1]) or {}, "d")
    role.on_new_request(ours)
    num_tokens, _ = role.get_num_new_matched_tokens(ours, 0)
    role.update_state_after_alloc(ours, allocated(BLOCKS), num_tokens)
    next_step(role)
    role.update_connector_output(Reported({"d"}))
    taken = role.take_statistics()
    assert ({} if taken is None else taken.data["computed_tokens"]) == counted


def test_holds_and_prompts_that_nobody_came_for_are_counted(make_role: Any) -> None:
    role = make_role(FULL)
    run_prefill(role, PROMPT, BLOCKS)
    assert role.take_statistics().data["holds"] == {"": 1}
    with role._state.holds_lock:
        role._state.holds.expire(time.monotonic() + role._state.settings.lease_seconds + 1)
    next_step(role)
    taken = role.take_statistics().data
    assert (taken["holds"], taken["expired_holds"], taken["unheld"]) == ({"": 0}, {"expired": 1}, 0)
    role.update_state_after_alloc(request(PROMPT, {"do_remote_decode": True}, "r" * 5000), allocated(BLOCKS), 0)
    assert role.take_statistics().data["unheld"] == 1
