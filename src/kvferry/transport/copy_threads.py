"""Copies on several threads, where one core does not reach the memory's bandwidth."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

MAX_THREADS = 4
"""The calling thread included. Copies are bound by memory: more cores only take time from computation."""

Result = TypeVar("Result")


class CopyThreads:
    """Runs calls that release the interpreter in parallel: the last on the calling thread, which waits for all.

    The threads start on first use, with the cores and the scheduling priority of the calling thread.

    >>> threads = CopyThreads()
    >>> threads.run([lambda: "one", lambda: "two"])
    ['one', 'two']
    >>> threads.close()
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    @property
    def num_usable(self) -> int:
        """The number of calls worth running in parallel: one per core of the calling thread, up to ``MAX_THREADS``."""
        return min(MAX_THREADS, len(os.sched_getaffinity(0)))

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Wait for all calls; return their results in order, or raise the error of one."""
        *others, last = calls
        futures: list[Future[Result]] = []
        try:
            futures.extend(self.start(call) for call in others)
            result = last()
        finally:
            # The caller may reuse the memory as soon as this method raises.
            wait(futures)
        return [*(future.result() for future in futures), result]

    def start(self, call: Callable[[], Result]) -> Future[Result]:
        """Start a call on another thread."""
        return self._started_pool().submit(call)

    def close(self) -> None:
        """Wait for all started calls and end the threads; twice is fine."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _started_pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            scheduling = os.sched_getscheduler(0), os.sched_getparam(0)
            self._pool = ThreadPoolExecutor(MAX_THREADS - 1, "kvferry-copy", _schedule, scheduling)
        return self._pool


def _schedule(policy: int, parameters: os.sched_param) -> None:
    """Set the scheduling of the calling thread: a real-time thread's children do not inherit it."""
    if os.sched_getscheduler(0) != policy:
        os.sched_setscheduler(0, policy, parameters)
