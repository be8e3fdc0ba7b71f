"""Load, wait or compute: the rule alone, and the decisions against engines and tiers whose true times are known."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.tiers.load_rule import (
    COPIES_OF_A_SAMPLE,
    KEPT_SAMPLES,
    SAMPLES_TO_BELIEVE,
    STALE_AFTER,
    TRY_SHARE,
    Because,
    Choice,
    CopyTimes,
    Decision,
    LoadRule,
    Option,
    RunningTime,
    StepTimes,
    quickest,
)

SECONDS = st.floats(1e-6, 1e3)
SAMPLES = st.lists(st.tuples(st.floats(1, 1e9), SECONDS), min_size=SAMPLES_TO_BELIEVE, max_size=40)


@given(st.lists(SECONDS, min_size=1, max_size=5))
def test_the_quickest_way_is_chosen(seconds: list[float]) -> None:
    chosen = quickest(seconds)
    assert chosen is not None
    assert seconds[chosen] == min(seconds)
    assert quickest([*seconds, None]) is None


@given(SAMPLES, st.floats(0, 1e10), st.floats(0, 1e10))
def test_more_never_takes_less(samples: list[tuple[float, float]], one: float, other: float) -> None:
    times = RunningTime()
    for amount, seconds in samples:
        times.record(amount, seconds)
    less, more = times.seconds(min(one, other)), times.seconds(max(one, other))
    assert less is not None
    assert more is not None
    assert 0 <= less <= more


class Rule:
    """A rule and the lower tiers that it decides about."""

    def __init__(self, lower: Mapping[str, float]) -> None:
        self.rule, self.lower = LoadRule(8192), {name: CopyTimes() for name in lower}

    def decide(self, num_host: int, num_disk: int = 0, num_tokens: int = 1001) -> Decision:
        """Decide for tokens of 10,000 bytes, first those in host memory, then those on disk."""
        whole = num_host + num_disk
        options = [Option(num_host, num_host * 10_000)] if num_host else []
        options += [Option(whole, whole * 10_000, {"disk": num_disk * 10_000})] if num_disk else []
        return self.rule.decide(num_tokens, options, self.lower)


def learned(
    token_seconds: float = 1e-3, load_rate: float = 1e9, lower: Mapping[str, float] = MappingProxyType({})
) -> Rule:
    """Return a rule that knows an engine of 10 ms a step, and copies of 2 ms beside the rate."""
    rule = Rule(lower)
    for num_tokens in (100, 200, 400, 800, 1600, 100):
        rule.rule.steps.record(num_tokens, 0.01 + num_tokens * token_seconds)
        for times, rate in [(rule.rule.loads, load_rate), *((rule.lower[name], rate) for name, rate in lower.items())]:
            times.record(num_tokens * 10_000, 0.002 + num_tokens * 10_000 / rate)
    return rule


@settings(deadline=None)
@given(st.integers(100, 5000), st.integers(100, 5000))
def test_the_choice_is_monotone_in_tokens(one: int, other: int) -> None:
    """Behind a fixed time that only a long enough prefix repays: what is worth loading stays so for a longer prefix."""
    rule = learned(token_seconds=1e-5, load_rate=2e9)
    less, more = sorted((one, other))
    if rule.decide(less, num_tokens=less + 1).choice is Choice.LOAD:
        assert rule.decide(more, num_tokens=more + 1).choice is Choice.LOAD


def test_the_choice_is_monotone_in_bytes() -> None:
    rule = learned().rule
    chosen = [rule.decide(1001, [Option(1000, num_bytes)], {}).choice for num_bytes in range(10**6, 2 * 10**9, 10**8)]
    assert chosen[0] is Choice.LOAD
    assert chosen[-1] is Choice.COMPUTE
    assert chosen == sorted(chosen, key=[Choice.LOAD, Choice.COMPUTE].index)


def test_what_is_not_known_is_measured_first_loads_and_then_computing() -> None:
    rule = Rule({})
    for _ in range(SAMPLES_TO_BELIEVE):
        decision = rule.decide(992)
        assert (decision.choice, decision.because, decision.num_tokens) == (Choice.LOAD, Because.UNMEASURED, 992)
        assert (decision.seconds, decision.compute_seconds, decision.saved_seconds) == (None, None, None)
        rule.rule.loads.record(9_920_000, 0.01)
    for _ in range(SAMPLES_TO_BELIEVE):
        assert rule.decide(992).choice is Choice.COMPUTE
        rule.rule.steps.record(1001, 1.0)
    assert (rule.decide(992).choice, rule.decide(992).because) == (Choice.LOAD, Because.QUICKEST)


def test_nothing_to_load_is_computed() -> None:
    decision = learned().rule.decide(1000, [], {})
    assert (decision.choice, decision.num_tokens) == (Choice.COMPUTE, 0)


def test_what_is_known_to_be_slower_is_not_loaded() -> None:
    rule = learned(load_rate=1e6)  # 10 s instead of 1
    assert {rule.decide(1000).choice for _ in range(STALE_AFTER)} == {Choice.COMPUTE}
    decisions = [rule.decide(1000) for _ in range(1000)]  # of which no load measures anything
    tries = [each for each in decisions if each.choice is Choice.LOAD]
    assert tries
    extra = sum((each.seconds or 0) - (each.compute_seconds or 0) for each in tries)
    assert extra <= TRY_SHARE * (1000 + STALE_AFTER) * 1.1
    assert {each.because for each in tries} == {Because.REFRESH}


@pytest.mark.parametrize("seconds", [30.0, 1e-9])
@pytest.mark.parametrize(("load_rate", "choice"), [(1e9, Choice.LOAD), (5e6, Choice.COMPUTE)])
def test_one_outlier_does_not_change_the_choice(seconds: float, load_rate: float, choice: Choice) -> None:
    of_loads, of_steps = learned(load_rate=load_rate), learned(load_rate=load_rate)
    of_loads.rule.loads.record(10_000_000, seconds)
    of_steps.rule.steps.record(1000, seconds)
    assert of_loads.decide(1000).choice is of_steps.decide(1000).choice is choice


@pytest.mark.parametrize(("before", "after", "choice"), [(1e9, 2e6, Choice.COMPUTE), (2e6, 1e9, Choice.LOAD)])
def test_a_change_of_the_rate_is_learned(before: float, after: float, choice: Choice) -> None:
    rule = learned(load_rate=before)
    for _ in range(2000):
        decision = rule.decide(1000)
        if decision.num_tokens:
            rule.rule.loads.record(10_000_000, 0.002 + 10_000_000 / after)
        else:
            rule.rule.steps.record(1001, 1.011)
    found = Counter(rule.decide(1000).choice for _ in range(STALE_AFTER))
    assert found.most_common(1)[0][0] is choice


@pytest.mark.parametrize(
    ("disk_rate", "num_host", "num_disk", "choice", "num_tokens"),
    [
        (1e9, 500, 500, Choice.WAIT, 1000),
        (5e6, 500, 500, Choice.LOAD, 500),  # 2 ms a token from disk, 1 ms to compute
        (5e6, 0, 1000, Choice.COMPUTE, 0),
        (1e9, 0, 1000, Choice.WAIT, 1000),
    ],
)
def test_a_request_waits_for_a_lower_tier_where_that_is_quicker(
    disk_rate: float, num_host: int, num_disk: int, choice: Choice, num_tokens: int
) -> None:
    decision = learned(lower={"disk": disk_rate}).decide(num_host, num_disk)
    assert (decision.choice, decision.because, decision.num_tokens) == (choice, Because.QUICKEST, num_tokens)
    if choice is Choice.WAIT:  # waiting is worth what the load saves
        assert decision.saved_seconds == pytest.approx(1.0, rel=0.05)


def test_an_unmeasured_tier_is_tried_for_as_long_as_computing_takes() -> None:
    rule = learned(lower={"disk": 1e9})
    rule.lower["disk"] = CopyTimes()
    decision = rule.decide(500, 500)
    assert (decision.choice, decision.because, decision.num_tokens) == (Choice.WAIT, Because.UNMEASURED, 1000)
    assert decision.saved_seconds == pytest.approx(1.0, rel=0.05)
    assert rule.decide(1000).because is Because.QUICKEST


def test_a_prompt_of_several_steps_costs_the_fixed_time_of_each() -> None:
    def seconds(max_step_tokens: int) -> float:
        rule = LoadRule(max_step_tokens)
        for num_tokens in (100, 100, 100, 50, 200, 400, 800, 100):
            rule.steps.record(num_tokens, 0.1 + num_tokens * 1e-3)
        return rule.decide(1000, [Option(512, 1)], {}).compute_seconds or 0.0

    assert seconds(1000) == pytest.approx(1.1, rel=0.05)
    assert seconds(250) == pytest.approx(1.4, rel=0.05)


def test_copies_side_by_side_are_measured_together() -> None:
    times = CopyTimes()
    for at in range(10):
        for copy in range(4):
            times.begin(copy, 1_000_000, now=float(at))
        for copy in range(4):
            times.end(copy, now=at + 0.004)
    assert times.seconds(4_000_000) == pytest.approx(0.004, rel=0.05)


def test_a_tier_that_is_never_idle_is_measured_all_the_same() -> None:
    times = CopyTimes()
    times.begin(0, 1_000_000, now=0.0)
    for copy in range(10 * COPIES_OF_A_SAMPLE):
        times.begin(copy + 1, 1_000_000, now=copy * 0.001)
        times.end(copy, now=(copy + 1) * 0.001)
    assert times.seconds(8_000_000) == pytest.approx(0.008, rel=0.1)


def test_a_copy_that_failed_measures_nothing() -> None:
    times = CopyTimes()
    for at in range(10):
        times.begin("a", 1_000_000, now=float(at))
        times.begin("b", 1_000_000, now=float(at))
        times.end("a", now=at + 0.1, has_landed=False)
        times.end("b", now=at + 0.2)
    assert times.num_samples == 0
    times.end("unknown", now=20.0)
    assert times.num_samples == 0


def test_a_step_begins_when_the_one_before_has_ended() -> None:
    times = StepTimes()
    times.begin(100, now=0.0)
    for number in range(1, 5):
        times.begin(100, now=float(number) - 0.9)
        times.end(now=float(number))
    assert times.seconds(100) == pytest.approx(1.0)
    times.begin(0, now=5.0)
    times.end(now=5.0)
    times.end(now=50.0)
    times.end(now=60.0)
    assert times.num_samples == 5, "a step without a prompt says nothing, and no results are of no step"
    assert KEPT_SAMPLES > 5


@dataclass(frozen=True)
class Truth:
    """The true times of an engine and its host tier, in seconds, and how far a sample is off."""

    step: float = 5e-3
    token: float = 2e-4
    latency: float = 4e-3
    rate: float = 2e9
    token_bytes: int = 20_000
    spread: float = 0.1

    def seconds(self, num_loaded: int, num_tokens: int) -> float:
        loading = self.latency + num_loaded * self.token_bytes / self.rate if num_loaded else 0.0
        return loading + self.step + self.token * (num_tokens - num_loaded)


def over_the_best(truth: Truth, seed: int, num_requests: int = 300) -> float:
    """Return the time of requests over that of the best choices, once the times are known; one sample in 50 is slow."""
    random, rule = np.random.default_rng(seed), LoadRule(8192)

    def sample(seconds: float) -> float:
        return seconds * float(np.exp(random.normal(0, truth.spread))) * (20 if random.random() < 0.02 else 1)

    took = best = 0.0
    for number, length in enumerate(np.exp(random.uniform(np.log(64), np.log(4000), num_requests + 60)).astype(int)):
        num_tokens = int(length)
        prefix = (num_tokens - 1) // 16 * 16
        loaded = rule.decide(num_tokens, [Option(prefix, prefix * truth.token_bytes)], {}).num_tokens
        if loaded:
            rule.loads.record(loaded * truth.token_bytes, sample(truth.seconds(loaded, loaded) - truth.step))
        else:
            rule.steps.record(num_tokens, sample(truth.seconds(0, num_tokens)))
        if number >= 60:
            took += truth.seconds(loaded, num_tokens)
            best += min(truth.seconds(each, num_tokens) for each in (0, prefix))
    return took / best


def between(least: float, most: float) -> st.SearchStrategy[float]:
    """Draw a number whose order of magnitude is as likely as any other."""
    return st.floats(np.log(least), np.log(most)).map(lambda drawn: float(np.exp(drawn)))


truths = st.builds(
    Truth,
    step=between(1e-3, 1e-1),
    token=between(1e-6, 1e-3),
    latency=between(1e-4, 1e-1),
    rate=between(1e7, 3e10),
    token_bytes=st.integers(1_000, 200_000),
    spread=st.floats(0, 0.2),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(truth=truths, seed=st.integers(0, 1000))
def test_not_far_above_the_better_of_loading_and_computing(truth: Truth, seed: int) -> None:
    assert over_the_best(truth, seed) <= 1.2


@pytest.mark.parametrize("rate", [2e7, 2e8, 2e10])
def test_close_to_the_better_of_loading_and_computing(rate: float) -> None:
    assert over_the_best(replace(Truth(), rate=rate), seed=1) <= 1.05
