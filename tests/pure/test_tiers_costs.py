"""Load, wait or compute: the decisions against engines and tiers whose true times are known."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.tiers.costs import DECODE_STEPS_OF_A_SAMPLE, STALE_AFTER, Because, Choice, Costs, Decision, Offer, Work
from kvferry.tiers.rates import (
    COPIES_OF_A_SPAN,
    MOST_BETWEEN_FITS,
    SAMPLES_TO_BELIEVE,
    CopyTimes,
    Rates,
    _with_none_below_zero,
)

BLOCK = 16
LEARNING = 60
"""Requests after which the times are known."""


@dataclass(frozen=True)
class Truth:
    """The true times of an engine and its host tier, in seconds, and how far a sample is off."""

    step: float = 5e-3
    token: float = 2e-4
    pair: float = 1e-8
    latency: float = 2e-3
    rate: float = 2e9
    overhead: float = 2e-3
    block_bytes: int = 320_000
    spread: float = 0.1
    slow_share: float = 0.02
    """Share of samples that take 20 times as long."""

    def computing(self, num_before: int, num_tokens: int) -> float:
        work = Work.of(min(num_before, num_tokens - 1), num_tokens)
        return self.step + self.token * work.num_tokens + self.pair * work.num_pairs

    def copying(self, num_blocks: int) -> float:
        return self.latency + num_blocks * self.block_bytes / self.rate

    def request(self, num_loaded: int, num_tokens: int) -> float:
        """Return the seconds to the first token."""
        waiting = self.overhead + self.copying(num_loaded // BLOCK) if num_loaded else 0.0
        return waiting + self.computing(num_loaded, num_tokens)


@dataclass(frozen=True)
class Outcome:
    decision: Decision
    seconds: float
    best: float


class Engine:
    """Serves one request after another, and lets ``costs`` learn from samples that are off."""

    def __init__(self, truth: Truth, seed: int = 0) -> None:
        self.truth, self.costs, self.random = truth, Costs(max_step_tokens=8192), np.random.default_rng(seed)
        self.now = 0.0

    def sample(self, seconds: float) -> float:
        is_slow = self.random.random() < self.truth.slow_share
        return seconds * float(np.exp(self.random.normal(0, self.truth.spread))) * (20 if is_slow else 1)

    def serve(self, num_requests: int, least: int = 64, most: int = 4000) -> list[Outcome]:
        lengths = np.exp(self.random.uniform(np.log(least), np.log(most), num_requests)).astype(int)
        return [self.serve_one(length) for length in lengths.tolist()]

    def serve_one(self, num_tokens: int) -> Outcome:
        truth = self.truth
        ends = np.arange(1, (num_tokens - 1) // BLOCK + 1) * BLOCK
        decision = self.costs.decide(Offer(num_tokens, 0, ends, ends // BLOCK * truth.block_bytes))
        if decision.num_tokens:
            num_blocks = decision.num_tokens // BLOCK
            self.costs.loads.begin("copy", num_blocks * truth.block_bytes, self.now)
            self.costs.loads.end("copy", self.now + self.sample(truth.copying(num_blocks)))
            self.costs.waited(self.sample(truth.overhead))
        work = Work.of(min(decision.num_tokens, num_tokens - 1), num_tokens)
        self.costs.computed(work, self.sample(truth.computing(decision.num_tokens, num_tokens)))
        for number in range(3):
            decode = Work.of(num_tokens + number, num_tokens + number + 1)
            self.costs.computed(decode, self.sample(truth.computing(num_tokens + number, num_tokens + number + 1)))
        self.now += 1.0
        options = [truth.request(end, num_tokens) for end in (0, *ends.tolist())]
        return Outcome(decision, truth.request(decision.num_tokens, num_tokens), min(options))


def over_the_best(outcomes: list[Outcome]) -> float:
    return sum(outcome.seconds for outcome in outcomes) / sum(outcome.best for outcome in outcomes)


def between(least: float, most: float) -> st.SearchStrategy[float]:
    """Draw a number whose order of magnitude is as likely as any other."""
    return st.floats(np.log(least), np.log(most)).map(lambda drawn: float(np.exp(drawn)))


truths = st.builds(
    Truth,
    step=between(1e-3, 1e-1),
    token=between(1e-6, 1e-3),
    pair=between(1e-12, 1e-7),
    latency=between(1e-4, 1e-1),
    rate=between(1e7, 3e10),
    overhead=between(1e-4, 1e-2),
    block_bytes=st.integers(16_000, 3_000_000),
    spread=st.floats(0, 0.2),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(truth=truths, seed=st.integers(0, 1000))
def test_never_above_the_better_of_loading_and_computing_by_more_than_a_twentieth(truth: Truth, seed: int) -> None:
    engine = Engine(truth, seed)
    engine.serve(LEARNING)
    assert over_the_best(engine.serve(300)) <= 1.05


@pytest.mark.parametrize(
    ("before", "after", "choice"),
    [(2e9, 2e7, Choice.COMPUTE), (2e7, 2e9, Choice.LOAD), (2e9, 1e6, Choice.COMPUTE), (1e6, 2e9, Choice.LOAD)],
)
def test_a_change_of_the_copy_rate_is_learned(before: float, after: float, choice: Choice) -> None:
    engine = Engine(Truth(rate=before))
    engine.serve(200)
    engine.truth = replace(engine.truth, rate=after)
    engine.serve(400)
    outcomes = engine.serve(200, least=1000)
    chosen = [outcome.decision.choice for outcome in outcomes if outcome.decision.because is Because.QUICKEST]
    assert set(chosen) == {choice}
    assert over_the_best(outcomes) <= 1.05


@pytest.mark.parametrize("factor", [0.02, 50.0])
def test_a_change_of_the_prefill_speed_is_learned(factor: float) -> None:
    engine = Engine(Truth(rate=1e8))
    engine.serve(200)
    engine.truth = replace(engine.truth, token=engine.truth.token * factor)
    engine.serve(400)
    assert over_the_best(engine.serve(200)) <= 1.05


def test_before_anything_is_measured_the_whole_offer_is_loaded() -> None:
    decision = Costs(8192).decide(Offer(1000, 16, np.array([512, 992]), np.array([1, 2])))
    assert (decision.choice, decision.because, decision.num_tokens) == (Choice.LOAD, Because.UNMEASURED, 976)
    assert (decision.load_seconds, decision.compute_seconds, decision.wait_seconds) == (None, None, None)


def test_an_empty_offer_is_computed() -> None:
    decision = Costs(8192).decide(Offer(1000, 0, np.array([], np.int64), np.array([], np.int64)))
    assert (decision.choice, decision.num_tokens) == (Choice.COMPUTE, 0)


def test_one_slow_load_changes_nothing() -> None:
    engine = Engine(Truth(slow_share=0.0, spread=0.02))
    engine.serve(50)
    before = engine.costs.loads.snapshot()["bytes_per_second"]
    engine.costs.loads.begin("slow", 100 * 320_000, engine.now)
    engine.costs.loads.end("slow", engine.now + 30.0)
    assert engine.costs.loads.snapshot()["bytes_per_second"] == pytest.approx(before, rel=0.1)


def test_loads_that_are_never_chosen_are_tried_again_for_a_fiftieth_of_the_time() -> None:
    engine = Engine(Truth(rate=2e7, slow_share=0.0, spread=0.02))
    engine.serve(LEARNING)
    outcomes = engine.serve(400)
    tries = [outcome for outcome in outcomes if outcome.decision.because is Because.REFRESH]
    assert 5 <= len(tries) <= 400 / STALE_AFTER
    assert {outcome.decision.choice for outcome in outcomes} == {Choice.LOAD, Choice.COMPUTE}
    extra = sum(outcome.seconds - outcome.best for outcome in tries)
    assert extra <= 0.025 * sum(outcome.best for outcome in outcomes)


def test_a_longer_context_is_slower_to_compute() -> None:
    engine = Engine(Truth(token=1e-6, pair=1e-7, rate=1e6, slow_share=0.0, spread=0.0))
    engine.serve(LEARNING)
    decision = engine.serve_one(4000).decision
    assert decision.compute_seconds == pytest.approx(engine.truth.computing(0, 4000), rel=0.05)


def test_a_prompt_of_several_steps_costs_the_fixed_time_of_each() -> None:
    def seconds(max_step_tokens: int) -> float:
        costs = Costs(max_step_tokens)
        for num_tokens in (100, 100, 100, 50, 200, 400, 800, 100):
            costs.computed(Work.of(0, num_tokens), 0.1 + num_tokens * 1e-3)
        return costs.decide(Offer(1000, 0, np.array([512]), np.array([1]))).compute_seconds or 0.0

    assert seconds(1000) == pytest.approx(1.1, rel=0.05)
    assert seconds(250) == pytest.approx(1.4, rel=0.05)


def learned(lower: Mapping[str, float] | None = None) -> Costs:
    """Return costs of an engine of 1 ms a token, loads of 1 GB/s, and lower tiers of the given bytes per second."""
    costs = Costs(8192, {name: CopyTimes() for name in lower or {}})
    for at, num_tokens in enumerate((100, 100, 100, 50, 200, 400, 800, 100)):
        costs.computed(Work.of(0, num_tokens), 0.01 + num_tokens * 1e-3)
        for times, rate in [
            (costs.loads, 1e9),
            *((costs.promotions[name], rate) for name, rate in (lower or {}).items()),
        ]:
            times.begin(at, num_tokens * 10_000, float(at))
            times.end(at, at + 0.001 + num_tokens * 10_000 / rate)
        costs.waited(0.002)
    return costs


def offer(num_host: int, num_disk: int, **queued: int) -> Offer:
    """Return an offer of 1,001 tokens of 10,000 bytes each: first those in host memory, then those on disk."""
    ends = np.unique([num_host, num_host + num_disk])
    ends = ends[ends > 0]
    return Offer(1001, 0, ends, ends * 10_000, {"disk": np.maximum(0, ends - num_host) * 10_000}, queued)


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
    decision = learned({"disk": disk_rate}).decide(offer(num_host, num_disk))
    assert (decision.choice, decision.because, decision.num_tokens) == (choice, Because.QUICKEST, num_tokens)
    if choice is Choice.WAIT:  # waiting is worth what the load saves
        assert decision.wait_seconds == pytest.approx(1.0, rel=0.05)


def test_the_bytes_ahead_in_a_tier_count() -> None:
    costs = learned({"disk": 1e9})
    assert costs.decide(offer(0, 1000)).choice is Choice.WAIT
    assert costs.decide(offer(0, 1000, disk=2_000_000_000)).choice is Choice.COMPUTE
    costs.promotions["disk"].begin("another request's", 2_000_000_000, 100.0)
    assert costs.decide(offer(0, 1000)).choice is Choice.COMPUTE


def test_an_unmeasured_tier_is_tried_for_as_long_as_computing_takes() -> None:
    costs = learned({"disk": 1e9})
    costs.promotions["disk"] = CopyTimes()
    decision = costs.decide(offer(500, 500))
    assert (decision.choice, decision.because, decision.num_tokens) == (Choice.WAIT, Because.UNMEASURED, 1000)
    assert decision.wait_seconds == pytest.approx(1.0, rel=0.05)
    assert costs.decide(offer(1000, 0)).because is Because.QUICKEST


def fail(times: CopyTimes, number: int) -> None:
    for copy in range(number):
        times.begin(copy, 1_000_000, 100.0 + copy)
        times.end(copy, 100.01 + copy, share_landed=0.0)


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_tier_whose_copies_all_fail_is_waited_for_now_and_then_only(is_measured: bool) -> None:
    """Failed copies measure nothing: each request would wait, for as long as computing takes."""
    costs = learned({"disk": 1e9})
    if not is_measured:
        costs.promotions["disk"] = CopyTimes()
    times = costs.promotions["disk"]
    fail(times, SAMPLES_TO_BELIEVE - 1)
    assert costs.decide(offer(500, 500)).choice is Choice.WAIT
    fail(times, 1)
    found = [costs.decide(offer(500, 500)) for _ in range(4 * STALE_AFTER)]
    assert Counter(each.choice for each in found) == {Choice.WAIT: 4, Choice.LOAD: 4 * STALE_AFTER - 4}
    assert {each.num_tokens for each in found if each.choice is Choice.LOAD} == {500}, "what host memory has"
    assert costs.decide(offer(0, 1000)).choice is Choice.COMPUTE
    assert costs.decide(offer(1000, 0)).choice is Choice.LOAD
    times.begin("lands", 1_000_000, 200.0)
    times.end("lands", 200.01, share_landed=0.1)
    assert costs.decide(offer(500, 500)).choice is Choice.WAIT


def test_a_load_ends_with_a_step_of_the_requests_that_run() -> None:
    costs = learned()
    short = Offer(101, 0, np.array([96]), np.array([960_000]))
    assert costs.decide(short).choice is Choice.LOAD  # 4 ms instead of 96
    assert costs.decide(short, running=Work.of(0, 200)).choice is Choice.COMPUTE  # a step of 210 ms


def test_copies_side_by_side_are_measured_together() -> None:
    times = CopyTimes()
    for at in range(10):
        for copy in range(4):
            times.begin(copy, 1_000_000, now=float(at))
        for copy in range(4):
            times.end(copy, now=at + 0.004 + copy * 1e-9)
    assert times.seconds(np.array([4_000_000]))[0] == pytest.approx(0.004, rel=0.05)
    assert times.moving_bytes == 0


@pytest.mark.parametrize("number", [2, COPIES_OF_A_SPAN + 1, 4 * COPIES_OF_A_SPAN])
def test_the_order_in_which_ends_become_known_does_not_matter(number: int) -> None:
    """A step of the engine reports a set of loads: one that ended earlier may be heard of later."""
    times, random = CopyTimes(), np.random.default_rng(0)
    for at in range(12):
        for copy in range(number):
            times.begin(copy, 40_000_000, now=float(at))
        for copy in random.permutation(number).tolist():
            times.end(copy, now=at + 0.02 * (copy + 1))
    assert times.seconds(np.array([number * 40_000_000]))[0] == pytest.approx(number * 0.02, rel=0.05)


def test_a_pause_before_an_end_became_known_is_no_copying() -> None:
    """Under asynchronous scheduling the next load is ordered before the end of the last one is known."""
    times = CopyTimes()
    times.begin(0, 40_000_000, now=0.0)
    for copy in range(10 * COPIES_OF_A_SPAN):
        times.begin(copy + 1, 40_000_000, now=copy + 1.0)
        times.end(copy, now=copy + 0.02)
    times.end(copy + 1, now=copy + 1.02)
    assert times.seconds(np.array([40_000_000]))[0] == pytest.approx(0.02, rel=0.05)


def test_a_tier_that_is_never_idle_is_measured_all_the_same() -> None:
    times = CopyTimes()
    times.begin(0, 1_000_000, now=0.0)
    for copy in range(10 * COPIES_OF_A_SPAN):
        times.begin(copy + 1, 1_000_000, now=copy * 0.001)
        times.end(copy, now=(copy + 1) * 0.001)
    assert times.is_measured
    assert times.seconds(np.array([7_000_000]))[0] == pytest.approx(0.008, rel=0.1)  # behind one that moves


def test_a_span_with_a_failed_copy_measures_nothing() -> None:
    times = CopyTimes()
    for at in range(10):
        times.begin("a", 1_000_000, now=float(at))
        times.begin("b", 1_000_000, now=float(at))
        times.end("a", now=at + 0.1, share_landed=0.0)
        times.end("b", now=at + 0.2)
    assert times.num_measured == 0
    times.end("unknown", now=20.0)


def steady(rates: Rates, number: int, spread: float) -> Iterator[None]:
    random = np.random.default_rng(1)
    for _ in range(number):
        size = float(np.exp(random.uniform(np.log(1e5), np.log(1e8))))
        rates.record((1.0, size), (1e-3 + size / 1e9) * float(np.exp(random.normal(0, spread))))
        yield


def test_noise_is_no_change() -> None:
    rates = Rates((1e-3, 1e-9))
    off = []
    for _ in steady(rates, 2000, spread=0.3):
        off.append(float(rates.seconds(np.array([1.0, 1e7]))) / 0.011)
    assert min(off[50:]) > 0.7
    assert max(off[50:]) < 1.4


def test_a_decision_makes_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for its decision, and a fit takes as long as ten of them."""
    costs = learned({"disk": 1e9})
    for number in range(20):
        costs.computed(Work.of(100, 101 + number), 0.02)
    monkeypatch.setattr(Rates, "_fit", lambda _: pytest.fail("a fit where a prediction is asked for"))
    assert costs.decide(offer(500, 500), running=Work.of(10, 11)).because is Because.QUICKEST
    assert costs.snapshot()["computing"]["token_seconds"] > 0


