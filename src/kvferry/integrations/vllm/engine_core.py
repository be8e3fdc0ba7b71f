"""What connectors ask of the engine core that has built them, how long it waits, and what they do to its ranks.

An engine that computes nothing may wait for what no worker is told of: copies of lower tiers, answers of peers, and
holds that keep an engine which cannot sleep. vLLM steps without a pause while a request waits: a thousand steps a
second, on the cores that copy. An engine that has requests waits in its steps (:class:`StepWaits`). An engine without
requests sleeps until it is time to look again (:class:`Looks`): a request that comes meanwhile wakes it. See
docs/decisions/idle-steps.md.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol
from weakref import WeakSet

from kvferry.errors import KVFerryError, Reason
from kvferry.handoff.messages import FIRST_WEIGHTS, MAX_TEXT_LENGTH
from kvferry.peer_log import PeerLog

logger = PeerLog(logging.getLogger(__name__))


class Engine:
    """What a connector in the scheduler asks of the engine core that has built it: vLLM offers no such calls.

    The core's constructor builds the scheduler, which builds the connector: so the core is found on the caller's
    stack. Without a core there, as in tests of the scheduler alone, nothing can be called and nothing is special.
    """

    def __init__(self) -> None:
        from vllm.v1.engine.core import EngineCore, EngineCoreProc

        self._core = on_the_stack(EngineCore)
        self.can_wake = isinstance(self._core, EngineCoreProc)
        """Whether the core sleeps in a process of its own, and :meth:`wake` ends its sleep."""

    def wake(self) -> None:
        """Let the core look for work, by its own wake-up message; any thread may call it."""
        from vllm.v1.engine import EngineCoreRequestType

        if self.can_wake:
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    @property
    def is_ending(self) -> bool:
        """Whether the core was told to end: it ends as soon as it has no work."""
        from vllm.v1.engine.core import EngineShutdownState

        return self.can_wake and self._core.shutdown_state is not EngineShutdownState.RUNNING

    @property
    def finishes(self) -> bool:
        """Whether the core was told to end, and finishes its requests first (``--shutdown-timeout``)."""
        return self.is_ending and bool(self._core.vllm_config.shutdown_timeout > 0)

    @property
    def stays_awake(self) -> bool:
        """Whether the core steps without a pause while it has work: it cannot be woken, or finishes before its end."""
        return not self.can_wake or self.finishes

    @property
    def ends_ranks(self) -> bool:
        """Whether the core's executor ends its ranks without one having failed; any thread may ask.

        It notes a failure before it ends the other ranks.
        """
        executor = getattr(self._core, "model_executor", None)
        return bool(getattr(executor, "shutting_down", False)) and not getattr(executor, "is_failed", False)

    @property
    def num_requests(self) -> int:
        """How many requests the core has not finished; any thread may ask, also before the core has its scheduler."""
        return 0 if self._scheduler is None else sum(self._scheduler.get_request_counts())

    @property
    def weights_version(self) -> str:
        """The name that the operator gave the weights last; weights that were replaced in place have another."""
        return FIRST_WEIGHTS if self._core is None else str(self._core.get_weight_version())[:MAX_TEXT_LENGTH]

    def call_workers(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function of a module in every worker, with the worker and these arguments, and wait for all.

        Only the scheduler's thread may call it. A rank may take as long as vLLM lets a step take. Where one does not
        answer, the engine ends: vLLM would take a late answer for that of a later call. Raises :class:`KVFerryError`
        (deadline-exceeded).
        """
        if self._core is None:
            return
        from vllm import envs
        from vllm.v1.engine import EngineCoreRequestType

        seconds = float(envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)
        try:
            self._core.collective_rpc(function, seconds, arguments)
        except TimeoutError as error:
            if self.can_wake:
                self._core.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
            raise KVFerryError(
                Reason.DEADLINE_EXCEEDED,
                f"a rank of this engine has not answered within {seconds:g} s.",
                "The engine ends: start it again.",
            ) from error

    @property
    def landed_loads(self) -> list[str]:
        """The requests whose loads vLLM believes, and whose blocks its next step would take."""
        return [] if self._scheduler is None else sorted(self._scheduler.finished_recving_kv_req_ids)

    @property
    def _scheduler(self) -> Any:
        """The core's scheduler; None without a core, and until the core's constructor has made it."""
        return getattr(self._core, "scheduler", None)

    @property
    def can_compute_anew(self) -> bool:
        """Whether :meth:`compute_anew` has an effect."""
        return self._scheduler is not None

    def compute_anew(self, request_ids: Iterable[str]) -> None:
        """Let the engine compute these requests, whose loads vLLM believes or is about to believe: as after a load that
        has failed, whatever ``kv_load_failure_policy`` says. Only the scheduler's thread may call it.
        """
        from vllm.v1.request import RequestStatus

        scheduler = self._scheduler
        for request_id in request_ids if scheduler is not None else ():
            request = scheduler.requests.get(request_id)
            if request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                scheduler.failed_recving_kv_req_ids.add(request_id)


