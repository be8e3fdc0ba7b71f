"""The transfer thread, which runs jobs beside the engine's step and off its compute cores."""

import ctypes
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

from kvferry.errors import HandoffError, KVFerryError, Reason, SettingsError
from kvferry.execution.device import HOST, DeviceOrder
from kvferry.peer_log import PeerLog
from kvferry.transport.protocol import own_identity

logger = PeerLog(logging.getLogger(__name__))

WAIT_SECONDS = 0.00002
"""Shortest time between two looks at jobs that make no progress."""
WAIT_SHARE = 1 / 8
MAX_MOVING_WAIT_SECONDS = 0.0005
"""Longest time between two looks at running transfers."""
MAX_WAIT_SECONDS = 0.01
"""Longest time between two looks at jobs that wait for no transfer, but for a handshake, for example."""
SWITCH_SECONDS = 0.0005
"""How long a thread that computes in Python may keep the interpreter from the threads that wait for it. A load passes
through four such threads, and with Python's 5 ms each of them waits for so long beside a step."""
_PR_SET_TIMERSLACK = 29
IDLE_SECONDS = 0.005
"""How long an engine has computed nothing before its compute cores copy, too: steps follow each other."""
QUIET_SECONDS = 10.0
"""How long the transfers of a job that was given up may take to end before the job is reported."""
MAX_REPORTS = 4096
"""Results that wait for :meth:`Executor.collect` at which those that are for the log alone are left out: peers cause
them, and an engine that does nothing collects none."""
Item = TypeVar("Item")
Change = tuple[str, KVFerryError | None]
"""A job's id, and the error with which the job is given up; None where its blocks are quarantined."""


class Phase(Enum):
    """What a job waits for."""

    PREPARING = "for a handshake, a connection or a prompt, not for a transfer"
    MOVING = "for its transfers"
    STOPPING = "for the end of its transfers, since the job was given up"
    DONE = "for nothing"


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: ``error`` is None for a commit. Times are seconds.

    ``num_bytes`` are the committed bytes; a failed job has none, even where bytes have landed. ``num_compared_bytes``
    are those whose digests were compared, in ``compare_seconds``. ``num_descriptors`` counts what the transports got
    for the cache.
    """

    job_id: str
    error: KVFerryError | None
    num_bytes: int = 0
    num_compared_bytes: int = 0
    num_descriptors: int = 0
    num_sources: int = 0
    transport: str = ""
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    compare_seconds: float = 0.0
    finished_at: float = 0.0
    """On the monotonic clock."""
    phases: Mapping[str, float] | None = None
    """Seconds of each phase of a committed load, by the phase's name; None of other jobs."""
    events: Mapping[str, Any] | None = None
    """Events of a write or a load, ready for JSON; None unless the settings ask for them."""


class Job(Protocol):
    """A write, an awaited load or a local copy."""

    job_id: str
    """No two jobs at a time have the same."""
    fills_blocks: bool
    """Whether the job fills blocks of this engine, which must be kept until its transfers have ended."""
    is_for_log: bool
    """Whether the job's result is for the log alone: peers cause such jobs, and nobody waits for their end."""
    can_wait: bool
    """Whether other jobs go first: no request waits for this one."""
    phase: Phase
    error: KVFerryError | None
    """Why the job was given up."""
    given_up_at: float | None

    def advance(self, now: float) -> bool:
        """Make bounded progress; return whether there was any."""

    def is_ending(self, now: float) -> bool:
        """Return whether the job goes first: it is past its deadline or being stopped, or holds up no other."""

    def cancel(self, error: KVFerryError) -> None:
        """Give the job up; it is done once its transfers have ended."""

    def result(self, finished_at: float) -> JobResult:
        """Return how the job ended."""


def clock() -> dict[str, float | str]:
    """Return the time of day and the monotonic time of one moment, so that logs of two hosts can be compared.

    Processes whose ``boot`` is equal share the monotonic clock.

    >>> sorted(clock())
    ['boot', 'monotonic', 'wall']
    """
    return {"wall": time.time(), "monotonic": time.monotonic(), "boot": _boot()}


