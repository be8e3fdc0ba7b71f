"""How long a step that computes nothing waits for what moves. See docs/decisions/idle-steps.md."""

FIRST_SECONDS, LONGEST_SECONDS = 0.008, 0.032


class IdleSteps:
    """vLLM begins the next step at once while a request waits for its cache, and its processes take the cores on which
    the bytes are copied, and for a push the prompt computed. So such a step waits: each twice as long as the last.

    A request that comes meanwhile waits as long, once.

    >>> steps = IdleSteps()
    >>> [steps.wait(computes=False) for _ in range(4)], steps.wait(computes=True), steps.wait(computes=False)
    ([0.008, 0.016, 0.032, 0.032], 0.0, 0.008)
    """

    def __init__(self) -> None:
        self._next = FIRST_SECONDS

    def wait(self, *, computes: bool) -> float:
        """Return the seconds that this step waits at most."""
        if computes:
            self.begin_anew()
            return 0.0
        seconds, self._next = self._next, min(2 * self._next, LONGEST_SECONDS)
        return seconds

    def begin_anew(self) -> None:
        """Something has come: what comes next may come soon."""
        self._next = FIRST_SECONDS
