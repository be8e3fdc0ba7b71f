"""How long an engine's steps wait in which nothing but the copies of lower tiers is under way.

vLLM steps without a pause while a request asks for blocks that a disk or a pool brings, or while new blocks are written
to them: a thousand steps a second on the cores that copy. Nobody wakes a worker when such a copy ends, so the wait is a
small share of the time that the copies take: a copy's end is seen that much later at most.
"""

from collections.abc import Hashable

SHARE = 1 / 8
"""Of the seconds since a copy ended last, or since the first of these steps."""
LEAST_SECONDS, MOST_SECONDS = 0.001, 0.008
"""A request that comes during a wait waits as long, once."""


class TierWaits:
    """The wait of each step. ``progress`` is any value that changes when a copy ends.

    >>> waits = TierWaits()
    >>> [waits.wait(progress=0, now=now) for now in (0.0, 0.01, 0.016, 0.2)]
    [0.001, 0.00125, 0.002, 0.008]
    >>> waits.wait(progress=1, now=0.21)
    0.001
    """

    def __init__(self) -> None:
        self._progress: Hashable = None
        self._since: float | None = None

    def wait(self, progress: Hashable, now: float) -> float:
        """Return the seconds for which this step shall wait."""
        if self._since is None or progress != self._progress:
            self._since, self._progress = now, progress
        return min(max(SHARE * (now - self._since), LEAST_SECONDS), MOST_SECONDS)

    def reset(self) -> None:
        """Start anew: a step had something else to do."""
        self._since = None
