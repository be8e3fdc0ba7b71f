"""A time that is linear in what was done, learned from samples: robust against single slow ones, quick to relearn.

``seconds = coefficients @ features``, each coefficient at least 0. The fit is of relative errors, weighs a sample less
the further it lies from the fit (iteratively reweighted least squares), and leans on the coefficients known before only
where the samples leave a direction open, such as the share of latency in copies that all have one size. Samples are
kept by size, a few of each, so that the many small ones do not displace the few large ones. When several samples in a
row deviate in one direction the rates themselves have changed: older samples are forgotten.

A fit costs as much as many predictions. So it is made where a sample comes, each time at first and then seldom, and
never where a prediction is asked for: a request waits for that.
"""

import math
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import product
from operator import mul

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Integers

Seconds = npt.NDArray[np.float64]

SAMPLES_TO_BELIEVE = 3
"""Fewer say nothing: one of two samples may be the slow one."""
SAMPLES_OF_A_SIZE = 8
"""Kept samples whose last feature lies within a factor of 4."""
CHANGE_FACTOR = 1.25
"""A sample further off than this, and than twice the usual spread, is evidence that the rates have changed."""
CHANGE_SAMPLES = 3
"""Fewer samples in a row are no change, however far they are off."""
CHANGE_EVIDENCE = 5 * math.log(CHANGE_FACTOR)
"""Sum over a run; one sample counts ``MOST_EVIDENCE`` at most."""
MOST_EVIDENCE = 0.5
PRIOR_WEIGHT = 1e-2
"""Weight of the earlier coefficients; a sample's is 1."""
LEAST_WEIGHT = 1e-9
"""Of every coefficient, as a share of what the samples say of it: far more than numbers are rounded to."""
LEAST_SHARE = 1e-2
"""Share of its prior from which a coefficient that was 0 begins again."""
HALF_LIFE = 64
"""Samples after which a sample counts half."""
MOST_BETWEEN_FITS = 16
"""Samples from one fit to the next; a quarter of the samples since the rates changed where that is fewer."""
FIT_PASSES = 4
COPIES_OF_A_SPAN = 8
"""A tier that is never idle is measured anew after so many copies."""
LEAST_SPREAD = 0.05
LEAST_SECONDS = 1e-7


