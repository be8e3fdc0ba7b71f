"""Whether a request loads its prefix, waits for a lower tier, or computes: decided by measured rates.

Three times are learned while the engine runs, each by :class:`~kvferry.tiers.rates.Rates`:

* **Computing.** A step takes ``fixed + per_token * tokens + per_pair * pairs``: a token attends to all tokens before
  it, so its time grows with the context. Decodes of the same step are tokens too, each with its context.
* **Copying.** A tier's copies take ``latency + bytes / rate``, behind the bytes that are on their way already.
* **Waiting.** A request that loads is scheduled one step later at the earliest. While other requests run the load ends
  with a step of theirs; while nothing runs it costs an overhead of its own, measured too.

An offer is a list of prefixes that the tiers hold. Each is an option (load it, compute the rest), and so is computing
everything; the quickest is chosen. Before the times of an option are known the whole offer is loaded. An option that
has long not been chosen is tried again now and then, so that a slow time is unlearned: these tries may together cost
``REFRESH_SHARE`` of the time of the best options. What is in a tier whose copies keep failing is no option, but for one
offer in ``STALE_AFTER``: its failures measure nothing, so it might stay unmeasured. No thread, no clock: time is an
input.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from kvferry.arrays import Integers
from kvferry.tiers.rates import CopyTimes, Rates, Seconds

REFRESH_SHARE = 0.02
"""The predicted cost of tries, as a share of the predicted time of what would have been chosen."""
STALE_AFTER = 16
"""Decisions without a new measurement after which an option is worth a try."""
LEAST_PREFILL_TOKENS = 16
"""Tokens of a step that measures computing; smaller ones tell the fixed time of a step only."""
DECODE_STEPS_OF_A_SAMPLE = 8
"""Steps that only decode, of which one is a sample. In an engine a sample costs 30 us, and 1 to 3 ms where the rates
are fitted anew, more than in a loop: the step has displaced all that it needs from the processor's caches."""
LEAST_PREFILL_SHARE = 1 / 8
"""Share of what the engine's own cache lacks of a prompt that is computed to measure computing anew."""


class Choice(StrEnum):
    """What a request does."""

    LOAD = "load"
    """Load from host memory; compute the rest, if there is one."""
    WAIT = "wait"
    """Wait until lower tiers have brought the blocks to host memory, then load."""
    COMPUTE = "compute"


class Because(StrEnum):
    """Why a choice was made."""

    QUICKEST = "quickest"
    UNMEASURED = "unmeasured"
    """Computing, loading or one of the tiers has no believable time yet; then the whole offer is loaded."""
    REFRESH = "refresh"
    """A slower option, to measure it again."""


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens that a step computes, and pairs of a token and a token that it attends to, itself included.

    >>> Work.of(num_before=2, num_after=4), Work.of(0, 4) - Work.of(0, 2)
    (Work(num_tokens=2, num_pairs=7), Work(num_tokens=2, num_pairs=7))
    """

    num_tokens: int = 0
    num_pairs: int = 0

    @classmethod
    def of(cls, num_before: int, num_after: int) -> "Work":
        """Return the work of computing one request's tokens ``num_before`` to ``num_after``."""
        return cls(num_after - num_before, (num_after * (num_after + 1) - num_before * (num_before + 1)) // 2)

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_tokens + other.num_tokens, self.num_pairs + other.num_pairs)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.num_tokens - other.num_tokens, self.num_pairs - other.num_pairs)


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """Prefixes of a request that the tiers hold, each longer than the one before.

    The request has ``num_tokens``, of which the engine's own cache holds the first ``num_local``. Prefix ``i`` ends
    at token ``ends[i]``; to load it ``num_bytes[i]`` go from host memory to the engine, after ``lower_bytes[tier][i]``
    have come to host memory from each lower tier.
    """

    num_tokens: int
    num_local: int
    ends: Integers
    num_bytes: Integers
    lower_bytes: Mapping[str, Integers] = field(default_factory=dict)
    queued_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each lower tier brings first, of copies that have not begun."""

    def before(self, number: int) -> "Offer":
        """Return the offer of the first ``number`` prefixes only."""
        lower = {name: amounts[:number] for name, amounts in self.lower_bytes.items()}
        return replace(self, ends=self.ends[:number], num_bytes=self.num_bytes[:number], lower_bytes=lower)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request does, and the numbers that say why.

    ``num_tokens`` are loaded behind the local ones; 0 for ``COMPUTE``. ``load_seconds`` and ``compute_seconds`` are
    predictions of the time until the request's first token for the best way of loading and for computing everything;
    None before the rates are measured. ``wait_seconds``: how long waiting for lower tiers is worth it, which is the
    computing that the load saves; None where that is not known.
    """

    choice: Choice
    because: Because
    num_tokens: int
    load_seconds: float | None = None
    compute_seconds: float | None = None
    wait_seconds: float | None = None

    def __str__(self) -> str:
        """Say it in a line of a log."""
        numbers = (_milliseconds(self.load_seconds), _milliseconds(self.compute_seconds))
        return f"{self.choice} {self.num_tokens} tokens ({self.because}: loading {numbers[0]}, computing {numbers[1]})"


