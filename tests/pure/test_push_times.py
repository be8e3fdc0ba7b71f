"""A push's timeline: which step computed what was pushed, and that no request's timeline grows without end."""

from typing import Any

import pytest

from kvferry.handoff import push_times
from kvferry.handoff.messages import PushKey
from kvferry.handoff.push.part import NEVER
from kvferry.handoff.push.sender import Prompt, PushRequest
from kvferry.handoff.push.sending import END, Cut, Need
from kvferry.handoff.push_times import PromptTimes, PushTimes, Step
from kvferry.plan.layer_spans import Span

WHOLE, SPAN, STATE = Span("0"), Span("0", 2), Span("1")
LAYERS = {SPAN: ("b", "c")}
NEEDS = {WHOLE: Need(0, 40, 16), SPAN: Need(0, 40, 16), STATE: Need(0, 1, NEVER)}
KEY = PushKey("d/0", 7, 1)


def prompt(end: int, num_scheduled: int) -> Prompt:
    return Prompt(40, "p", {}, end, num_scheduled)


def made(*steps: tuple[Step, Prompt]) -> tuple[PromptTimes, PushTimes]:
    prompts = PromptTimes()
    for step, computed in steps:
        prompts.begin_step(step, [("x", computed)])
    push_request = PushRequest(KEY, "x", 40, "p", NEEDS, deadline=1e9)
    return prompts, PushTimes(push_request, prompts.of("x"), LAYERS)


def interval(times: PushTimes, cut: Cut, posted_at: float) -> tuple[Any, Any]:
    times.posted((cut,), 1, 100, posted_at)
    [span] = times.as_dict()["batches"][-1]["spans"]
    return span["compute_began_at"], span["compute_ended_at"]


def test_tokens_are_those_of_the_steps_that_computed_them() -> None:
    steps = [Step(1.0, ended_at=2.0), Step(2.5, ended_at=3.0), Step(3.5, ended_at=4.0)]
    _, times = made(*zip(steps, [prompt(16, 16), prompt(32, 16), prompt(END, 8)], strict=True))
    assert interval(times, Cut(WHOLE, 0, 16), 2.1) == (1.0, 2.0)
    assert interval(times, Cut(WHOLE, 16, 32), 3.1) == (2.5, 3.0)
    assert interval(times, Cut(WHOLE, 0, 40), 4.1) == (1.0, 4.0)
    assert interval(times, Cut(STATE, 0, 1), 4.1) == (1.0, 4.0), "a state is final with its prompt"


def test_a_span_was_computed_from_the_layer_before_it_to_its_last() -> None:
    told = Step(1.0, layers_at={"a": 1.2, "b": 1.3, "c": 1.6, "d": 1.8}, ended_at=2.0)
    _, times = made((told, prompt(16, 16)))
    assert interval(times, Cut(SPAN, 0, 16), 1.65) == (1.2, 1.6)
    only_ends = Step(1.0, layers_at={"a": 1.2, "c": 1.6}, ended_at=2.0)
    _, times = made((only_ends, prompt(16, 16)))
    assert interval(times, Cut(SPAN, 0, 16), 1.65) == (1.2, 1.6)
    untold = Step(1.0, ended_at=2.0)
    _, times = made((untold, prompt(16, 16)))
    assert interval(times, Cut(SPAN, 0, 16), 2.1) == (1.0, 2.0)


def test_of_what_was_computed_again_the_latest_time_before_it_was_posted_counts() -> None:
    steps = [Step(1.0, ended_at=2.0), Step(5.0, ended_at=6.0)]
    _, times = made(*zip(steps, [prompt(16, 16), prompt(16, 16)], strict=True))
    assert interval(times, Cut(WHOLE, 0, 16), 2.1) == (1.0, 2.0)
    assert interval(times, Cut(WHOLE, 0, 16), 6.1) == (5.0, 6.0)


def test_a_prefix_that_was_not_computed_has_no_time() -> None:
    _, times = made((Step(1.0, ended_at=2.0), prompt(END, 8)))
    assert interval(times, Cut(WHOLE, 0, 40), 2.1) == (None, 2.0)


def test_nothing_grows_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_times, "MAX_BATCHES", 3)
    monkeypatch.setattr(push_times, "MAX_CUTS", 4)
    monkeypatch.setattr(push_times, "MAX_PROMPTS", 2)
    prompts, times = made((Step(1.0, ended_at=2.0), prompt(END, 40)))
    for number in range(9):
        times.posted((Cut(WHOLE, 0, 16),) * (1 + number % 2), 1, 100, 2.0 + number)
        times.landed(2.5 + number)
    timeline = times.as_dict()
    assert [(batch["posted_at"], batch["landed_at"]) for batch in timeline["batches"]] == [(2, 2.5), (3, 3.5), (4, 4.5)]
    assert timeline["batches_left_out"] == 6
    for transfer_id in "xyz":
        prompts.of(transfer_id)
    assert list(prompts._prompts) == ["y", "z"]
    prompts.forget("y")
    prompts.forget("unknown")
    assert list(prompts._prompts) == ["z"]
    for _ in range(2 * push_times.MAX_STEPS):
        prompts.begin_step(Step(0.0), [("z", prompt(16, 16))])
    assert len(prompts.of("z")) == push_times.MAX_STEPS
