"""Threads beside the caller's own, for copies that one core cannot make as fast as the memory allows."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

MAX_THREADS = 4
"""The caller's included. Copies are bound by memory: more cores only take from those that compute."""

Result = TypeVar("Result")


class CopyThreads:
    """Runs calls that let the interpreter go side by side: the last on the caller's thread, which waits for all.

    The threads start when first needed, with the cores and the scheduling priority of the thread that needs them.

    >>> threads = CopyThreads()
    >>> threads.run([lambda: "one", lambda: "two"])
    ['one', 'two']
    >>> threads.close()
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    @property
    def num_usable(self) -> int:
        """How many calls are worth making at once: one per core of the calling thread, up to ``MAX_THREADS``."""
        return min(MAX_THREADS, len(os.sched_getaffinity(0)))

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return what the calls returned, in their order, or raise what one raised, once all have ended."""
        *beside, own = calls
        futures: list[Future[Result]] = []
        try:
            futures.extend(self.start(call) for call in beside)
            result = own()
        finally:
            # Whoever is told of an error may use the memory again: nothing is copied into it any more.
            wait(futures)
        return [*(future.result() for future in futures), result]

    def start(self, call: Callable[[], Result]) -> Future[Result]:
        """Return at once; the call runs beside the caller."""
        return self._started_pool().submit(call)

    def close(self) -> None:
        """End the threads once all that was started has ended; twice is fine."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _started_pool(self) -> ThreadPoolExecutor:
        if self._pool is None:
            scheduling = os.sched_getscheduler(0), os.sched_getparam(0)
            self._pool = ThreadPoolExecutor(MAX_THREADS - 1, "kvferry-copy", _schedule, scheduling)
        return self._pool


def _schedule(policy: int, parameters: os.sched_param) -> None:
    """Take on the scheduling of the thread that started this one, which real-time threads do not hand down."""
    if os.sched_getscheduler(0) != policy:
        os.sched_setscheduler(0, policy, parameters)
