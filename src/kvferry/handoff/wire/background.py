"""What takes long and may fail, such as a handshake, on threads of its own: started once, fetched without blocking."""

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from kvferry.errors import HandoffError, KVFerryError, Reason

logger = logging.getLogger(__name__)

MAX_RUNNING = 64
"""Threads of one kind at a time. Whoever comes when so many run waits for one of them to end."""
FAILURE_SECONDS = 2.0
"""So long a failure meets all that come; then one tries again."""
UNCLAIMED_SECONDS = 30.0
"""So long what nobody has come for is kept."""

Key = TypeVar("Key", bound=Hashable)
Found = TypeVar("Found")


class BackgroundCall(Generic[Found]):
    """One call on a thread of its own, whose result is fetched without blocking. ``wake`` is called when it ends."""

    def __init__(self, name: str, find: Callable[[], Found], wake: Callable[[], None] = lambda: None) -> None:
        self._found: Found | None = None
        self._error: KVFerryError | None = None
        self._started_at = time.monotonic()
        self._ended_at: float | None = None
        self._find = find
        self._wake = wake
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{name}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the result is still awaited."""
        return self._ended_at is None

    def has_run(self, seconds: float) -> bool:
        """Return whether the result has been awaited for longer than this."""
        return self._ended_at is None and time.monotonic() - self._started_at > seconds

    def is_forgotten(self, now: float) -> bool:
        """Return whether it ended so long ago that whoever comes now begins anew."""
        kept = UNCLAIMED_SECONDS if self._error is None else FAILURE_SECONDS
        return self._ended_at is not None and now - self._ended_at > kept

    def is_older(self, seconds: float) -> bool:
        """Return whether it ended longer ago than this."""
        return self._ended_at is not None and time.monotonic() - self._ended_at > seconds

    def fail(self, error: KVFerryError) -> None:
        """Remember why it came to nothing, as what was found may turn out to be of no use."""
        if self._error is None:
            self._error, self._ended_at = error.without_traceback(), time.monotonic()

    def result(self) -> Found:
        """Return what was found or raise why not; it must have ended."""
        if self._error is not None:
            raise self._error.without_traceback()
        if self._found is None:
            raise HandoffError(
                Reason.PEER_UNREACHABLE, f"the {self._name} ended without a result.", "Send the request again."
            )
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._find()
        except KVFerryError as error:
            self._error = error.without_traceback()
        except Exception as error:
            logger.exception("kvferry: a %s failed unexpectedly", self._name)
            self._error = unforeseen(self._name, error)
        self._ended_at = time.monotonic()
        self._wake()


class BackgroundCalls(Generic[Key, Found]):
    """Calls beside by what they are for: one for each key, and at most :data:`MAX_RUNNING` at a time.

    >>> lookups = BackgroundCalls[str, int]("lookup")
    >>> while (found := lookups.get("a", lambda: 7)) is None:
    ...     time.sleep(0.001)
    >>> found.result(), len(lookups)
    (7, 1)
    """

    def __init__(self, name: str, wake: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._wake = wake
        self._known: dict[Key, BackgroundCall[Found]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Key, find: Callable[[], Found]) -> BackgroundCall[Found] | None:
        """Return the call for this key once it has ended; before that None, and it is started where there is none."""
        now = time.monotonic()
        known = self._known.get(key)
        if known is None or known.is_forgotten(now):
            self._known = {key: each for key, each in self._known.items() if not each.is_forgotten(now)}
            if sum(each.is_running for each in self._known.values()) >= MAX_RUNNING:
                return None
            known = self._known[key] = BackgroundCall(self._name, find, self._wake)
        return None if known.is_running else known

    def has_run(self, key: Key, seconds: float) -> bool:
        """Return whether the call for this key has been under way for longer than this."""
        known = self._known.get(key)
        return known is not None and known.has_run(seconds)

    def forget(self, key: Key) -> None:
        """Begin anew for whoever comes next."""
        self._known.pop(key, None)


def unforeseen(what: str, error: Exception) -> HandoffError:
    """Return how something ended that nobody foresaw to fail."""
    return HandoffError(
        Reason.PEER_UNREACHABLE,
        f"the {what} failed: {type(error).__name__}: {error}.",
        "The log has the whole of it; please report it.",
    )
