"""Blocks that are kept because somebody may still write there: what ranks report, and what the scheduler does."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from kvferry.errors import HandoffError, Reason
from kvferry.handoff.messages import Unquiet

from .scheduler_requests import FULL, PROMPT, allocated, prefill, request

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
    assert len(role.build_connector_meta().loads) == 1
    return role


def report(role: Any, rank: int, number: int, *request_ids: str) -> list[tuple[int, str]]:
    """Let a rank report, and return what the workers are told in the next step."""
    role._answer(Unquiet(role._epoch, rank, number, request_ids))
    assert role.has_pending_work()
    told = role.build_connector_meta().set_aside
    assert not role.has_pending_work()
    return list(told)


def held(role: Any) -> list[int]:
    return sorted(role._held_blocks._pool.held)


def test_blocks_are_kept_until_no_rank_reports_them(reader: Any) -> None:
    """Each rank learns that they are kept because of its own report: another's may end before its own is heard."""
    assert report(reader, 0, 1, "d") == [(0, "d")]
    assert held(reader) == BLOCKS
    assert report(reader, 1, 1, "d") == [(1, "d")]
    reader.update_connector_output(Reported({"d"}))
    assert report(reader, 0, 2) == []
    assert held(reader) == BLOCKS
    assert report(reader, 1, 2) == []
    assert held(reader) == []


def test_a_rank_that_reports_when_all_others_are_quiet_again_is_heard(reader: Any) -> None:
    assert report(reader, 0, 1, "d") == [(0, "d")]
    assert report(reader, 0, 2) == []
    assert held(reader) == []
    assert report(reader, 1, 1, "d") == [(1, "d")]
    assert held(reader) == BLOCKS


def test_late_reports_and_requests_that_are_not_loaded_change_nothing(reader: Any) -> None:
    assert report(reader, 0, 2) == []
    assert report(reader, 1, 1, "of a push of its own") == []
    assert held(reader) == []
    reader._answer(Unquiet(reader._epoch, 0, 1, ("d",)))
    assert not reader.has_pending_work()
    assert reader.build_connector_meta().set_aside == []


def test_a_report_to_a_former_engine_is_refused(reader: Any) -> None:
    with pytest.raises(HandoffError) as refused:
        reader._answer(Unquiet(reader._epoch + 1, 0, 1, ("d",)))
    assert refused.value.reason is Reason.PEER_CHANGED


def test_a_report_of_a_rank_that_is_none_is_refused(reader: Any) -> None:
    """Whoever reaches the end point could have it remember any number of them."""
    with pytest.raises(HandoffError) as refused:
        reader._answer(Unquiet(reader._epoch, 2, 1, ("d",)))
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_of_an_aborted_request_the_blocks_are_known_too(reader: Any) -> None:
    """VLLM asks nobody when it gives them back."""
    ours = request(PROMPT, {"do_remote_prefill": False}, "d")
    reader.request_finished(ours, ([],), is_complete=False)
    assert reader.build_connector_meta().aborted == ["d"]
    assert report(reader, 0, 1, "d") == [(0, "d")]
    assert held(reader) == BLOCKS


class Reported:
    """What the engine tells when all ranks have reported a load."""

    def __init__(self, request_ids: set[str]) -> None:
        self.finished_recving = self.failed_recving = request_ids
