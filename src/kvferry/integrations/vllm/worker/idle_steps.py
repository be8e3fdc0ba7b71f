"""How long an engine's steps wait that compute nothing."""

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