class Rates:
    """Coefficients learned from samples, beginning with ``prior``: one positive coefficient for each feature.

    The first ``num_skipped`` samples are warm-up and not used.

    >>> copies = Rates(prior=(1e-3, 1e-9))
    >>> for num_bytes in (1e6, 4e6, 64e6):
    ...     copies.record((1.0, num_bytes), 0.002 + num_bytes / 2e9)
    >>> copies.record((1.0, 4e6), 3.0)  # one slow copy
    >>> bool(0.009 < copies.seconds(np.array([1.0, 16e6])) < 0.011)
    True
    """

    def __init__(self, prior: Sequence[float], num_skipped: int = 0) -> None:
        self._prior = np.array(prior, np.float64)
        self._set_coefficients(self._prior)
        self._num_skipped = num_skipped
        self._num_samples = 0
        self._samples: dict[int, deque[tuple[int, tuple[float, ...], float]]] = {}
        self._run: list[float] = []
        """Logarithms of time over prediction of the last samples that all lie far off on one side."""
        self._spread = LEAST_SPREAD
        """The usual deviation of a sample, as a logarithm."""
        self._anew_at = self._fit_at = 0
        """The number of samples when the rates changed last, and when they are fitted next."""
        self._scale_is_known = False

    @property
    def is_measured(self) -> bool:
        """Whether there are enough samples to believe."""
        return self._num_samples >= SAMPLES_TO_BELIEVE

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds for one of each feature, as learned so far."""
        return self._as_numbers

    def seconds(self, features: Seconds) -> Seconds:
        """Return the predicted seconds for features along the last axis."""
        predicted: Seconds = features @ self._coefficients
        return predicted

    def record(self, features: tuple[float, ...], seconds: float) -> None:
        """Learn from one sample: what was done, and how long it took."""
        if self._num_skipped:
            self._num_skipped -= 1
            return
        seconds = max(seconds, LEAST_SECONDS)
        if not self._scale_is_known:
            self._prior *= seconds / max(float(self._prior @ features), LEAST_SECONDS)
            self._set_coefficients(self._prior)
            self._scale_is_known = True
        self._watch(features, seconds)
        size = round(math.log(max(features[-1], 1.0), 4))
        self._samples.setdefault(size, deque(maxlen=SAMPLES_OF_A_SIZE)).append((self._num_samples, features, seconds))
        self._num_samples += 1
        if (
            len(self._run) >= CHANGE_SAMPLES
            and sum(min(abs(off), MOST_EVIDENCE) for off in self._run) >= CHANGE_EVIDENCE
        ):
            self._begin_anew()
            self._anew_at = self._fit_at = self._num_samples
        if self._num_samples >= self._fit_at:
            self._fit()
            since = self._num_samples - self._anew_at
            self._fit_at = self._num_samples + max(1, min(since // 4, MOST_BETWEEN_FITS))

    def _watch(self, features: tuple[float, ...], seconds: float) -> None:
        """Extend or end the run of samples that lie far off on one side."""
        if not self.is_measured:
            return
        predicted = sum(map(mul, self._as_numbers, features))
        off = math.log(seconds / max(predicted, LEAST_SECONDS))
        is_far_off = abs(off) >= max(math.log(CHANGE_FACTOR), 2 * self._spread)
        if not is_far_off or (self._run and off * self._run[0] < 0):
            self._run.clear()
        if is_far_off:
            self._run.append(off)

    def _begin_anew(self) -> None:
        """Forget the samples before the run that are of the run's sizes; scale the others, which now count little."""
        change = math.exp(float(np.median(self._run)))
        self._prior = self._prior * change
        self._set_coefficients(self._coefficients * change)
        first = self._num_samples - len(self._run)
        for size, samples in self._samples.items():
            kept = [sample for sample in samples if sample[0] >= first]
            older = [(at - 2 * HALF_LIFE, features, seconds * change) for at, features, seconds in samples]
            self._samples[size] = deque(kept or older, maxlen=SAMPLES_OF_A_SIZE)
        self._run.clear()

    def _set_coefficients(self, coefficients: Seconds) -> None:
        self._coefficients = coefficients
        self._as_numbers: tuple[float, ...] = tuple(coefficients.tolist())

    def _fit(self) -> None:
        samples = [sample for of_size in self._samples.values() for sample in of_size]
        numbers, done, took = zip(*samples, strict=True)
        features, seconds = np.array(done), np.array(took)
        by_age = 0.5 ** ((self._num_samples - np.array(numbers, np.float64)) / HALF_LIFE)
        weights, divisors, coefficients = by_age, seconds, self._coefficients
        for _ in range(FIT_PASSES):
            known = np.maximum(coefficients, LEAST_SHARE * self._prior)
            coefficients = _fitted(features, seconds, weights / divisors**2, known)
            divisors = np.maximum(features @ coefficients, LEAST_SECONDS)
            off = np.log(seconds / divisors)
            self._spread = max(LEAST_SPREAD, 1.5 * float(np.sort(np.abs(off))[len(off) // 2]))
            weights = by_age / (1 + (off / (2 * self._spread)) ** 2) ** 2
        self._set_coefficients(coefficients)


class CopyTimes:
    """The time of copies of one tier in one direction, ``latency + bytes / rate``, and the bytes that are moving.

    A sample is a span in which the tier was busy, as far as was known, without a pause, so copies side by side are
    counted together. A pause that becomes known later is no part of the time.
    """

    def __init__(self) -> None:
        self._rates = Rates(prior=(1e-3, 1e-9), num_skipped=1)
        self._moving: dict[object, tuple[int, float]] = {}
        """Bytes, and when the copy began."""
        self._span_began_at = 0.0
        self._span_bytes = 0
        self._ended: list[tuple[float, float]] = []
        """When the copies of the span began and ended."""
        self._has_failed = False
        self._num_failed = 0
        """Copies in a row of which nothing has landed."""
        self.num_measured = 0

    @property
    def is_measured(self) -> bool:
        """Whether there is a believable time."""
        return self._rates.is_measured

    @property
    def keeps_failing(self) -> bool:
        """Whether the last copies all have brought nothing, so that the next one will hardly do."""
        return self._num_failed >= SAMPLES_TO_BELIEVE

    @property
    def moving_bytes(self) -> int:
        """Bytes of the copies that have begun and not ended."""
        return sum(num_bytes for num_bytes, _ in self._moving.values())

    def begin(self, copy_id: object, num_bytes: int, now: float) -> None:
        """Note the begin of a copy."""
        if not self._moving:
            self._begin_span(now)
        elif len(self._ended) >= COPIES_OF_A_SPAN:
            self._end_span()
        self._moving[copy_id] = num_bytes, now

    def end(self, copy_id: object, now: float, *, share_landed: float = 1.0) -> None:
        """Note the end of a copy, of which a share may have failed; an unknown one is ignored.

        A span with a copy of which not all has landed measures nothing.

        Ends may become known late, after other begins, and in any order: no span ends between them.
        """
        if (moved := self._moving.pop(copy_id, None)) is None:
            return
        num_bytes, began_at = moved
        self._span_bytes += num_bytes
        self._ended.append((began_at, now))
        self._has_failed |= share_landed < 1
        self._num_failed = 0 if share_landed else self._num_failed + 1
        if not self._moving:
            self._end_span()

    def seconds(self, num_bytes: Integers, num_bytes_ahead: int = 0) -> Seconds:
        """Return the predicted seconds for so many more bytes behind those that move and wait; 0 for none."""
        latency, per_byte = self._rates.coefficients
        behind = num_bytes.astype(np.float64) + (self.moving_bytes + num_bytes_ahead)
        seconds: Seconds = (latency + behind * per_byte) * (num_bytes > 0)
        return seconds

    def snapshot(self) -> dict[str, float]:
        """Return the latency in seconds and the bytes per second."""
        latency, per_byte = self._rates.coefficients
        return {"latency_seconds": latency, "bytes_per_second": 1 / max(per_byte, 1e-15)}

    def _end_span(self) -> None:
        """Learn from the time in which copies of the span moved; the next span begins where the last of them ended."""
        seconds, until, num_waits = 0.0, self._span_began_at, 0
        for began_at, ended_at in sorted(self._ended):
            num_waits += began_at >= until  # nothing moved then, so the latency is not hidden by other copies
            seconds += max(0.0, ended_at - max(began_at, until))
            until = max(until, ended_at)
        if self._span_bytes and seconds > 0 and not self._has_failed:
            self._rates.record((float(max(1, num_waits)), float(self._span_bytes)), seconds)
            self.num_measured += 1
        self._begin_span(until)

    def _begin_span(self, now: float) -> None:
        self._span_began_at, self._span_bytes, self._ended, self._has_failed = now, 0, [], False


def _fitted(features: Seconds, seconds: Seconds, weights: Seconds, prior: Seconds) -> Seconds:
    """Return the coefficients, none below 0, with the least weighted squares of the errors."""
    scaled = features * prior
    weighted = scaled.T * weights
    identity = _identity(len(prior))
    products = weighted @ scaled + PRIOR_WEIGHT * identity
    target = weighted @ seconds + PRIOR_WEIGHT
    # Times that are many orders of magnitude apart drown the prior: brought to one size, the equations can be solved.
    sizes = np.sqrt(products.diagonal())
    products = products / np.outer(sizes, sizes) + LEAST_WEIGHT * identity
    target = target / sizes
    shares = np.linalg.solve(products, target)
    if shares.min() < 0:
        shares = _with_none_below_zero(products, target)
    coefficients: Seconds = shares / sizes * prior
    return coefficients


def _with_none_below_zero(products: Seconds, target: Seconds) -> Seconds:
    """Solve the same with some shares at 0: try every set of others, for there are few, and all in one call."""
    chosen, pairs, others = _sets_of(len(target))
    shares = np.linalg.solve(products * pairs + others, (target * chosen)[..., np.newaxis])[..., 0]
    # Where the others are 0, the squares are least at these shares: their target times them, less than without any.
    gain = np.where((shares >= 0).all(axis=1), shares @ target, -np.inf)
    best: Seconds = shares[gain.argmax()]
    return best


@cache
def _identity(size: int) -> Seconds:
    return np.eye(size)


@cache
def _sets_of(number: int) -> tuple[Seconds, Seconds, Seconds]:
    """Return every set of some of so many shares as flags, the flags of its pairs, and a 1 for each other share."""
    chosen = np.array([flags for flags in product((0.0, 1.0), repeat=number) if any(flags)])
    return chosen, chosen[:, :, np.newaxis] * chosen[:, np.newaxis], (1 - chosen)[:, np.newaxis] * _identity(number)
