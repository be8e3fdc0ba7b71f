"""Threads that perform tasks in order. What a task does is the task's: a queue only begins and revokes tasks."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Task(Protocol):
    """A call that may take long. ``perform`` raises nothing that the task does not keep for itself."""

    def perform(self) -> None:
        """Do the work, on a thread of a queue."""


class TaskQueue:
    """Tasks that wait, and the threads that perform them. ``done`` gets each task that was performed.

    With ``idle`` the first thread also calls that function; it returns the seconds until its next turn.
    """

    def __init__(
        self, name: str, done: deque[Task], *, num_threads: int = 1, idle: Callable[[], float] | None = None
    ) -> None:
        self._done, self._idle = done, idle
        self._queue: deque[Task] = deque()
        self._work = threading.Condition()
        self._is_closing = False
        self._busy_since: list[float | None] = [None] * num_threads
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        """The number of tasks that are queued or being performed."""
        with self._work:
            return len(self._queue) + sum(since is not None for since in self._busy_since)

    def busy_seconds(self) -> float:
        """Return how long the oldest call of a task has lasted."""
        now = time.monotonic()
        return max(now - (since or now) for since in tuple(self._busy_since))

    def submit(self, task: Task) -> None:
        """Queue a task."""
        with self._work:
            self._queue.append(task)
            self._work.notify()

    def revoke(self, task: Task) -> bool:
        """Take a task out of the queue; return whether no thread has begun the task, and none will."""
        with self._work:
            if task not in self._queue:
                return False
            self._queue.remove(task)
            return True

    def close(self) -> None:
        """Begin no other task."""
        with self._work:
            self._is_closing = True
            self._queue.clear()
            self._work.notify_all()

    def join(self, deadline: float) -> bool:
        """Wait until the threads have ended; return whether they have at ``deadline``, a time of ``monotonic``."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, index: int) -> None:
        idle = self._idle if index == 0 else None
        turn_at = time.monotonic() if idle is not None else None
        while not self._is_closing:
            if idle is not None and turn_at is not None and time.monotonic() >= turn_at:
                self._busy_since[index] = time.monotonic()
                turn_at = idle() + time.monotonic()
                self._busy_since[index] = None
            task = self._next(index, turn_at)
            if task is not None:
                task.perform()
                self._done.append(task)
                self._busy_since[index] = None

    def _next(self, index: int, turn_at: float | None) -> Task | None:
        """Wait for a task; None when it is the turn of ``idle``, or the queue closes."""
        with self._work:
            seconds = None if turn_at is None else max(0.0, turn_at - time.monotonic())
            self._work.wait_for(lambda: self._queue or self._is_closing, seconds)
            if self._is_closing or not self._queue:
                return None
            self._busy_since[index] = time.monotonic()
            return self._queue.popleft()
