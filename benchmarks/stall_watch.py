"""Finds the moments in which the machine itself stood still, as a virtual machine does whose host runs others.

A guest often cannot see that its host took the processors away: no steal time is reported, and the time counts as run
time of the process that happened to run. A thread per core, above all ordinary threads, therefore sleeps
``PERIOD_SECONDS`` at a time and records each sleep that ends late.
"""

import os
import threading
import time
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import Self

PERIOD_SECONDS = 0.002
LATE_SECONDS = 0.0005
PRIORITY = 50
MAX_STALLS = 100_000


class StallWatch:
    """Records stalls of each core while the context is open.

    The threads need the right to set a real-time priority (root, or ``CAP_SYS_NICE``); without, ``is_exact`` is False
    and load on the machine counts as a stall too.
    """

    def __init__(self) -> None:
        self.is_exact = True
        self._stalls: dict[int, deque[tuple[float, float]]] = {}
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        for core in sorted(os.sched_getaffinity(0)):
            self._stalls[core] = deque(maxlen=MAX_STALLS)
            self._threads.append(threading.Thread(target=self._watch, args=(core,), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def stalled_seconds(self, start: float, end: float) -> float:
        """Return the seconds between two moments (of the monotonic clock) in which the most stalled core stood still.

        >>> watch = StallWatch()
        >>> watch._stalls = {0: deque([(1.0, 1.5), (2.0, 2.25)]), 1: deque()}
        >>> watch.stalled_seconds(1.25, 3.0)
        0.5
        """
        return max(
            (
                sum(max(0.0, min(end, stall[1]) - max(start, stall[0])) for stall in tuple(stalls))
                for stalls in self._stalls.values()
            ),
            default=0.0,
        )

    def _watch(self, core: int) -> None:
        thread_id = threading.get_native_id()
        os.sched_setaffinity(thread_id, {core})
        try:
            os.sched_setscheduler(thread_id, os.SCHED_FIFO, os.sched_param(PRIORITY))
        except PermissionError:
            self.is_exact = False
        stalls = self._stalls[core]
        while not self._ended.is_set():
            due = time.monotonic() + PERIOD_SECONDS
            with suppress(InterruptedError):
                time.sleep(PERIOD_SECONDS)
            now = time.monotonic()
            if now - due > LATE_SECONDS:
                stalls.append((due, now))
