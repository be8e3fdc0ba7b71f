"""Blocks that are kept because somebody may still write there: what ranks report, and what the scheduler does."""

import time
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import MAX_IDENTIFIER_LENGTH, StillWriting, decode_question, encode
from kvferry.integrations.vllm.scheduler import role as scheduler_role

from .scheduler_requests import FULL, PROMPT, allocated, kept, next_step, prefill, request

BLOCKS = [11, 12, 13, 14, 15]


@pytest.fixture
def reader(make_role: Any) -> Any:
    """A decode engine that loads one request."""
    role, ours = (
        make_role(FULL, num_ranks=2),
        request(PROMPT, prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1]) or {}, "d"),
    )
    role.on_new_request(ours)
    role.update_state_after_alloc(ours, allocated(BLOCKS), 80)
    assert len(next_step(role).loads) == 1
    return role


def report(role: Any, rank: int, number: int, *request_ids: str) -> list[tuple[int, str]]:
    """Let a rank report, and return what the workers are told in the next step."""
    role._answer(StillWriting(role._state.epoch, role._secret, rank, number, request_ids))
    assert role.has_pending_work()
    told = next_step(role).quarantined
    assert not role.has_pending_work()
    return list(told)


def test_blocks_are_kept_until_no_rank_reports_them(reader: Any) -> None:
    """Each rank learns that they are kept because of its own report: another's may end before its own is heard."""
    assert report(reader, 0, 1, "d") == [(0, "d")]
    assert sorted(kept(reader)) == BLOCKS
    assert report(reader, 1, 1, "d") == [(1, "d")]
    reader.update_connector_output(Reported({"d"}))
    assert report(reader, 0, 2) == []
    assert sorted(kept(reader)) == BLOCKS
    assert report(reader, 1, 2) == []
    assert sorted(kept(reader)) == []


def test_a_rank_that_reports_when_all_others_are_quiet_again_is_heard(reader: Any) -> None:
    assert report(reader, 0, 1, "d") == [(0, "d")]
    assert report(reader, 0, 2) == []
    assert sorted(kept(reader)) == []
    assert report(reader, 1, 1, "d") == [(1, "d")]
    assert sorted(kept(reader)) == BLOCKS


def test_late_reports_and_requests_that_are_not_loaded_change_nothing(reader: Any) -> None:
    assert report(reader, 0, 2) == []
    assert report(reader, 1, 1, "of a push of its own") == []
    assert sorted(kept(reader)) == []
    reader._answer(StillWriting(reader._state.epoch, reader._secret, 0, 1, ("d",)))
    assert not reader.has_pending_work()
    assert next_step(reader).quarantined == []


def test_a_report_to_a_former_engine_is_refused(reader: Any) -> None:
    with pytest.raises(HandoffError) as refused:
        reader._answer(StillWriting(reader._state.epoch + 1, reader._secret, 0, 1, ("d",)))
    assert refused.value.reason is Reason.PEER_CHANGED


def test_a_report_without_the_engines_secret_is_refused_and_frees_nothing(reader: Any) -> None:
    """The epoch is in every answer: whoever knows it could free blocks, and silence a rank by a large number."""
    assert report(reader, 0, 1, "d") == [(0, "d")]
    for secret in (b"", bytes(len(reader._secret))):
        with pytest.raises(HandoffError) as refused:
            reader._answer(StillWriting(reader._state.epoch, secret, 0, 1 << 60, ()))
        assert refused.value.reason is Reason.PERMISSION_DENIED
    assert next_step(reader).quarantined == []
    assert sorted(kept(reader)) == BLOCKS
    assert report(reader, 0, 2) == []
    assert sorted(kept(reader)) == []