def on_the_stack(kind: type) -> Any:
    """Return the nearest caller that is a method's object of this class; None without one."""
    frame = sys._getframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), kind):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.008, 0.032


class IdleSteps:
    """The wait of each step that computes nothing, twice as long as the last one's: docs/decisions/idle-steps.md.

    While a request waits for its cache, vLLM starts step after step, and its processes take the cores on which bytes
    are copied and, in a concurrent flow on one host, prompts are computed. A request that comes during such a
    wait waits as long, once.

    >>> steps = IdleSteps()
    >>> [steps.wait(computes=False) for _ in range(4)], steps.wait(computes=True), steps.wait(computes=False)
    ([0.008, 0.016, 0.032, 0.032], 0.0, 0.008)
    """

    def __init__(self) -> None:
        self._next = FIRST_WAIT_SECONDS

    def wait(self, *, computes: bool) -> float:
        """Return the most seconds that this step waits."""
        if computes:
            self.reset()
            return 0.0
        seconds, self._next = self._next, min(2 * self._next, LONGEST_WAIT_SECONDS)
        return seconds

    def reset(self) -> None:
        """Start with the shortest wait again: a load has ended, and the next one may end soon."""
        self._next = FIRST_WAIT_SECONDS


SHARE = 1 / 8
"""Of the seconds since something changed last, or since the first of these steps: how much later a step sees it."""
LEAST_SECONDS, MOST_SECONDS = 0.001, 0.008
"""A request that comes while a step waits is delayed as long, once."""
LOOK_SHARE, LOOK_MOST_SECONDS = 1 / 4, 0.032
"""The same for an engine without requests: nobody waits for what it looks at."""


class StepWaits:
    """The wait of each step. ``progress`` is any value that changes when something has ended.

    >>> waits = StepWaits()
    >>> [waits.wait(progress=0, now=now) for now in (0.0, 0.01, 0.016, 0.2)]
    [0.001, 0.00125, 0.002, 0.008]
    >>> waits.wait(progress=1, now=0.21)
    0.001
    """

    def __init__(self, share: float = SHARE, most_seconds: float = MOST_SECONDS) -> None:
        self._share, self._most_seconds = share, most_seconds
        self._progress: Hashable = None
        self._since: float | None = None

    def wait(self, progress: Hashable, now: float) -> float:
        """Return the seconds for which this step shall wait."""
        if self._since is None or progress != self._progress:
            self._since, self._progress = now, progress
        return min(max(self._share * (now - self._since), LEAST_SECONDS), self._most_seconds)

    def reset(self) -> None:
        """Start anew: a step had something else to do."""
        self._since = None


class Looks:
    """The times at which an engine without requests looks at what it waits for. ``wake`` ends the engine's sleep.

    >>> looks = Looks(wake=lambda: None)
    >>> looks.are_due(now=7.0), looks.done(progress=0, now=7.0), looks.are_due(now=7.0), looks.are_due(now=7.001)
    (True, None, False, True)
    >>> looks.close()
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._waits = StepWaits(LOOK_SHARE, LOOK_MOST_SECONDS)
        self._alarm = Alarm(wake)
        self._next: float | None = None

    def are_due(self, now: float) -> bool:
        """Return whether to look now; else the engine is woken when it is time."""
        if self._next is None or now >= self._next:
            return True
        self._alarm.set(self._next - now)
        return False

    def done(self, progress: Hashable, now: float) -> None:
        """The engine has looked; the next look comes later."""
        self._next = now + self._waits.wait(progress, now)

    def reset(self) -> None:
        """Nothing is waited for: the next wait begins anew."""
        self._waits.reset()
        self._next = None

    def close(self) -> None:
        """Wake nobody any more; twice is fine."""
        self._alarm.close()


class Alarm:
    """Calls ``ring`` some time later, on a thread that starts with the first call of :meth:`set`."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._at: float | None = None
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def set(self, seconds: float) -> None:
        """Ring after so many seconds, or earlier where an earlier call says so."""
        at = time.monotonic() + seconds
        with self._changed:
            if self._is_closed or (self._at is not None and self._at <= at):
                return
            self._at = at
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvferry-alarm", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Ring no more; twice is fine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while self._wait():
            self._ring()

    def _wait(self) -> bool:
        """Return whether to ring; False once it is closed."""
        with self._changed:
            while not self._is_closed:
                seconds = None if self._at is None else self._at - time.monotonic()
                if seconds is not None and seconds <= 0:
                    self._at = None
                    return True
                self._changed.wait(seconds)
            return False