def test_fits_are_seldom_once_the_rates_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, fits = Rates._fit, Counter[str]()

    def counted(rates: Rates) -> None:
        fits[phases[-1]] += 1
        fit(rates)

    monkeypatch.setattr(Rates, "_fit", counted)
    rates, phases = Rates((1e-3, 1e-9)), list[str]()
    for phase, number, factor in (("first", 4, 1.0), ("then", 60, 1.0), ("known", 160, 1.0), ("changed", 20, 3.0)):
        phases.append(phase)
        for size in np.geomspace(1e5, 1e8, number).tolist():
            rates.record((1.0, size), factor * (1e-3 + size / 1e9))
    assert fits["first"] == 4, "each sample says much"
    assert fits["then"] <= 24
    assert fits["known"] <= 160 / MOST_BETWEEN_FITS + 1
    assert fits["changed"] >= 8
    assert float(rates.seconds(np.array([1.0, 1e7]))) == pytest.approx(0.033, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_times_many_orders_of_magnitude_apart_can_be_learned(seed: int) -> None:
    """A machine that is suspended, or a clock that stands still: the engine core must not end for it."""
    random, rates = np.random.default_rng(seed), Rates((5e-3, 5e-5, 1e-9))
    for _ in range(60):
        number = float(random.choice([1, 16, 512, 8192, 100_000]))
        rates.record((1.0, number, number**2), float(10 ** random.uniform(-8, 5)))
        assert np.isfinite(rates.coefficients).all()
        assert min(rates.coefficients) >= 0


def test_no_coefficient_is_negative() -> None:
    rates = Rates((1e-3, 1e-9))
    for size, seconds in ((1e6, 5e-3), (2e6, 4e-3), (4e6, 3e-3), (8e6, 2e-3)):  # larger ones are quicker
        rates.record((1.0, size), seconds)
    assert min(rates.coefficients) >= 0
    assert 1e-3 < float(rates.seconds(np.array([1.0, 1e9]))) < 1.0


@pytest.mark.parametrize("num_features", [2, 3])
def test_shares_below_zero_give_way_to_the_best_others(num_features: int) -> None:
    random = np.random.default_rng(num_features)
    num_negative = 0
    for _ in range(200):
        scaled, seconds = random.exponential(size=(5, num_features)), random.exponential(size=5)
        products, target = scaled.T @ scaled + 0.01 * np.eye(num_features), scaled.T @ seconds + 0.01
        found = _with_none_below_zero(products, target)
        num_negative += bool((np.linalg.solve(products, target) < 0).any())
        slope = products @ found - target
        assert (found >= 0).all()
        # Where the squares are least no share can grow or, where it is above 0, shrink.
        assert slope.min() > -1e-9
        assert np.abs(slope[found > 0]).max() < 1e-9
    assert num_negative > 20


def test_one_decode_step_of_several_is_a_sample_and_a_slower_engine_is_noticed() -> None:
    costs, decode = Costs(max_step_tokens=8192), Work(num_tokens=8, num_pairs=1000)
    for _ in range(10 * DECODE_STEPS_OF_A_SAMPLE):
        costs.computed(decode, 0.010)

    def predicted() -> float:
        rates = costs.snapshot()["computing"]
        return rates["step_seconds"] + 8 * rates["token_seconds"] + 1000 * rates["pair_seconds"]

    assert predicted() == pytest.approx(0.010, rel=0.05)
    known = costs.snapshot()
    for _ in range(DECODE_STEPS_OF_A_SAMPLE - 1):
        costs.computed(decode, 0.100)
    assert costs.snapshot() == known
    for _ in range(5 * DECODE_STEPS_OF_A_SAMPLE):
        costs.computed(decode, 0.100)
    assert predicted() == pytest.approx(0.100, rel=0.2)
