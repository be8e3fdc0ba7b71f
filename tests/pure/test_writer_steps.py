"""The layers that are final after a step of the engine: spans, and a device that lags behind the launches."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from kvferry.execution.device import HOST
from kvferry.execution.source import Writer
from kvferry.handoff.messages import Identity, WriteKey
from kvferry.handoff.source import END, Need, Prompt, WriteRequest
from kvferry.plan.planner import LayerSpans, Span

from ..waits import wait_until

IDENTITY = Identity("m", "w", "a", "float32", 2, 4, 8, "none", "float32")
LAYERS = ["0", "1", "2", "3"]
FIRST, SECOND = Span("full", 1), Span("full", 2)
KEY = WriteKey("d", 1, 1)
SECONDS = 5.0


class Device:
    """A device order whose marks are over when the test says so, in the order in which they were made."""

    device, is_immediate = "cuda:0", False

    def __init__(self) -> None:
        self.marks: list[threading.Event] = []
        self.num_over = self.num_awaited = 0

    def enter_thread(self) -> None: ...

    def mark(self) -> Any:
        self.marks.append(threading.Event())
        return Mock(wait=partial(self.wait, self.marks[-1]))

    def wait(self, mark: threading.Event) -> None:
        self.num_awaited += 1
        assert mark.wait(SECONDS)

    def run(self, num_marks: int) -> None:
        for mark in self.marks[self.num_over : self.num_over + num_marks]:
            mark.set()
        self.num_over += num_marks


def prompt(num_final: int) -> Prompt:
    return Prompt(40, "p", {}, num_final)


def made(order: Any, *, keeps_events: bool = False) -> Writer:
    spans = LayerSpans({"full": LAYERS}, layers_per_span=2)
    writer = Writer(Mock(order=order), 1, spans, keeps_events=keeps_events)
    needs = {span: Need(0, 40, 16) for span in (FIRST, SECOND)}
    writer._writes.announce(WriteRequest(KEY, "x", 40, "p", needs, deadline=1e12), now=0.0)
    return writer


def taken(writer: Writer) -> dict[int, int]:
    """Take and land what goes now; return up to which token, by span."""
    batch = writer._writes.take(KEY)
    writer._writes.landed(KEY)
    return {cut.span.number: cut.end_token for cut in batch}


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.run(len(made.marks))


def test_a_span_is_final_when_all_of_its_layers_have_run_in_whatever_order() -> None:
    writer = made(HOST)
    writer.begin_step([("x", prompt(16))])
    for layer in ("1", "3", "2"):
        writer.reach(layer)
    assert taken(writer) == {2: 16}
    writer.reach("0")
    assert taken(writer) == {1: 16}
    writer.compute([("x", prompt(16))])
    writer.begin_step([("x", prompt(END))])
    writer.reach("0")
    assert taken(writer) == {}, "layers of the step before do not count"


def test_of_steps_that_nobody_takes_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.execution.source.MAX_STEPS", 2)
    writer = made(HOST, keeps_events=True)
    for num_final in (8, 16, END):
        writer.begin_step([("x", prompt(num_final))])
        writer.compute([("x", prompt(num_final))])
        writer.begin_step([])
        writer.compute([])
    assert [step["prompts"] for step in writer.take_steps()] == [{"x": 16}, {"x": 40}]
    assert writer.take_steps() == []


def test_where_no_layer_reports_all_spans_are_final_together_when_a_step_ends() -> None:
    """As in a step that a graph replays: then chunks go, each by the plan of all layers."""
    writer = made(HOST)
    writer.begin_step([("x", prompt(16))])
    assert taken(writer) == {}
    writer.compute([("x", prompt(16))])
    assert taken(writer) == {1: 16, 2: 16}


def test_the_first_step_whose_layers_are_silent_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    writer = made(HOST)
    writer._why_silent = Mock(return_value="a CUDA graph replays whole steps")
    for layers in (LAYERS, LAYERS[:2], []):
        writer.begin_step([("x", prompt(16))])
        for layer in layers:
            writer.reach(layer)
        writer.compute([("x", prompt(16))])
    [told] = caplog.messages
    writer._why_silent.assert_called_once()
    assert "the layers of 1 of 2 spans" in told
    assert "at the end of each such step" in told
    assert "a CUDA graph replays whole steps" in told


def test_a_layer_outside_of_a_step_vouches_for_nothing() -> None:
    """As one of a dummy run between two steps."""
    writer = made(HOST)
    writer.begin_step([("x", prompt(16))])
    writer.compute([("x", prompt(16))])
    assert taken(writer) == {1: 16, 2: 16}
    for layer in ("0", "1"):
        writer.reach(layer)
    assert writer._writes._done_spans == set()


def test_what_the_device_has_not_done_is_not_written_though_the_next_step_is_launched(device: Device) -> None:
    writer = made(device)
    for num_final in (16, END):
        writer.begin_step([("x", prompt(num_final))])
        for layer in ("0", "1", "2", "3"):
            writer.reach(layer)
        writer.compute([("x", prompt(num_final))])
    settle(writer, device, 0)
    assert taken(writer) == {}
    settle(writer, device, 2)  # the first step has begun and run its first span
    assert taken(writer) == {1: 16}
    settle(writer, device, 3)  # it has ended, and the second has begun
    assert taken(writer) == {2: 16}
    settle(writer, device, 1)
    assert taken(writer) == {1: 40}
    settle(writer, device, 2)
    assert taken(writer) == {2: 40}


def test_a_step_that_was_launched_before_a_preemption_begins_nothing_after_it(device: Device) -> None:
    writer = made(device)
    writer.begin_step([("x", prompt(16))])
    writer.reach("0")
    writer.reach("1")
    writer.compute([("x", prompt(16))])
    writer.preempt(["x"])
    settle(writer, device, 3)
    assert taken(writer) == {}
    assert writer._writes.prompt_of(KEY) is None


def test_nothing_is_kept_of_a_prompt_that_ended_in_the_step_that_computes_it(device: Device) -> None:
    writer = made(device)
    writer.preempt(["x"])
    writer.end(["x"])
    writer.begin_step([("x", prompt(16))])
    writer.compute([("x", prompt(16))])
    settle(writer, device, 2)
    assert (writer._num_preemptions, writer._writes._prompts, writer._writes._running) == ({}, {}, {})


def settle(writer: Writer, device: Device, num_marks: int) -> None:
    """Let the device come so far, and what follows be done: whoever waits for the next mark has done all before it."""
    writer._deferred.add(device.mark(), lambda: None)
    device.run(num_marks)
    wait_until(lambda: device.num_awaited > device.num_over)