RANK_NAME = "VllmWorker-"
"""How vLLM's executor names the processes of its ranks."""
STATUS_SECONDS = 1.0
"""How long the exit status of a rank that has ended may take to be known."""
PAUSE_SECONDS = 0.01


class RankMonitor:
    """Watches the ranks that this process has started, on a thread; kills all of them when one has failed.

    Ranks wait for one another inside collective operations, where no Python code runs. vLLM's monitor asks the others
    to end, and kills them many seconds later; on a CPU they keep their cores busy until then, and may keep vLLM's own
    threads from running. Once they are killed, vLLM ends the engine, and its clients get an error.

    A rank has failed when a signal has ended it, or when its exit status is not 0, unless vLLM ``ends_ranks``: it does
    before it closes the connector, and kills those that take too long. Ranks that exit with status 0 are let alone.
    Ranks of other hosts, and those that another process has started, are not watched.
    """

    def __init__(self, ranks: Sequence[BaseProcess], ends_ranks: Callable[[], bool] = lambda: False) -> None:
        self._ranks, self._ends_ranks = list(ranks), ends_ranks
        self._stop: int | None = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, args=(self._stop,), name="kvferry-ranks", daemon=True)
        self._thread.start()

    @classmethod
    def of_this_process(cls) -> "RankMonitor | None":
        """Watch the ranks among the child processes of this process, vLLM's scheduler; None where there are none.

        The caller is the constructor of a connector, as for :class:`Engine`.
        """
        ranks = [child for child in multiprocessing.active_children() if child.name.startswith(RANK_NAME)]
        engine = Engine()
        return cls(ranks, lambda: engine.ends_ranks) if ranks else None

    def close(self) -> None:
        """Stop watching; twice is fine."""
        if self._stop is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
            self._stop = None

    def _run(self, stop: int) -> None:
        living = {rank.sentinel: rank for rank in self._ranks}
        while living:
            ended = wait([*living, stop])
            if stop in ended:
                return
            for sentinel in ended:
                assert isinstance(sentinel, int)
                if (status := _status_of(living.pop(sentinel))) and not self._ends_ranks():
                    self._kill(list(living.values()), status)
                    return

    def _kill(self, living: Sequence[BaseProcess], status: int) -> None:
        logger.error(
            "kvferry: a rank of this engine %s: the engine cannot compute without it. Its other ranks are killed, so "
            "that vLLM ends the engine and every client gets an error.",
            f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has exited with status {status}",
        )
        for rank in living:
            rank.kill()


def _status_of(rank: BaseProcess) -> int:
    """Return the exit status of a rank that has ended, below 0 for a signal; 0 where it does not become known."""
    deadline = time.monotonic() + STATUS_SECONDS
    # vLLM's monitor asks for the status too: whoever comes second sees it a moment later.
    while (status := rank.exitcode) is None and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
    return status or 0


class WorkerRole(Protocol):
    """What a reset needs of a worker's role."""

    def end_former_epoch(self, epoch: int, weights_version: str) -> None:
        """End all that was held or announced before; the engine is in this epoch now, with weights of this version."""


ROLES: WeakSet[WorkerRole] = WeakSet()
"""The roles of this process: vLLM passes the call to a worker, which does not know the roles of its connectors."""


def end_former_epoch(worker: object, epoch: int, weights_version: str) -> None:
    """Do as :meth:`WorkerRole.end_former_epoch` in every role of the worker's process.

    Orders reach the workers with the next step. A reset must not wait for it: vLLM calls this in every worker, between
    two steps.
    """
    for role in list(ROLES):
        role.end_former_epoch(epoch, weights_version)
