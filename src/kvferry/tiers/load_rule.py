"""The rule by which a request loads its prefix, waits for a lower tier first, or computes: what takes least.

A load takes what the tiers were measured to take for its bytes; computing takes what the engine's steps were measured
to take for their tokens. Each is a fixed time and a time for each byte or token. Whole times are measured, with all
that a request waits for. No thread, no clock: time is an input.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

SAMPLES_TO_BELIEVE, STALE_SAMPLES, KEPT_SAMPLES = 3, 6, 16
STALE_AFTER = 16
"""Decisions without a new sample after which a slower way may measure a time, and earlier samples count little."""
TRY_SHARE = 0.02
"""What such tries may cost, as a share of the time of the quickest ways."""
COPIES_OF_A_SAMPLE = 8


class Choice(StrEnum):
    """What a request does; ``WAIT`` is a load for which a lower tier must bring blocks to host memory first."""

    LOAD, WAIT, COMPUTE = "load", "wait", "compute"


class Because(StrEnum):
    """Why: the quickest; not all of the times are known; a slower way, to measure it anew."""

    QUICKEST, UNMEASURED, REFRESH = "quickest", "unmeasured", "refresh"


@dataclass(frozen=True, slots=True)
class Option:
    """A prefix of ``num_tokens`` that can be loaded: from host memory, once lower tiers have brought their bytes."""

    num_tokens: int
    num_bytes: int
    lower_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a request does: load so many tokens, 0 for ``COMPUTE``, and compute the rest. Seconds are expected ones of
    this and of computing everything, None while unknown; waiting is worth ``saved_seconds``, the computing it saves.
    """

    choice: Choice
    because: Because
    num_tokens: int = 0
    seconds: float | None = None
    compute_seconds: float | None = None
    saved_seconds: float | None = None


def quickest(seconds: Sequence[float | None]) -> int | None:
    """Return the way that takes least, computing (the first) before a load as long; None where a time is unknown.

    >>> quickest([0.5, 0.2, 0.3]), quickest([0.1, 0.1]), quickest([0.1, None])
    (1, 0, None)
    """
    known = [each for each in seconds if each is not None]
    return known.index(min(known)) if len(known) == len(seconds) else None


class RunningTime:
    """``fixed + each * amount`` by medians of the last samples (Theil and Sen): no few slow samples change it.

    >>> copies = RunningTime()
    >>> for num_bytes in (1e6, 4e6, 16e6, 64e6):
    ...     copies.record(num_bytes, 0.002 + num_bytes / 1e9)
    >>> copies.record(4e6, 3.0)
    >>> round(copies.seconds(8e6), 3)
    0.01
    """

    def __init__(self) -> None:
        self.num_decisions = 0
        """Decisions since the last sample."""
        self._samples: deque[tuple[float, float]] = deque(maxlen=KEPT_SAMPLES)
        self.fixed = self.each = 0.0

    def record(self, amount: float, seconds: float) -> None:
        """Learn from one sample."""
        while self.num_decisions >= STALE_AFTER and len(self._samples) >= STALE_SAMPLES:
            self._samples.popleft()
        self.num_decisions = 0
        self._samples.append((max(float(amount), 1.0), max(seconds, 0.0)))
        amounts, took = np.array(self._samples).T
        is_apart = amounts[:, np.newaxis] >= 2 * amounts
        self.fixed, self.each = 0.0, float(np.median(took / amounts))
        if is_apart.any():
            rises = np.subtract.outer(took, took)[is_apart] / np.subtract.outer(amounts, amounts)[is_apart]
            each = max(0.0, float(np.median(rises)))
            is_small = amounts <= np.median(amounts)  # where the fixed time shows
            fixed = float(np.median((took - each * amounts)[is_small]))
            if fixed >= 0:
                self.fixed, self.each = fixed, each

    @property
    def num_samples(self) -> int:
        """The samples that are kept."""
        return len(self._samples)

    def seconds(self, amount: float) -> float | None:
        """Return the expected seconds, 0 for nothing, None before there are samples to believe."""
        return self.fixed + self.each * amount if len(self._samples) >= SAMPLES_TO_BELIEVE else None


class CopyTimes(RunningTime):
    """Copies of one tier: bytes and seconds while it is busy, so that copies side by side are counted together."""

    def __init__(self) -> None:
        super().__init__()
        self._moving: dict[object, int] = {}
        self._ended: list[int] = []
        self._began_at = 0.0

    def begin(self, copy_id: object, num_bytes: int, now: float) -> None:
        """Note the begin of a copy."""
        if not self._moving:
            self._began_at, self._ended = now, []
        self._moving[copy_id] = num_bytes

    def end(self, copy_id: object, now: float, *, has_landed: bool = True) -> None:
        """Note the end of a copy; a failed one measures nothing, nor do those beside it. Unknown ones are ignored."""
        num_bytes = self._moving.pop(copy_id, None)
        if num_bytes is None:
            return
        self._ended.append(num_bytes if has_landed else 0)
        if not self._moving or len(self._ended) >= COPIES_OF_A_SAMPLE:
            if all(self._ended):
                self.record(sum(self._ended), now - self._began_at)
            self._began_at, self._ended = now, []


