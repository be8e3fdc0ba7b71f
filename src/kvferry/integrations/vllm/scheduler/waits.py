"""How long an engine waits that computes nothing and waits for what no worker is told of.

That are copies of lower tiers, answers of peers, and holds that keep an engine which cannot sleep. vLLM steps without a
pause while a request waits: a thousand steps a second, on the cores that copy. An engine that has requests waits in its
steps (:class:`StepWaits`). An engine without requests sleeps until it is time to look again (:class:`Looks`): a request
that comes meanwhile wakes it. See docs/decisions/idle-steps.md.
"""

import threading
import time
from collections.abc import Callable, Hashable

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.008, 0.032


class IdleSteps:
    """The wait of each step that computes nothing, twice as long as the last one's: docs/decisions/idle-steps.md.

    While a request waits for its cache, vLLM starts step after step, and its processes take the cores on which bytes
    are copied and, in a concurrent flow on one host, prompts are computed. A request that comes during such a
    wait waits as long, once.

    >>> steps = IdleSteps()
    >>> [steps.wait(computes=False) for _ in range(4)], steps.wait(computes=True), steps.wait(computes=False)
    ([0.008, 0.016, 0.032, 0.032], 0.0, 0.008)
    """

    def __init__(self) -> None:
        self._next = FIRST_WAIT_SECONDS

    def wait(self, *, computes: bool) -> float:
        """Return the most seconds that this step waits."""
        if computes:
            self.reset()
            return 0.0
        seconds, self._next = self._next, min(2 * self._next, LONGEST_WAIT_SECONDS)
        return seconds

    def reset(self) -> None:
        """Start with the shortest wait again: a load has ended, and the next one may end soon."""
        self._next = FIRST_WAIT_SECONDS


SHARE = 1 / 8
"""Of the seconds since something changed last, or since the first of these steps: how much later a step sees it."""
LEAST_SECONDS, MOST_SECONDS = 0.001, 0.008
"""A request that comes while a step waits is delayed as long, once."""
LOOK_SHARE, LOOK_MOST_SECONDS = 1 / 4, 0.032
"""The same for an engine without requests: nobody waits for what it looks at."""


class StepWaits:
    """The wait of each step. ``progress`` is any value that changes when something has ended.

    >>> waits = StepWaits()
    >>> [waits.wait(progress=0, now=now) for now in (0.0, 0.01, 0.016, 0.2)]
    [0.001, 0.00125, 0.002, 0.008]
    >>> waits.wait(progress=1, now=0.21)
    0.001
    """

    def __init__(self, share: float = SHARE, most_seconds: float = MOST_SECONDS) -> None:
        self._share, self._most_seconds = share, most_seconds
        self._progress: Hashable = None
        self._since: float | None = None

    def wait(self, progress: Hashable, now: float) -> float:
        """Return the seconds for which this step shall wait."""
        if self._since is None or progress != self._progress:
            self._since, self._progress = now, progress
        return min(max(self._share * (now - self._since), LEAST_SECONDS), self._most_seconds)

    def reset(self) -> None:
        """Start anew: a step had something else to do."""
        self._since = None


class Looks:
    """The times at which an engine without requests looks at what it waits for. ``wake`` ends the engine's sleep.

    >>> looks = Looks(wake=lambda: None)
    >>> looks.are_due(now=7.0), looks.done(progress=0, now=7.0), looks.are_due(now=7.0), looks.are_due(now=7.001)
    (True, None, False, True)
    >>> looks.close()
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._waits = StepWaits(LOOK_SHARE, LOOK_MOST_SECONDS)
        self._alarm = Alarm(wake)
        self._next: float | None = None

    def are_due(self, now: float) -> bool:
        """Return whether to look now; else the engine is woken when it is time."""
        if self._next is None or now >= self._next:
            return True
        self._alarm.set(self._next - now)
        return False

    def done(self, progress: Hashable, now: float) -> None:
        """The engine has looked; the next look comes later."""
        self._next = now + self._waits.wait(progress, now)

    def reset(self) -> None:
        """Nothing is waited for: the next wait begins anew."""
        self._waits.reset()
        self._next = None

    def close(self) -> None:
        """Wake nobody any more; twice is fine."""
        self._alarm.close()


class Alarm:
    """Calls ``ring`` some time later, on a thread that starts with the first call of :meth:`set`."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._at: float | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def set(self, seconds: float) -> None:
        """Ring after so many seconds, or earlier where an earlier call says so."""
        at = time.monotonic() + seconds
        with self._changed:
            if self._is_closed or (self._at is not None and self._at <= at):
                return
            self._at = at
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvferry-alarm", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Ring no more; twice is fine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while self._wait():
            self._ring()

    def _wait(self) -> bool:
        """Return whether to ring; False once it is closed."""
        with self._changed:
            while not self._is_closed:
                seconds = None if self._at is None else self._at - time.monotonic()
                if seconds is not None and seconds <= 0:
                    self._at = None
                    return True
                self._changed.wait(seconds)
            return False
