"""What lower tiers with threads have in common: the threads, and the copies that are open.

The threads move bytes and decide nothing: a task keeps what came of it for the tier.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Protocol, TypeVar

from kvferry.errors import Reason, TierError
from kvferry.layout.shard import Region
from kvferry.tiers.protocol import (
    BlockKey,
    Capabilities,
    Load,
    Slots,
    Store,
    TierCopy,
    check_completes,
    check_slots,
    closed_error,
)

CANCELLED = TierError(Reason.ABORTED, "the copy was cancelled.")
AnyCopy = TypeVar("AnyCopy", bound=TierCopy)
AnyLoad = TypeVar("AnyLoad", bound=Load)
AnyStore = TypeVar("AnyStore", bound=Store)


class Task(Protocol):
    """Something that a thread does for a tier, and that the tier then finds among what is done."""

    def perform(self) -> None:
        """Do it; may take as long as the device does."""

    def fail(self, error: Exception) -> None:
        """Note what ``perform`` raised."""


class Workers:
    """Threads that perform tasks in order; ``done`` gets each task that was performed.

    Urgent tasks go before others, but on the first thread, where they go last. With ``idle`` the first thread also
    calls that function; it returns the seconds until its next turn.
    """

    def __init__(
        self, name: str, done: deque[Task], *, num_threads: int = 1, idle: Callable[[], float] | None = None
    ) -> None:
        self._done, self._idle = done, idle
        self._urgent: deque[Task] = deque()
        self._others: deque[Task] = deque()
        self._work = threading.Condition()
        self._is_closing = False
        self._busy: list[tuple[float, object] | None] = [None] * num_threads
        """What each thread does, and since when."""
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tasks: Sequence[Task], *, is_urgent: bool = False) -> None:
        """Queue tasks."""
        with self._work:
            (self._urgent if is_urgent else self._others).extend(tasks)
            self._work.notify(len(tasks))

    def revoke(self, tasks: Collection[Task]) -> list[Task]:
        """Take tasks out of the queues; return those that no thread has begun and none will perform."""
        with self._work:
            revoked = []
            for queue in (self._urgent, self._others):
                found = [task for task in queue if task in tasks]
                for task in found:
                    queue.remove(task)
                revoked += found
            return revoked

    def stalled(self, seconds: float) -> list[object]:
        """Return what threads have been busy with for longer than ``seconds``."""
        before = time.monotonic() - seconds
        return [entry[1] for entry in tuple(self._busy) if entry is not None and entry[0] < before]

    def hangs(self, seconds: float) -> bool:
        """Return whether all threads have been busy with one task each for longer than ``seconds``."""
        return len(self.stalled(seconds)) == len(self._threads)

    @property
    def num_waiting(self) -> int:
        """The number of tasks that are queued or being performed."""
        with self._work:
            return len(self._urgent) + len(self._others) + sum(entry is not None for entry in self._busy)

    def close(self, *, drops_queued: bool = False) -> None:
        """Let the threads finish what is queued, or only what they have begun, and end."""
        with self._work:
            self._is_closing = True
            if drops_queued:
                self._urgent.clear()
                self._others.clear()
            self._work.notify_all()

    def join(self, deadline: float) -> bool:
        """Wait until the threads have ended; return whether they have at ``deadline``, a time of ``monotonic``."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, index: int) -> None:
        idle = self._idle if index == 0 else None
        turn_at = None if idle is None else time.monotonic()
        while not self._is_closing or self._urgent or self._others:
            if idle is not None and turn_at is not None and time.monotonic() >= turn_at and not self._is_closing:
                self._busy[index] = (time.monotonic(), idle)
                turn_at = idle() + time.monotonic()
                self._busy[index] = None
            task = self._next(index, turn_at)
            if task is not None:
                try:
                    task.perform()
                except Exception as error:
                    task.fail(error)
                self._done.append(task)
                self._busy[index] = None

    def _next(self, index: int, turn_at: float | None) -> Task | None:
        """Wait for a task; None when it is the turn of ``idle``, or there will be none."""
        with self._work:
            seconds = None if turn_at is None else max(0.0, turn_at - time.monotonic())
            self._work.wait_for(lambda: self._urgent or self._others or self._is_closing, seconds)
            queues = (self._others, self._urgent) if index == 0 else (self._urgent, self._others)
            queue = next(filter(None, queues), None)
            if queue is None:
                return None
            task = queue.popleft()
            self._busy[index] = (time.monotonic(), task)
            return task


class ThreadedTier(Generic[AnyLoad, AnyStore]):
    """The open copies of a lower tier; a tier says in ``_give_up`` how a copy ends early."""

    def __init__(self, capabilities: Capabilities, region: Region) -> None:
        self.capabilities = capabilities
        self._region = region
        self._loads: set[AnyLoad] = set()
        self._stores: set[AnyStore] = set()
        self._ended: list[TierCopy] = []
        self._failures: Counter[Reason] = Counter()
        self._num_evicted = 0
        self._is_closed = False

    def cancel(self, copy: TierCopy) -> None:
        """Give a copy up; see the tier's docstring for when it ends."""
        self._check_open()
        if not copy.has_ended and (copy in self._loads or copy in self._stores):
            self._give_up(copy, CANCELLED)

    def _give_up(self, copy: Any, error: TierError) -> None:
        raise NotImplementedError

    def _end(self, copy: TierCopy, error: TierError | None = None) -> None:
        copy.end(error)
        self._ended.append(copy)

    def _taken_out(self, copy: TierCopy, open_copies: set[AnyCopy]) -> AnyCopy:
        """Return an ended copy, which is not open any more."""
        self._check_open()
        check_completes(copy, open_copies)
        open_copies.remove(copy)  # type: ignore[arg-type]
        self._failures.update(copy.failures)
        return copy  # type: ignore[return-value]

    def _take_ended(self) -> list[TierCopy]:
        ended, self._ended = self._ended, []
        return ended

    def _counts(self) -> dict[str, Any]:
        return {
            "num_loads": len(self._loads),
            "num_stores": len(self._stores),
            "num_evicted": self._num_evicted,
            "failures": {reason.value: count for reason, count in self._failures.items()},
        }

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error()

    def _check_slots(self, keys: Sequence[BlockKey], slots: Slots) -> list[int]:
        """Check the arguments of ``prepare_*`` and return the lengths of the slots."""
        self._check_open()
        check_slots(keys, slots, self._region)
        return [int(length) for length in slots.lengths]