class StepTimes(RunningTime):
    """The engine's steps that compute prompts; a step begins when it is planned and the one before has ended."""

    MOST_AHEAD = 16

    def __init__(self) -> None:
        super().__init__()
        self._planned: deque[tuple[int, float]] = deque(maxlen=self.MOST_AHEAD)
        self._ended_at = float("-inf")

    def begin(self, num_prompt_tokens: int, now: float) -> None:
        """Note a planned step."""
        self._planned.append((num_prompt_tokens, now))

    def end(self, now: float) -> None:
        """Note the results of the oldest planned step."""
        if self._planned:
            num_tokens, planned_at = self._planned.popleft()
            if num_tokens:
                self.record(num_tokens, now - max(planned_at, self._ended_at))
            self._ended_at = now


class LoadRule:
    """The measured times of an engine that computes at most ``max_step_tokens`` in a step, and decisions by them."""

    def __init__(self, max_step_tokens: int) -> None:
        self.steps, self.loads = StepTimes(), CopyTimes()
        self._max_step_tokens, self._saved_for_tries = max_step_tokens, 0.0

    def decide(self, num_tokens: int, options: Sequence[Option], lower: Mapping[str, CopyTimes]) -> Decision:
        """Return what a request does of whose tokens its engine lacks so many; ``options`` are ever longer prefixes."""
        if not options:
            return Decision(Choice.COMPUTE, Because.QUICKEST)
        for times in (self.steps, self.loads, *lower.values()):
            times.num_decisions += 1
        ways = [Option(0, 0), *options]
        computing = [self._compute_seconds(max(1, num_tokens - way.num_tokens)) for way in ways]
        loading = [self._load_seconds(way, lower) for way in ways]
        seconds = [None if a is None or b is None else a + b for a, b in zip(computing, loading, strict=True)]
        best = quickest(seconds)
        # Only a load measures loads; where all of them are known, computing is left to measure.
        unmeasured = len(options) if None in loading else 0
        chosen = unmeasured if best is None else self._tried(best, seconds, ways, lower)
        because = Because.UNMEASURED if best is None else Because.QUICKEST if chosen == best else Because.REFRESH
        way, whole, rest = ways[chosen], computing[0], computing[chosen]
        choice = Choice.WAIT if way.lower_bytes else Choice.LOAD if chosen else Choice.COMPUTE
        saved = None if whole is None or rest is None else whole - rest
        return Decision(choice, because, way.num_tokens, seconds[chosen], whole, saved)

    def _compute_seconds(self, num_tokens: int) -> float | None:
        whole, rest = divmod(num_tokens, self._max_step_tokens)
        steps = [self.steps.seconds(rest)] if rest else []
        steps += [self.steps.seconds(self._max_step_tokens)] * whole
        return None if None in steps else sum(each for each in steps if each is not None)

    def _load_seconds(self, way: Option, lower: Mapping[str, CopyTimes]) -> float | None:
        if not way.num_tokens:
            return 0.0
        copied = self.loads.seconds(way.num_bytes)
        brought = [lower[name].seconds(num_bytes) for name, num_bytes in way.lower_bytes.items()]
        known = [each for each in brought if each is not None]
        return None if copied is None or len(known) < len(brought) else copied + max(known, default=0.0)

    def _tried(
        self, best: int, seconds: Sequence[float | None], ways: Sequence[Option], lower: Mapping[str, CopyTimes]
    ) -> int:
        """Return the best way, or another that measures a stale time, once enough is saved for what it costs more."""
        least = seconds[best] or 0.0
        self._saved_for_tries += TRY_SHARE * least
        known = {id(times) for times in self._measured_by(ways[best], lower)}
        costs = {
            number: (each or 0.0) - least
            for number, (way, each) in enumerate(zip(ways, seconds, strict=True))
            if any(x.num_decisions > STALE_AFTER and id(x) not in known for x in self._measured_by(way, lower))
        }
        tried = min(costs, key=costs.__getitem__, default=best)
        if costs.get(tried, 0.0) > self._saved_for_tries:
            return best
        self._saved_for_tries -= costs.get(tried, 0.0)
        return tried

    def _measured_by(self, way: Option, lower: Mapping[str, CopyTimes]) -> list[RunningTime]:
        return [self.loads, *(lower[name] for name in way.lower_bytes)] if way.num_tokens else [self.steps]
