"""A time that is linear in what was done, learned from samples: robust against single slow ones, quick to relearn.

``seconds = coefficients @ features``, each coefficient at least 0. The fit is of relative errors, weighs a sample less
the further it lies from the fit (iteratively reweighted least squares), and leans on the coefficients known before only
where the samples leave a direction open, such as the share of latency in copies that all have one size. Samples are
kept by size, a few of each, so that the many small ones do not displace the few large ones. When several samples in a
row deviate in one direction the rates themselves have changed: older samples are forgotten.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import combinations

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
LEAST_SHARE = 1e-2
"""Share of its prior from which a coefficient that was 0 begins again."""
HALF_LIFE = 64
"""Samples after which a sample counts half."""
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
        self._coefficients = self._prior.copy()
        self._num_skipped = num_skipped
        self._num_samples = 0
        self._samples: dict[int, deque[tuple[int, tuple[float, ...], float]]] = {}
        self._run: list[float] = []
        """Logarithms of time over prediction of the last samples that all lie far off on one side."""
        self._spread = LEAST_SPREAD
        """The usual deviation of a sample, as a logarithm."""
        self._is_fitted = True
        self._scale_is_known = False

    @property
    def is_measured(self) -> bool:
        """Whether there are enough samples to believe."""
        return self._num_samples >= SAMPLES_TO_BELIEVE

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds for one of each feature, as learned so far."""
        self._fit()
        return tuple(self._coefficients.tolist())

    def seconds(self, features: Seconds) -> Seconds:
        """Return the predicted seconds for features along the last axis."""
        self._fit()
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
            self._coefficients = self._prior.copy()
            self._scale_is_known = True
        self._watch(features, seconds)
        size = round(math.log(max(features[-1], 1.0), 4))
        self._samples.setdefault(size, deque(maxlen=SAMPLES_OF_A_SIZE)).append((self._num_samples, features, seconds))
        self._num_samples += 1
        self._is_fitted = False
        evidence = sum(min(abs(off), MOST_EVIDENCE) for off in self._run)
        if len(self._run) >= CHANGE_SAMPLES and evidence >= CHANGE_EVIDENCE:
            self._begin_anew()

    def _watch(self, features: tuple[float, ...], seconds: float) -> None:
        """Extend or end the run of samples that lie far off on one side."""
        if not self.is_measured:
            return
        if self._num_samples % SAMPLES_OF_A_SIZE == 0:
            self._fit()
        predicted = sum(map(float.__mul__, self._coefficients.tolist(), features))
        off = math.log(seconds / max(predicted, LEAST_SECONDS))
        is_far_off = abs(off) >= max(math.log(CHANGE_FACTOR), 2 * self._spread)
        if not is_far_off or (self._run and off * self._run[0] < 0):
            self._run.clear()
        if is_far_off:
            self._run.append(off)

    def _begin_anew(self) -> None:
        """Forget the samples before the run that are of the run's sizes; scale the others, which now count little."""
        change = math.exp(float(np.median(self._run)))
        self._prior, self._coefficients = self._prior * change, self._coefficients * change
        first = self._num_samples - len(self._run)
        for size, samples in self._samples.items():
            kept = [sample for sample in samples if sample[0] >= first]
            older = [(at - 2 * HALF_LIFE, features, seconds * change) for at, features, seconds in samples]
            self._samples[size] = deque(kept or older, maxlen=SAMPLES_OF_A_SIZE)
        self._run.clear()

    def _fit(self) -> None:
        if self._is_fitted:
            return
        self._is_fitted = True
        samples = [sample for of_size in self._samples.values() for sample in of_size]
        features = np.array([sample[1] for sample in samples])
        seconds = np.array([sample[2] for sample in samples])
        ages = self._num_samples - np.array([sample[0] for sample in samples], np.float64)
        by_age = 0.5 ** (ages / HALF_LIFE)
        weights, divisors = by_age, seconds
        for _ in range(4):
            known = np.maximum(self._coefficients, LEAST_SHARE * self._prior)
            self._coefficients = _fitted(features, seconds, weights / divisors**2, known)
            divisors = np.maximum(features @ self._coefficients, LEAST_SECONDS)
            off = np.log(seconds / divisors)
            self._spread = max(LEAST_SPREAD, 1.5 * float(np.median(np.abs(off))))
            weights = by_age / (1 + (off / (2 * self._spread)) ** 2) ** 2