def test_no_more_loads_are_admitted_than_a_report_has(
    reader: Any, make_role: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a report would leave out requests, and the blocks of a request left out would be freed."""
    params = prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1])
    waiting = request(PROMPT, params or {}, "e")
    reader.on_new_request(waiting)
    assert reader.get_num_new_matched_tokens(waiting, 0) == (80, True)
    monkeypatch.setattr(scheduler_role, "MAX_LOADS", 1)
    assert reader.get_num_new_matched_tokens(waiting, 0) == (None, False)
    assert report(reader, 0, 1, "d") == [(0, "d")]
    reader.update_connector_output(Reported({"d"}))
    assert reader.get_num_new_matched_tokens(waiting, 0) == (80, True), "no load will end and make room"
    reader.update_state_after_alloc(waiting, allocated([21, 22, 23, 24, 25]), 80)
    [order] = next_step(reader).loads
    assert order.error is not None
    assert order.error.reason is Reason.QUARANTINE_FULL
    reader.update_connector_output(Reported({"e"}))
    assert report(reader, 0, 2) == []
    again = request(PROMPT, prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1]) or {}, "f")
    reader.on_new_request(again)
    reader.update_state_after_alloc(again, allocated([21, 22, 23, 24, 25]), 80)
    [order] = next_step(reader).loads
    assert order.error is None


@pytest.mark.parametrize("length", [MAX_IDENTIFIER_LENGTH, MAX_IDENTIFIER_LENGTH + 1])
def test_every_request_that_is_loaded_can_be_named_in_a_report(reader: Any, make_role: Any, length: int) -> None:
    """A client chooses the id: a report with an id that is too long would be refused with all others in it."""
    params, request_id = prefill(make_role(FULL), PROMPT, [5, 4, 3, 2, 1]), "x" * length
    ours = request(PROMPT, params or {}, request_id)
    reader.on_new_request(ours)
    reader.update_state_after_alloc(ours, allocated([21, 22, 23, 24, 25]), 80)
    [order] = next_step(reader).loads
    if order.error is None:
        decode_question(encode(StillWriting(reader._state.epoch, reader._secret, 0, 1, ("d", request_id))))
    else:
        assert order.error.reason is Reason.INVALID_REQUEST
    assert (order.error is None) == (length <= MAX_IDENTIFIER_LENGTH)


def test_quarantined_blocks_and_those_of_a_hold_are_kept_apart_whatever_the_hold_is_called(reader: Any) -> None:
    """A push's hold is called by the transfer id, which a client can write."""
    assert report(reader, 0, 1, "d") == [(0, "d")]
    held = request(PROMPT, {"do_remote_decode": True}, "quarantine/d")
    reader.update_state_after_alloc(held, allocated([1, 2, 3, 4, 5]), 0)
    reader.request_finished(held, ([1, 2, 3, 4, 5],), is_complete=True)
    assert sorted(kept(reader)) == [1, 2, 3, 4, 5, *BLOCKS]
    reader._answer(StillWriting(reader._state.epoch, reader._secret, 0, 2, ()))
    next_step(reader)
    assert sorted(kept(reader)) == [1, 2, 3, 4, 5]


def test_a_report_of_a_rank_that_is_none_is_refused(reader: Any) -> None:
    """Whoever reaches the end point could have it remember any number of them."""
    with pytest.raises(HandoffError) as refused:
        reader._answer(StillWriting(reader._state.epoch, reader._secret, 2, 1, ("d",)))
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_of_an_aborted_request_the_blocks_are_known_too(reader: Any) -> None:
    """VLLM asks nobody when it gives them back."""
    ours = request(PROMPT, {"do_remote_prefill": False}, "d")
    reader.request_finished(ours, ([],), is_complete=False)
    assert next_step(reader).aborted == ["d"]
    assert report(reader, 0, 1, "d") == [(0, "d")]
    assert sorted(kept(reader)) == BLOCKS


class Reported:
    """What the engine tells when all ranks have reported a load."""

    def __init__(self, request_ids: set[str]) -> None:
        self.finished_recving = self.failed_recving = request_ids


def test_the_age_of_a_quarantine_can_be_seen(reader: Any) -> None:
    assert reader._quarantine.snapshot(0.0) == {}
    assert report(reader, 0, 1, "d") == [(0, "d")]
    now = time.monotonic()
    assert 0.0 <= reader._quarantine.snapshot(now)["d"] < 60.0
    assert reader._quarantine.snapshot(now + 10.0)["d"] >= 10.0