@cache
def _boot() -> str:
    """Return the id of this boot of the host, with the time namespace, which may shift the monotonic clock."""
    boot_id = own_identity().boot_id
    try:
        return f"{boot_id}/{os.stat('/proc/self/ns/time').st_ino}"
    except FileNotFoundError:  # a kernel without time namespaces
        return boot_id


class Inbox(Generic[Item]):
    """Items of any thread for one other, which may wait for the first.

    ``queue.SimpleQueue.get`` may wait forever: where its timeout is over when it looks again, CPython 3.11 asks for a
    lock with the negative rest of the time, which stands for no timeout.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._has_some = threading.Event()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Add an item, and end the wait for one."""
        self._items.append(item)
        self._has_some.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether an item has come since :meth:`take`, after at most so many seconds."""
        return self._has_some.wait(seconds)

    def take(self) -> list[Item]:
        """Return the items that have come, in their order."""
        self._has_some.clear()
        return [self._items.popleft() for _ in range(len(self._items))]


class Executor:
    """Advances jobs in the order of their arrival until each is done; those that can wait come last.

    The engine's thread submits and collects; neither call blocks. Only the executor's thread uses the transports of
    the jobs. Whenever the set of jobs changes that were given up :data:`QUIET_SECONDS` ago and whose transfers have not
    ended, the thread calls ``report_still_writing`` with their ids. The thread may run on ``cores`` (none: on
    those of its parent), and on ``compute_cores`` while transfers move and the engine computes nothing
    (:meth:`computing`). Raises :class:`SettingsError` (invalid-setting) where the thread cannot run on ``cores``.

    All threads of the process switch within :data:`SWITCH_SECONDS` from now on.
    """

    def __init__(
        self,
        cores: Iterable[int] = (),
        order: DeviceOrder = HOST,
        report_still_writing: Callable[[frozenset[str]], None] = lambda _: None,
        compute_cores: Iterable[int] = (),
    ) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._order = order
        self._cores = set(cores)
        self._all_cores = self._cores | set(compute_cores)
        self._used_cores = self._cores
        self._num_computing = 0
        self._idle_at = 0.0
        # Jobs and changes share one queue, so that a cancellation never overtakes its job.
        self._orders: Inbox[Job | Change | None] = Inbox()
        self._results: Inbox[JobResult] = Inbox()
        self._active: list[Job] = []
        self._still_writing: set[str] = set()
        self._quarantined: set[str] = set()
        self._report_still_writing = report_still_writing
        self._moved_at = 0.0
        self._stop = threading.Event()
        self._give_up_at = 0.0
        self._thread = threading.Thread(target=self._run, name="kvferry-executor", daemon=True)
        self._started: Future[None] = Future()
        self._thread.start()
        try:
            self._started.result()
        except (OSError, ValueError, OverflowError) as error:
            raise SettingsError(
                Reason.INVALID_SETTING,
                f"the transfer thread cannot run on cores {sorted(self._cores)}: {error}.",
                "Start an engine's ranks and their parent with cores of one set (taskset, cpuset).",
            ) from error

    def submit(self, job: Job) -> None:
        """Queue a job; :meth:`collect` returns its result, exactly once; at most once where it is for the log."""
        self._orders.put(job)

    def cancel(self, job_id: str, error: KVFerryError) -> None:
        """Give a job up; :meth:`collect` returns ``error`` once its transfers have ended."""
        self._orders.put((job_id, error))

    def quarantine(self, job_id: str) -> None:
        """Let :meth:`collect` return a reported job at once: the engine keeps its blocks until its transfers end."""
        self._orders.put((job_id, None))

    def wake(self) -> None:
        """Advance the jobs at once: an event has come that a job may wait for."""
        self._orders.put(None)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The engine computes within this context, on its compute cores. Contexts may be nested, on one thread."""
        self._num_computing += 1
        try:
            yield
        finally:
            self._idle_at = time.monotonic() + IDLE_SECONDS
            self._num_computing -= 1

    def collect(self, wait_seconds: float = 0.0) -> list[JobResult]:
        """Return the results since the last call; where there is none, wait at most ``wait_seconds`` for the first."""
        if wait_seconds:
            self._results.wait(wait_seconds)
        return self._results.take()

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Give up the jobs in progress, wait until their transfers have ended, and stop. Twice is fine.

        Returns after at most ``timeout_seconds`` whether the thread and every transfer have ended, so that no byte
        moves any more; then :meth:`collect` returns the results of these jobs.
        """
        self._give_up_at = time.monotonic() + timeout_seconds
        self._stop.set()
        self._orders.put(None)
        self._thread.join(timeout_seconds)
        # The thread ends at the limit, too, whatever is still under way.
        return not self._thread.is_alive() and not self._active

    def _run(self) -> None:
        try:
            if self._cores:
                # A thread of a vLLM CPU worker inherits the one core that computes.
                os.sched_setaffinity(0, self._cores)
            # Else Linux ends each of this thread's waits up to 50 us late.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1))
            self._order.enter_thread()
        except Exception as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception:
                # No job may end the thread that carries all others.
                logger.exception("kvferry: a turn of the transfer thread failed")
                time.sleep(MAX_WAIT_SECONDS)
        self._give_up()

    def _turn(self) -> None:
        if not self._active:
            self._orders.wait()
            self._moved_at = time.monotonic()
        for order in self._orders.take():
            self._take(order)
        self._choose_cores()
        if self._active and not self._advance():
            self._wait()
        else:
            self._moved_at = time.monotonic()

    def _choose_cores(self) -> None:
        """Take the compute cores to copy, and only where they are idle; a job that waits needs none."""
        if self._all_cores == self._cores:
            return
        is_idle = not self._num_computing and time.monotonic() >= self._idle_at
        cores = self._all_cores if is_idle and self._is_moving() else self._cores
        if cores != self._used_cores:
            self._used_cores = cores
            with suppress(OSError):  # a container's set of cores may have changed since the start
                os.sched_setaffinity(0, cores)

    def _is_moving(self) -> bool:
        return any(job.phase is not Phase.PREPARING and job.job_id not in self._still_writing for job in self._active)

    def _wait(self) -> None:
        """Sleep ever longer, but for less long where transfers run, or until an order comes."""
        seconds = seconds_until_next_look(time.monotonic() - self._moved_at, is_moving=self._is_moving())
        if self._orders.wait(seconds):
            self._moved_at = time.monotonic()

    def _take(self, order: Job | Change | None) -> None:
        if order is None:
            return
        if not isinstance(order, tuple):
            self._active.append(order)
            return
        job_id, error = order
        for job in self._active:
            if job.job_id == job_id and error is not None:
                job.cancel(error)
            elif job.job_id == job_id and job_id in self._still_writing - self._quarantined:
                self._quarantined.add(job_id)
                self._results.put(_result(job))

    def _give_up(self) -> None:
        for order in self._orders.take():
            self._take(order)
        for job in self._active:
            job.cancel(HandoffError(Reason.CLOSED, f"job {job.job_id} was given up: the executor stops."))
        while self._active:
            # Also beyond the limit: a job may have held this thread until its bytes were moved.
            if not self._advance():
                if time.monotonic() >= self._give_up_at:
                    return
                time.sleep(MAX_MOVING_WAIT_SECONDS)

    def _advance(self) -> bool:
        """Advance the first job that makes progress, so that early jobs finish early, and before it those that end.

        Jobs that are ending or over go first, those that can wait last.
        """
        now, has_moved = time.monotonic(), False

        def order(job: Job) -> tuple[bool, bool]:
            return job.phase is not Phase.DONE and not job.is_ending(now), job.can_wait

        for job in sorted(self._active, key=order):
            moved = job.phase is Phase.DONE or self._advance_one(job)
            self._report_if_late(job, now)
            if job.phase is Phase.DONE:
                self._active.remove(job)
                if job.job_id in self._quarantined:
                    self._quarantined.remove(job.job_id)
                elif not job.is_for_log or len(self._results) < MAX_REPORTS:
                    self._results.put(_result(job))
            if moved and job.phase is not Phase.DONE:
                return True
            has_moved |= moved
        return has_moved

    def _report_if_late(self, job: Job, now: float) -> None:
        """Report a job whose transfers do not end: once when it is late, and once when they have ended.

        A source that does not answer may still write: bytes that land after the blocks went to another request would
        corrupt its cache.
        """
        seconds = 0.0 if job.given_up_at is None else now - job.given_up_at
        if job.phase is Phase.DONE and job.job_id in self._still_writing:
            self._still_writing.remove(job.job_id)
            self._report(job)
            told = "kvferry: the transfers of %s ended %.0f s after the job was given up."
            logger.warning(told, job.job_id, seconds, peer=job.job_id)
        elif job.phase is Phase.STOPPING and seconds > QUIET_SECONDS and job.job_id not in self._still_writing:
            self._still_writing.add(job.job_id)
            self._report(job)
            logger.warning(
                "kvferry: %s was given up %.0f s ago (%s), but its transfers cannot be revoked and have not ended: its "
                "blocks are kept until they end. Check whether the other engine's process is stopped; ending that "
                "process ends the transfers.",
                job.job_id,
                seconds,
                job.error,
                peer=job.job_id,
            )

    def _report(self, changed: Job) -> None:
        if changed.fills_blocks:
            names = {job.job_id for job in self._active if job.fills_blocks}
            self._report_still_writing(frozenset(self._still_writing & names))

    def _advance_one(self, job: Job) -> bool:
        was_stopping = job.phase is Phase.STOPPING
        try:
            return job.advance(time.monotonic())
        except Exception as error:
            if not was_stopping:
                logger.exception("kvferry: job %s failed unexpectedly", job.job_id)
            job.cancel(_unexpected(error))
            # A job that cannot even be stopped must not keep the others waiting.
            return not was_stopping


def seconds_until_next_look(still_seconds: float, *, is_moving: bool) -> float:
    """Return how long to wait where nothing has moved for ``still_seconds``, and transfers run or not.

    A share of that time: an end is noticed at most this share late, and a long wait costs few looks.

    >>> [round(1e6 * seconds_until_next_look(still, is_moving=True)) for still in (0, 400e-6, 1)]
    [20, 50, 500]
    """
    longest = MAX_MOVING_WAIT_SECONDS if is_moving else MAX_WAIT_SECONDS
    return min(max(WAIT_SHARE * still_seconds, WAIT_SECONDS), longest)


@cache
def cores_that_compute() -> frozenset[int]:
    """Return the cores to which OpenMP has bound this process: on a CPU those on which a vLLM worker computes.

    With libgomp or libiomp preloaded OpenMP binds each of its threads, which its first work starts, to one of them.
    The first call counts: a transfer thread, which is bound to other cores, starts later.
    """
    found = {frozenset(os.sched_getaffinity(0))}
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            found.add(frozenset(os.sched_getaffinity(int(thread))))
    return frozenset().union(*(found - {_parents_cores()} or found))


def cores_that_do_not_compute() -> frozenset[int]:
    """Return the cores on which a worker copies: its parent's without the worker's own; where none is left, the latter.

    vLLM binds a worker on a CPU to the cores on which it computes, but not the parent, which started the worker.
    """
    computing = cores_that_compute()
    return (_parents_cores() - computing) or computing


def _parents_cores() -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(os.getppid()))
    except OSError:
        return frozenset()


def _result(job: Job) -> JobResult:
    """Return the job's result; a job that cannot give one has failed, since the engine waits for a result."""
    try:
        return job.result(time.monotonic())
    except Exception as error:
        logger.exception("kvferry: job %s gave no result", job.job_id)
        return JobResult(job.job_id, _unexpected(error))


def _unexpected(error: Exception) -> HandoffError:
    message = f"the job failed unexpectedly: {type(error).__name__}: {error}."
    return HandoffError(Reason.TRANSFER_FAILED, message, "Please report it with the traceback in the log.")
