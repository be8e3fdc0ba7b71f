"""The thread on which loads run, beside the engine's step and off its compute cores."""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress

from kvferry.errors import HandoffError, KVFerryError, Reason, SettingsError
from kvferry.execution.device import HOST, DeviceOrder
from kvferry.execution.guard_words import Scratch
from kvferry.execution.job import Job, JobResult, Phase

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.0005
MAX_WAIT_SECONDS = 0.01
"""Between two looks at loads that have waited for something else than a transfer, such as a handshake, for a while."""
QUIET_SECONDS = 10.0
"""So long a load that was given up may take to be quiet before the log tells of it."""
Change = tuple[str, KVFerryError | None]
"""The id of a load and why it is given up; None where it is set aside."""


class Executor:
    """Advances loads in the order of their arrival until each is done.

    The engine's thread submits and collects; neither call blocks. The transports of the loads are
    used by the executor's thread only. ``report_still_writing`` is called on that thread with the ids of all loads
    that were given up :data:`QUIET_SECONDS` ago and are not quiet, whenever these change. Raises :class:`SettingsError`
    (invalid-setting) when the thread cannot run on ``cores``.
    """

    def __init__(
        self,
        scratch: Scratch,
        cores: Iterable[int] = (),
        order: DeviceOrder = HOST,
        report_still_writing: Callable[[frozenset[str]], None] = lambda _: None,
    ) -> None:
        self._scratch = scratch
        self._order = order
        self._cores = set(cores)
        # Jobs and what changes them in one queue, so that a cancellation never overtakes its job.
        self._orders: queue.SimpleQueue[Job | Change | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._active: list[Job] = []
        self._still_writing: set[str] = set()
        self._quarantined: set[str] = set()
        self._report_still_writing = report_still_writing
        self._num_looks = 0
        self._stop = threading.Event()
        self._give_up_at = 0.0
        self._thread = threading.Thread(target=self._run, name="kvferry-executor", daemon=True)
        self._started: Future[None] = Future()
        self._thread.start()
        self._await_start()

    def submit(self, load: Job) -> None:
        """Queue a load; its result comes back through :meth:`collect`, exactly once."""
        self._orders.put(load)

    def cancel(self, job_id: str, error: KVFerryError) -> None:
        """Give a load up; it comes back with ``error`` through :meth:`collect`, once its transfers are quiet."""
        self._orders.put((job_id, error))

    def quarantine(self, job_id: str) -> None:
        """Tell at once of a load that was given up and is not quiet: its blocks are kept until it is."""
        self._orders.put((job_id, None))

    def wake(self) -> None:
        """Something has happened that a waiting job may wait for: look at once."""
        self._orders.put(None)

    def collect(self, wait_seconds: float = 0.0) -> list[JobResult]:
        """Return the loads that ended since the last call; where none has, wait so long for the first."""
        results = []
        if wait_seconds:
            with suppress(queue.Empty):
                results.append(self._results.get(timeout=wait_seconds))
        while not self._results.empty():
            results.append(self._results.get_nowait())
        return results

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Give up the loads in progress, wait for their transfers to be quiet, stop. Twice is fine.

        Returns after at most ``timeout_seconds``; the results of loads that were given up can be collected.
        """
        self._give_up_at = time.monotonic() + timeout_seconds
        self._stop.set()
        self._orders.put(None)
        self._thread.join(timeout_seconds)

    def _await_start(self) -> None:
        try:
            self._started.result()
        except (OSError, ValueError, OverflowError) as error:
            raise SettingsError(
                Reason.INVALID_SETTING,
                f"the transfer thread cannot run on cores {sorted(self._cores)}: {error}.",
                'Set "transfer_cores" to cores of this machine.',
            ) from error

    def _run(self) -> None:
        try:
            if self._cores:
                # A thread of a vLLM CPU worker inherits the one core that computes.
                os.sched_setaffinity(0, self._cores)
            self._order.enter_thread()
        except Exception as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        while not self._stop.is_set():
            try:
                self._turn()
            except Exception:
                # Nothing that one load does may end the thread that carries all others.
                logger.exception("kvferry: a turn of the transfer thread failed")
                time.sleep(MAX_WAIT_SECONDS)
        self._give_up()

    def _turn(self) -> None:
        self._take_orders()
        if self._active and not self._advance():
            self._wait()
        else:
            self._num_looks = 0

    def _wait(self) -> None:
        """Sleep until it is time to look again: soon where transfers run, else ever longer or until an order comes."""
        if any(load.phase is not Phase.PREPARING and load.job_id not in self._still_writing for load in self._active):
            time.sleep(WAIT_SECONDS)
            return
        self._num_looks += 1
        with suppress(queue.Empty):
            self._take(self._orders.get(timeout=min(WAIT_SECONDS * (1 + self._num_looks // 4), MAX_WAIT_SECONDS)))

    def _take_orders(self) -> None:
        """Take what was queued; wait for it when there is nothing else to do."""
        if not self._active:
            self._take(self._orders.get())
        while not self._orders.empty():
            self._take(self._orders.get_nowait())

    def _take(self, order: Job | Change | None) -> None:
        if order is None:
            return
        if not isinstance(order, tuple):
            self._active.append(order)
            return
        job_id, error = order
        for load in self._active:
            if load.job_id == job_id and error is not None:
                load.cancel(error)
            elif load.job_id == job_id and job_id in self._still_writing - self._quarantined:
                self._quarantined.add(job_id)
                self._results.put(_result(load))

    def _give_up(self) -> None:
        while not self._orders.empty():
            self._take(self._orders.get_nowait())
        for load in self._active:
            load.cancel(HandoffError(Reason.CLOSED, f"the load of {load.job_id} was given up: the executor stops."))
        while self._active and time.monotonic() < self._give_up_at:
            if not self._advance():
                time.sleep(WAIT_SECONDS)

    def _advance(self) -> bool:
        """Advance the first load that can move, so that early loads finish early; those that end go before all."""
        now = time.monotonic()
        for load in sorted(self._active, key=lambda load: not load.is_ending(now)):
            moved = self._advance_one(load)
            self._report_if_late(load, now)
            if load.phase is Phase.DONE:
                self._active.remove(load)
                self._end(load)
            elif load.phase is Phase.BETWEEN_ROUNDS:
                # Between two rounds the others go first.
                self._active.remove(load)
                self._active.append(load)
            if moved:
                return True
        return False

    def _end(self, load: Job) -> None:
        if load.job_id in self._quarantined:
            self._quarantined.remove(load.job_id)
        else:
            self._results.put(_result(load))

    def _report_if_late(self, load: Job, now: float) -> None:
        """Tell, once when it gets late and once when it is over, of blocks that the engine cannot have back yet.

        A posted read cannot be revoked: what lands after the blocks were given to another request would be its cache.
        """
        seconds = 0.0 if load.given_up_at is None else now - load.given_up_at
        if load.phase is Phase.DONE and load.job_id in self._still_writing:
            self._still_writing.remove(load.job_id)
            self._report(load)
            logger.warning("kvferry: the transfers of %s ended %.0f s after it was given up.", load.job_id, seconds)
        elif load.phase is Phase.STOPPING and seconds > QUIET_SECONDS and load.job_id not in self._still_writing:
            self._still_writing.add(load.job_id)
            self._report(load)
            logger.warning(
                "kvferry: %s was given up %.0f s ago (%s), but its transfers cannot be revoked and have not ended: its "
                "blocks are kept until they have. Is the other engine's process stopped? If it ends, so do they.",
                load.job_id,
                seconds,
                load.error,
            )

    def _report(self, changed: Job) -> None:
        if changed.fills_blocks:
            names = {load.job_id for load in self._active if load.fills_blocks}
            self._report_still_writing(frozenset(self._still_writing & names))

    def _advance_one(self, load: Job) -> bool:
        was_stopping = load.phase is Phase.STOPPING
        try:
            return load.advance(self._scratch, time.monotonic())
        except Exception as error:
            if not was_stopping:
                logger.exception("kvferry: the load of %s failed unexpectedly", load.job_id)
            load.cancel(_unexpected(error))
            # One that cannot even be stopped must not keep the others waiting.
            return not was_stopping


def cores_that_do_not_compute() -> set[int]:
    """Return the cores on which a worker should copy: those it may use without those it is bound to, else the latter.

    vLLM binds a worker on a CPU to the cores on which it computes, but not the process that started it.
    """
    bound = os.sched_getaffinity(0)
    try:
        return (os.sched_getaffinity(os.getppid()) - bound) or bound
    except OSError:
        return bound


def _result(load: Job) -> JobResult:
    """Return how the load ended; where that cannot be told it failed, since the engine waits for an answer."""
    try:
        return load.result(time.monotonic())
    except Exception as error:
        logger.exception("kvferry: how the load of %s ended cannot be told", load.job_id)
        return JobResult(load.job_id, _unexpected(error))


def _unexpected(error: Exception) -> HandoffError:
    what = f"the load failed unexpectedly: {type(error).__name__}: {error}."
    return HandoffError(Reason.TRANSFER_FAILED, what, "The log has the whole of it; please report it.")