class CopyTimes:
    """The time of copies of one tier in one direction, ``latency + bytes / rate``, and the bytes that are moving.

    A sample is a span in which the tier was busy without a pause, so copies side by side are counted together.
    """

    def __init__(self) -> None:
        self._rates = Rates(prior=(1e-3, 1e-9), num_skipped=1)
        self._moving: dict[object, int] = {}
        self._span_began_at = 0.0
        self._span_bytes = 0
        self._span_copies = 0
        self._has_failed = False
        self.num_measured = 0

    @property
    def is_measured(self) -> bool:
        """Whether there is a believable time."""
        return self._rates.is_measured

    @property
    def moving_bytes(self) -> int:
        """Bytes of the copies that have begun and not ended."""
        return sum(self._moving.values())

    def begin(self, copy_id: object, num_bytes: int, now: float) -> None:
        """Note the begin of a copy."""
        if not self._moving:
            self._begin_span(now)
        self._moving[copy_id] = num_bytes

    def end(self, copy_id: object, now: float, *, has_landed: bool = True) -> None:
        """Note the end of a copy; an unknown one is ignored. A span with a copy that failed measures nothing."""
        if (num_bytes := self._moving.pop(copy_id, None)) is None:
            return
        self._span_bytes += num_bytes
        self._span_copies += 1
        self._has_failed |= not has_landed
        if self._moving and self._span_copies < COPIES_OF_A_SPAN:
            return
        if self._span_bytes and not self._has_failed:
            self._rates.record((1.0, float(self._span_bytes)), now - self._span_began_at)
            self.num_measured += 1
        self._begin_span(now)

    def seconds(self, num_bytes: Integers, num_bytes_ahead: int = 0) -> Seconds:
        """Return the predicted seconds for so many more bytes behind those that move and wait; 0 for none."""
        is_any = num_bytes > 0
        behind = np.where(is_any, num_bytes + self.moving_bytes + num_bytes_ahead, 0)
        return self._rates.seconds(np.stack([is_any, behind], axis=-1).astype(np.float64))

    def snapshot(self) -> dict[str, float]:
        """Return the latency in seconds and the bytes per second."""
        latency, per_byte = self._rates.coefficients
        return {"latency_seconds": latency, "bytes_per_second": 1 / max(per_byte, 1e-15)}

    def _begin_span(self, now: float) -> None:
        self._span_began_at, self._span_bytes, self._span_copies, self._has_failed = now, 0, 0, False


def _fitted(features: Seconds, seconds: Seconds, weights: Seconds, prior: Seconds) -> Seconds:
    """Return the coefficients, none below 0, with the least weighted squares of the errors."""
    scaled = features * prior
    weighted = scaled.T * weights
    products = weighted @ scaled + PRIOR_WEIGHT * np.eye(len(prior))
    target = weighted @ seconds + PRIOR_WEIGHT
    shares = np.linalg.solve(products, target)
    if (shares < 0).any():
        shares = _with_none_below_zero(products, target)
    return shares * prior


def _with_none_below_zero(products: Seconds, target: Seconds) -> Seconds:
    """Solve the same with some shares at 0: try every set of others, for there are few."""
    best, least = np.zeros(len(target)), 0.0
    for size in range(1, len(target)):
        for chosen in combinations(range(len(target)), size):
            shares = np.zeros(len(target))
            shares[list(chosen)] = np.linalg.solve(products[np.ix_(chosen, chosen)], target[list(chosen)])
            squares = float(shares @ products @ shares - 2 * target @ shares)
            if (shares >= 0).all() and squares < least:
                best, least = shares, squares
    return best