class Costs:
    """The measured times of an engine and of its tiers, and the decisions made by them.

    ``max_step_tokens`` bounds the tokens of one engine step: a longer prompt is computed in several.

    >>> costs = Costs(max_step_tokens=8192)
    >>> offer = Offer(1000, 0, ends=np.array([512, 992]), num_bytes=np.array([5_120_000, 9_920_000]))
    >>> print(costs.decide(offer))
    load 992 tokens (unmeasured: loading unknown, computing unknown)
    >>> for at in range(6):
    ...     costs.computed(Work.of(0, 100 * at), 0.004 + 0.0005 * 100 * at)
    ...     costs.loads.begin(at, at << 20, now=float(at))
    ...     costs.loads.end(at, now=at + 0.001 + (at << 20) / 1e9)
    >>> decision = costs.decide(offer)
    >>> decision.choice, decision.because, decision.num_tokens
    (<Choice.LOAD: 'load'>, <Because.QUICKEST: 'quickest'>, 992)
    """

    def __init__(self, max_step_tokens: int, promotions: Mapping[str, CopyTimes] | None = None) -> None:
        self._max_step_tokens = max_step_tokens
        self._steps = Rates(prior=(5e-3, 5e-5, 1e-9), num_skipped=2)
        self._overhead = Rates(prior=(2e-3,))
        self.loads = CopyTimes()
        """Copies from host memory to the engine."""
        self.promotions = dict(promotions or {})
        """Copies from each lower tier to host memory."""
        self._num_prefills = self._num_decode_steps = 0
        self._measured_at: dict[str, tuple[int, int]] = {}
        """Of each way: the number of its measurements, and the decision before which the last one came."""
        self._num_decisions = 0
        self._num_passed_over: Counter[str] = Counter()
        """Offers, so far, of tiers whose copies keep failing."""
        self._refresh_seconds = 0.0

    def computed(self, work: Work, seconds: float) -> None:
        """Learn from one engine step. Steps without tokens say nothing, and of steps that only decode one in
        :data:`DECODE_STEPS_OF_A_SAMPLE` says enough: they come hundreds of times a second and differ little.
        """
        if not work.num_tokens:
            return
        if work.num_tokens >= LEAST_PREFILL_TOKENS:
            self._num_prefills += 1
        elif self._steps.is_measured:
            self._num_decode_steps += 1
            if self._num_decode_steps % DECODE_STEPS_OF_A_SAMPLE:
                return
        self._steps.record((1.0, float(work.num_tokens), float(work.num_pairs)), seconds)

    def waited(self, seconds: float) -> None:
        """Learn what a load has cost beyond its copy, in an engine that had nothing else to do."""
        self._overhead.record((1.0,), seconds)

    def decide(self, offer: Offer, running: Work = Work()) -> Decision:
        """Return what a request shall do; an empty offer is computed.

        ``running`` is the work of a step for the requests that run now: a load ends with such a step.
        """
        self._num_decisions += 1
        offer = self._without_failing(offer)
        if not len(offer.ends):
            return Decision(Choice.COMPUTE, Because.QUICKEST, 0)
        ends = _behind(offer.num_local, offer.ends)
        num_bytes = _behind(0, offer.num_bytes)
        lower = {name: _behind(0, amounts) for name, amounts in offer.lower_bytes.items() if amounts.any()}
        computing = self._computing_seconds(ends, offer.num_tokens) if self._steps.is_measured else None
        ways = [self.loads, *(self.promotions[name] for name in lower)]
        if computing is None or not all(way.is_measured for way in ways):
            chosen, because, seconds = len(ends) - 1, Because.UNMEASURED, None
        else:
            seconds = computing + self._loading_seconds(num_bytes, lower, offer.queued_bytes, running)
            best = int(np.argmin(seconds))
            chosen = self._refreshed(best, seconds, offer.num_tokens - ends, num_bytes, lower)
            because = Because.QUICKEST if chosen == best else Because.REFRESH
        return Decision(
            choice=_choice(chosen, lower),
            because=because,
            num_tokens=int(ends[chosen]) - offer.num_local,
            load_seconds=None if seconds is None else float(seconds[1:].min()),
            compute_seconds=None if computing is None else float(computing[0]),
            wait_seconds=None if computing is None else float(computing[0] - computing[chosen]),
        )

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return the rates learned so far."""
        fixed, per_token, per_pair = self._steps.coefficients
        return {
            "computing": {"step_seconds": fixed, "token_seconds": per_token, "pair_seconds": per_pair},
            "waiting": {"overhead_seconds": self._overhead.coefficients[0]},
            "loads": self.loads.snapshot(),
            **{name: times.snapshot() for name, times in self.promotions.items()},
        }

    def _without_failing(self, offer: Offer) -> Offer:
        """Return the prefixes that need no tier whose copies keep failing, unless it is time to try that tier."""
        for name, amounts in offer.lower_bytes.items():
            if self.promotions[name].keeps_failing and amounts.any():
                self._num_passed_over[name] += 1
                if self._num_passed_over[name] % STALE_AFTER:
                    offer = offer.before(int(np.argmax(amounts > 0)))
        return offer

    def _computing_seconds(self, ends: Integers, num_tokens: int) -> Seconds:
        """Return the seconds to compute what lies behind each end: at least one token, for the first new one."""
        per_step, per_token, per_pair = self._steps.coefficients
        tokens = num_tokens - np.minimum(ends, num_tokens - 1)
        # A token of these attends to all tokens up to itself: on average to those before the middle of them.
        of_token = per_token + per_pair * (num_tokens - (tokens - 1) / 2)
        seconds: Seconds = per_step * -(-tokens // self._max_step_tokens) + of_token * tokens
        return seconds

    def _loading_seconds(
        self, num_bytes: Integers, lower: Mapping[str, Integers], queued: Mapping[str, int], running: Work
    ) -> Seconds:
        """Return the seconds until each option's blocks are loaded: promoted side by side, then copied."""
        seconds = self.loads.seconds(num_bytes) + self._overhead.coefficients[0] * (num_bytes > 0)
        if lower:
            brought = [self.promotions[name].seconds(each, queued.get(name, 0)) for name, each in lower.items()]
            seconds = seconds + np.max(brought, axis=0)
        if running.num_tokens:
            per_step, per_token, per_pair = self._steps.coefficients
            step = per_step + per_token * running.num_tokens + per_pair * running.num_pairs
            seconds = np.ceil(seconds / step) * step
        return seconds

    def _refreshed(
        self, best: int, seconds: Seconds, rest: Integers, num_bytes: Integers, lower: Mapping[str, Integers]
    ) -> int:
        """Return an option that measures anew what has long not been measured, if the budget allows; else the best.

        To measure a copy it is the longest load that the budget allows; to measure computing the cheapest option that
        computes a good share of the prompt: a wrong prediction then costs little.
        """
        self._refresh_seconds += REFRESH_SHARE * float(seconds[best])
        stale_copies = [num_bytes] if self._is_stale("loading", self.loads.num_measured) else []
        for name, amounts in lower.items():
            if self._is_stale(name, self.promotions[name].num_measured):
                stale_copies.append(amounts)
        is_computing_stale = self._is_stale("computing", self._num_prefills)
        if not (stale_copies or is_computing_stale):
            return best
        extra = seconds - seconds[best]
        copies, computes = np.zeros((2, len(seconds)), np.bool_)
        for amounts in stale_copies:
            copies |= amounts > 0
        if is_computing_stale:
            computes = rest >= max(LEAST_PREFILL_TOKENS, LEAST_PREFILL_SHARE * rest[0])
        if copies[best] or computes[best]:
            return best
        is_affordable = extra <= self._refresh_seconds
        if (copies & is_affordable).any():
            chosen = int(np.flatnonzero(copies & is_affordable)[-1])
        elif (computes & is_affordable).any():
            chosen = int(np.argmin(np.where(computes, extra, np.inf)))
        else:
            return best
        self._refresh_seconds -= float(extra[chosen])
        return chosen

    def _is_stale(self, way: str, num_measured: int) -> bool:
        """Return whether the last measurement of a way came many decisions ago."""
        known, since = self._measured_at.get(way, (-1, 0))
        if num_measured != known:
            self._measured_at[way] = (num_measured, self._num_decisions)
            return False
        return self._num_decisions - since >= STALE_AFTER


def _behind(first: int, others: Integers) -> Integers:
    found = np.empty(len(others) + 1, np.int64)
    found[0], found[1:] = first, others
    return found


def _choice(chosen: int, lower: Mapping[str, Integers]) -> Choice:
    if not chosen:
        return Choice.COMPUTE
    return Choice.WAIT if any(amounts[chosen] for amounts in lower.values()) else Choice.LOAD


def _milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.1f} ms"
