"""Events of a write: landed batches, and bounded lists."""

import json

import pytest

from kvferry.execution import source
from kvferry.execution.source import WriteEvents
from kvferry.handoff.messages import WriteKey
from kvferry.handoff.source import Cut, WriteRequest
from kvferry.plan.planner import Span

REQUEST = WriteRequest(WriteKey("d/0", 7, 1), "x", 40, "p", {}, deadline=1e9)
GROUP, SPAN = Span("0"), Span("0", 2)


def test_a_batch_that_failed_has_not_landed() -> None:
    events = WriteEvents(REQUEST, 2, {SPAN: ("b", "c")})
    events.posted((Cut(GROUP, 0, 16),), 3, 100, 1.0)
    events.landed(1.5)
    events.posted((Cut(SPAN, 16, 32),), 2, 50, 2.0)
    found = json.loads(json.dumps(events.as_dict()))
    assert (found["transfer_id"], found["receiver"], found["num_tokens"]) == ("x", "d/0", 40)
    whole, part = (
        {"group": "0", "layers": [], "tokens": [0, 16]},
        {"group": "0", "layers": ["b", "c"], "tokens": [16, 32]},
    )
    assert (found["source_index"], found["reported_at"]) == (2, None)
    events.reported(3.0)
    assert events.as_dict()["reported_at"] == 3.0
    assert found["batches"] == [
        {"posted_at": 1.0, "landed_at": 1.5, "bytes": 100, "descriptors": 3, "spans": [whole]},
        {"posted_at": 2.0, "landed_at": None, "bytes": 50, "descriptors": 2, "spans": [part]},
    ]


def test_the_lists_of_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_BATCHES", 3)
    events = WriteEvents(REQUEST, 2, {})
    for number in range(9):
        events.posted((Cut(GROUP, 0, 16),), 1, 100, 2.0 + number)
        events.landed(2.5 + number)
    found = events.as_dict()
    assert [(batch["posted_at"], batch["landed_at"]) for batch in found["batches"]] == [(2, 2.5), (3, 3.5), (4, 4.5)]
    assert found["batches_left_out"] == 6
