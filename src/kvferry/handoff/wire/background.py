"""Calls that take long and may fail, such as handshakes, each on a thread; fetching a result never blocks."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvferry.errors import HandoffError, KVFerryError, Reason
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))

MAX_RUNNING = 64
"""Calls of one kind that have a slot; a further call waits for a slot, the oldest first."""
LATE_SECONDS = 15.0
"""A call that has run for so long has no slot any more: a look-up of a name cannot be stopped, and may hang."""
MAX_LATE = 192
"""Calls without a slot that run; a later one keeps its slot."""
WAIT_SECONDS = 15.0
"""How long a call waits for a slot; then it fails."""
MAX_WAITING = 4096
"""Calls of one kind that wait for a slot."""
FAILURE_SECONDS = 2.0
"""How long a failed call answers for its key; then the next request calls again."""
UNCLAIMED_SECONDS = 30.0
"""How long a result that nobody fetched is kept."""

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")


class BackgroundCall(Generic[Found]):
    """One call on a thread of its own, whose result is fetched without blocking. ``wake`` is called when it ends."""

    def __init__(self, name: str, call: Callable[[], Found], wake: Callable[[], None] = lambda: None) -> None:
        self._name, self._call, self._wake = name, call, wake
        self._result: Found | None = None
        self._error: KVFerryError | None = None
        self._asked_at = time.monotonic()
        self._started_at: float | None = None
        self._ended_at: float | None = None

    def start(self) -> None:
        """Start the call. Where the process can start no thread, the call fails."""
        self._started_at = time.monotonic()
        try:
            threading.Thread(target=self._run, name=f"kvferry-{self._name}", daemon=True).start()
        except RuntimeError as error:
            self.fail(unexpected_error(self._name, error))

    @property
    def is_running(self) -> bool:
        """Whether the call has not ended; it may wait for its start."""
        return self._ended_at is None

    @property
    def has_result(self) -> bool:
        return self._result is not None

    def takes_longer_than(self, seconds: float) -> bool:
        """Return whether the call has not ended and was asked for more than ``seconds`` ago."""
        return self._ended_at is None and time.monotonic() - self._asked_at > seconds

    def is_late(self, now: float) -> bool:
        return self._ended_at is None and self._started_at is not None and now - self._started_at > LATE_SECONDS

    def is_expired(self, now: float) -> bool:
        """Return whether the call ended so long ago that a request for its key calls again."""
        kept = UNCLAIMED_SECONDS if self._error is None else FAILURE_SECONDS
        return self._ended_at is not None and now - self._ended_at > kept

    def is_older_than(self, seconds: float) -> bool:
        return self._ended_at is not None and time.monotonic() - self._ended_at > seconds

    def fail(self, error: KVFerryError) -> None:
        """Replace the result by an error: the caller found the result to be of no use."""
        if self._error is None:
            self._error, self._ended_at = error.without_traceback(), time.monotonic()
            self._result = None

    def result(self) -> Found:
        """Return the result of the call, which must have ended, or raise its error."""
        if self._error is not None:
            raise self._error.without_traceback()
        if self._result is None:
            problem = f"the {self._name} ended without a result."
            raise HandoffError(Reason.PEER_UNREACHABLE, problem, "Send the request again.")
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._call()
        except KVFerryError as error:
            self._error = error.without_traceback()
        except Exception as error:
            logger.exception("kvferry: a %s failed unexpectedly", self._name)
            self._error = unexpected_error(self._name, error)
        self._ended_at = time.monotonic()
        self._wake()


def within(seconds: float, name: str, call: Callable[[], Found], remedy: str) -> Found:
    """Return what a call returns that waits for others, or may compute for hours, or raise what it raises.

    Raises :class:`HandoffError` (deadline-exceeded) where it takes longer; the call goes on then, on its own thread.
    """
    has_ended = threading.Event()
    running = BackgroundCall(name, call, has_ended.set)
    running.start()
    if running.is_running and not has_ended.wait(seconds):
        raise HandoffError(Reason.DEADLINE_EXCEEDED, f"the {name} has not ended within {seconds:g} s.", remedy)
    return running.result()


class BackgroundCalls(Generic[Key, Found]):
    """Background calls by key: one for each key. At most :data:`MAX_RUNNING` have a slot; the others wait in order.

    One thread may use it.

    >>> lookups = BackgroundCalls[str, int]("lookup")
    >>> while (found := lookups.get("a", lambda: 7)) is None:
    ...     time.sleep(0.001)
    >>> found.result(), len(lookups)
    (7, 1)
    """

    def __init__(self, name: str, wake: Callable[[], None] = lambda: None) -> None:
        self._name, self._wake = name, wake
        self._known: dict[Key, BackgroundCall[Found]] = {}
        self._waiting: deque[BackgroundCall[Found]] = deque()
        self._running: list[BackgroundCall[Found]] = []

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Key, call: Callable[[], Found]) -> BackgroundCall[Found] | None:
        """Return the call for this key once it has ended, else None; queue it where there is none."""
        now = time.monotonic()
        known = self._known.get(key)
        if known is None or known.is_expired(now):
            self._known = {key: each for key, each in self._known.items() if not each.is_expired(now)}
            if len(self._waiting) >= MAX_WAITING:
                # Of calls for which nobody asks any more, too: else their places would stay taken.
                self._start_waiting(now)
            if len(self._waiting) >= MAX_WAITING:
                return None
            known = self._known[key] = BackgroundCall(self._name, call, self._wake)
            self._waiting.append(known)
        if self._waiting:
            self._start_waiting(now)
        return None if known.is_running else known

    def with_results(self) -> list[BackgroundCall[Found]]:
        return [each for each in self._known.values() if each.has_result]

    def takes_longer_than(self, key: Key, seconds: float) -> bool:
        """Return whether the call for this key has not ended after ``seconds``, its wait for a slot included."""
        known = self._known.get(key)
        return known is not None and known.takes_longer_than(seconds)

    def forget(self, key: Key) -> None:
        """Forget the result: the next request for this key calls again."""
        self._known.pop(key, None)

    def _start_waiting(self, now: float) -> None:
        """Start as many calls as there are slots, and fail the calls that have waited too long."""
        # Not all calls: each that waits asks for itself, and there may be thousands.
        self._running = [each for each in self._running if each.is_running]
        num_late = sum(each.is_late(now) for each in self._running)
        num_free = MAX_RUNNING - (len(self._running) - min(num_late, MAX_LATE))
        while self._waiting and self._waiting[0].takes_longer_than(WAIT_SECONDS):
            self._waiting.popleft().fail(_no_slot(self._name))
        for _ in range(min(num_free, len(self._waiting))):
            self._running.append(self._waiting.popleft())
            self._running[-1].start()


def _no_slot(what: str) -> HandoffError:
    return HandoffError(
        Reason.DEADLINE_EXCEEDED,
        f"the {what} did not begin within {WAIT_SECONDS:g} s: {MAX_RUNNING} others have not ended.",
        "Check the hosts that this engine is told to ask: too many of them do not answer.",
    )


def unexpected_error(what: str, error: Exception) -> HandoffError:
    """Return the error for an exception that the code does not expect."""
    return HandoffError(
        Reason.PEER_UNREACHABLE,
        f"the {what} failed: {type(error).__name__}: {error}.",
        "Please report it with the traceback in the log.",
    )
