"""The transfer thread: jobs of every kind, and every way in which they end."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import HandoffError, KVFerryError, PlanError, Reason, SettingsError, TransportError
from kvferry.execution import executor as executor_module
from kvferry.execution.destination import Announcement, AwaitedLoad, SourceRank
from kvferry.execution.executor import (
    MAX_MOVING_WAIT_SECONDS,
    MAX_WAIT_SECONDS,
    SWITCH_SECONDS,
    WAIT_SECONDS,
    WAIT_SHARE,
    Executor,
    Inbox,
    JobResult,
    Phase,
    seconds_until_next_look,
)
from kvferry.execution.source import Write
from kvferry.handoff.holds import lease_lost
from kvferry.handoff.messages import WriteKey

from ..waits import wait_until

FAR = 1e12
ABORTED = HandoffError(Reason.ABORTED, "the request was aborted.")


class Script:
    """What the transfer of a :class:`Moving` does; the script is the public attributes."""

    def __init__(self) -> None:
        self.is_held = self.is_endless = self.cancel_raises = self.has_begun = False
        self.polls_until_quiet = 0
        self.before_end: Callable[[], None] = lambda: None
        self.error: TransportError | None = None
        self.num_pending = 0


class Moving:
    """A job whose transfers do as they are told; with ``deadline`` as a load has one."""

    is_for_log = can_wait = False
    fills_blocks = True

    def __init__(self, scripts: Sequence[Script], deadline: float = FAR, job_id: str = "r") -> None:
        self.job_id = job_id
        self.phase = Phase.PREPARING
        self.error: KVFerryError | None = None
        self.given_up_at: float | None = None
        self._deadline, self._pending = deadline, list(scripts)

    def advance(self, now: float) -> bool:
        if self.error is None and now >= self._deadline:
            self.cancel(HandoffError(Reason.DEADLINE_EXCEEDED, "the time is over."))
        if self.phase is Phase.STOPPING:
            return self._stop()
        if self.phase is Phase.PREPARING:
            for script in self._pending:
                script.num_pending, script.has_begun = script.num_pending + 1, True
            self.phase = Phase.MOVING
            return True
        ended = [script for script in self._pending if not (script.is_held or script.is_endless)]
        for script in ended:
            script.before_end()
            self._end(script)
            if script.error is not None:
                self.cancel(script.error)
                return True
        if not self._pending:
            self.phase = Phase.DONE
        return bool(ended) or any(script.is_endless for script in self._pending)

    def _stop(self) -> bool:
        for script in list(self._pending):
            if script.cancel_raises:
                raise RuntimeError("cancel failed")
            if script.polls_until_quiet > 0:
                script.polls_until_quiet -= 1
            else:
                self._end(script)
        if not self._pending:
            self.phase = Phase.DONE
        return not self._pending

    def _end(self, script: Script) -> None:
        script.num_pending -= 1
        self._pending.remove(script)

    def is_ending(self, now: float) -> bool:
        return self.phase is Phase.STOPPING or now >= self._deadline

    def cancel(self, error: KVFerryError) -> None:
        if self.error is not None or self.phase is Phase.DONE:
            return
        self.error, self.given_up_at = error, time.monotonic()
        if self.phase is Phase.PREPARING:
            self._pending = []
        self.phase = Phase.STOPPING if self._pending else Phase.DONE

    def result(self, finished_at: float) -> JobResult:
        return JobResult(self.job_id, self.error)


class Alone:
    """What a load asks of its rank where it has no source."""

    fence_seconds, keeps_events = 60.0, False

    def collect(self) -> None:
        pass

    def forget(self, number: int) -> None:
        pass


def load_of(
    find_sources: Callable[[], Sequence[SourceRank] | None], deadline: float = FAR, job_id: str = "r"
) -> AwaitedLoad:
    """Return a load that waits for its handshake, as ``find_sources`` says."""
    asked = Announcement(job_id, "x", 16, "prompt", deadline, engine_epoch=1)
    return AwaitedLoad(asked, WriteKey("d/0", 1, 1), find_sources, Alone())  # type: ignore[arg-type]


def error_of(result: JobResult) -> KVFerryError:
    assert result.error is not None
    return result.error


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor()
    yield executor
    executor.close()


def collect(executor: Executor, number: int, seconds: float = 30.0) -> dict[str, JobResult]:
    results: list[JobResult] = []
    end = time.monotonic() + seconds
    while len(results) < number:
        assert time.monotonic() < end, f"only {len(results)} of {number} loads ended"
        results += executor.collect()
        time.sleep(0.001)
    assert max(Counter(result.job_id for result in results).values(), default=1) == 1
    return {result.job_id: result for result in results}


def test_cancel_before_the_start_in_the_middle_and_afterwards(executor: Executor, script: Script) -> None:
    executor.submit(load_of(lambda: None, job_id="preparing"))
    executor.cancel("preparing", ABORTED)
    assert error_of(collect(executor, 1)["preparing"]).reason is Reason.ABORTED

    script.is_held, script.polls_until_quiet = True, 20
    executor.submit(Moving([script], job_id="middle"))
    wait_until(lambda: script.has_begun)
    executor.cancel("middle", ABORTED)
    executor.cancel("middle", ABORTED)
    assert error_of(collect(executor, 1)["middle"]).reason is Reason.ABORTED
    assert script.num_pending == 0

    script.is_held = False
    executor.submit(Moving([script], job_id="done"))
    assert collect(executor, 1)["done"].error is None
    executor.cancel("done", ABORTED)
    executor.cancel("never heard of", ABORTED)
    time.sleep(0.05)
    assert executor.collect() == []


def test_a_job_that_was_given_up_before_its_start_never_begins(executor: Executor, script: Script) -> None:
    goes_on, late = threading.Event(), Script()
    script.before_end = lambda: goes_on.wait(20.0)  # type: ignore[assignment, return-value]
    executor.submit(Moving([script], job_id="first"))
    wait_until(lambda: script.has_begun)
    executor.submit(Beginning([late], job_id="late"))
    executor.cancel("late", ABORTED)
    goes_on.set()
    results = collect(executor, 2)
    assert results["first"].error is None
    assert error_of(results["late"]).reason is Reason.ABORTED
    assert not late.has_begun


class Beginning(Moving):
    """Begins whenever it is advanced, as a copy does."""

    def advance(self, now: float) -> bool:
        self.phase = Phase.PREPARING
        return super().advance(now)


def test_collecting_waits_for_the_first_that_ends(executor: Executor) -> None:
    assert executor.collect(0.01) == []
    script = Script()
    script.before_end = lambda: time.sleep(0.05)
    executor.submit(Moving([script]))
    (result,) = executor.collect(20.0)
    assert result.error is None
    assert executor.collect() == []


def test_a_cancellation_never_overtakes_its_load(executor: Executor) -> None:
    """However the two threads interleave: each load would wait for ever."""
    for number in range(500):
        executor.submit(load_of(lambda: None, job_id=str(number)))
        executor.cancel(str(number), ABORTED)
    assert {error_of(result).reason for result in collect(executor, 500).values()} == {Reason.ABORTED}


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (PlanError(Reason.LAYER_MISMATCH, "no."), Reason.LAYER_MISMATCH),
        (RuntimeError("a bug"), Reason.TRANSFER_FAILED),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"), Reason.TRANSFER_FAILED),
    ],
)
def test_a_preparation_that_raises_fails_its_load_only(
    executor: Executor, script: Script, raised: Exception, reason: Reason
) -> None:
    def prepare() -> None:
        raise raised

    executor.submit(load_of(prepare, job_id="bad"))
    executor.submit(Moving([script], job_id="good"))
    results = collect(executor, 2)
    assert error_of(results["bad"]).reason is reason
    assert results["good"].error is None


def test_a_fault_in_a_turn_ends_neither_the_thread_nor_leaves_a_load_without_end(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(AwaitedLoad, "result", lambda *_: 1 / 0)
    executor.submit(load_of(lambda: [], job_id="a"))
    assert error_of(collect(executor, 1)["a"]).reason is Reason.TRANSFER_FAILED
    monkeypatch.undo()
    monkeypatch.setattr(Executor, "_report_if_late", lambda *_: 1 / 0)
    executor.submit(load_of(lambda: None, job_id="b"))
    wait_until(lambda: "a turn of the transfer thread failed" in caplog.text)
    monkeypatch.undo()
    executor.submit(load_of(lambda: [], job_id="c"))
    assert collect(executor, 1)["c"].error is None


def test_a_transfer_that_cannot_even_be_stopped_keeps_no_other_waiting(executor: Executor, script: Script) -> None:
    stuck = Script()
    stuck.is_held = stuck.cancel_raises = True
    executor.submit(Moving([stuck], job_id="stuck"))
    wait_until(lambda: stuck.has_begun)
    executor.cancel("stuck", ABORTED)
    executor.submit(Moving([script], job_id="good"))
    assert collect(executor, 1)["good"].error is None
    stuck.cancel_raises = False
    assert error_of(collect(executor, 1)["stuck"]).reason is Reason.ABORTED


def test_a_deadline_is_kept_while_an_earlier_load_moves(executor: Executor) -> None:
    """An early load that always moves goes first, but not before one whose time is over."""
    endless = Script()
    endless.is_endless = True
    executor.submit(Moving([endless], job_id="endless"))
    wait_until(lambda: endless.has_begun)
    executor.submit(load_of(lambda: None, deadline=time.monotonic() + 0.05, job_id="late"))
    assert error_of(collect(executor, 1)["late"]).reason is Reason.DEADLINE_EXCEEDED
    executor.submit(load_of(lambda: None, job_id="aborted"))
    executor.cancel("aborted", ABORTED)
    assert error_of(collect(executor, 1)["aborted"]).reason is Reason.ABORTED
    executor.cancel("endless", ABORTED)
    assert error_of(collect(executor, 1)["endless"]).reason is Reason.ABORTED


class Ended:
    """A job that is over and has only to be reported; another comes as soon as it is."""

    fills_blocks = can_wait = False
    is_for_log = True
    given_up_at = error = None
    phase = Phase.PREPARING

    def __init__(self, executor: Executor, number: int) -> None:
        self.job_id = f"ended {number}"
        self._executor, self._number = executor, number

    def advance(self, now: float) -> bool:
        self.phase = Phase.DONE
        self._executor.submit(Ended(self._executor, self._number + 1))
        return True

    def is_ending(self, now: float) -> bool:
        return True

    def cancel(self, error: KVFerryError) -> None:
        self.phase = Phase.DONE

    def result(self, finished_at: float) -> JobResult:
        return JobResult(self.job_id, None)


def test_writes_that_are_given_up_one_after_the_other_keep_no_transfer_waiting(
    executor: Executor, script: Script
) -> None:
    """Strangers announce as many as they like; those that are over go first, since they keep their blocks."""
    executor.submit(Ended(executor, 0))
    executor.submit(Moving([script], job_id="good"))
    results: dict[str, JobResult] = {}
    wait_until(lambda: results.update({each.job_id: each for each in executor.collect()}) or "good" in results)
    assert results["good"].error is None


@pytest.mark.parametrize("seed", range(40))
def test_every_job_ends_exactly_once_whatever_happens(seed: int) -> None:
    """Random jobs, failures, cancellations and delays: one result each, and nothing left behind."""
    random = Random(seed)
    executor = Executor()
    scripts = [Script() for _ in range(3)]
    well = scripts[0]
    scripts[1].error = TransportError(Reason.PEER_DIED, "gone.")
    scripts[2].is_held, scripts[2].polls_until_quiet = True, random.randrange(30)
    may_fail = set()
    try:
        for number in range(30):
            chosen = [random.choice([well] * 4 + scripts) for _ in range(random.randint(1, 3))]
            is_well = all(script is well for script in chosen)
            deadline = FAR if is_well else time.monotonic() + random.choice([0.0, 0.02, 0.05])
            executor.submit(Moving(chosen, deadline, str(number)))
            if not is_well:
                may_fail.add(str(number))
            if random.random() < 0.3:
                given_up = str(random.randrange(number + 1))
                may_fail.add(given_up)
                executor.cancel(given_up, ABORTED)
        results = collect(executor, 30)
    finally:
        executor.close()
    assert executor.collect() == []
    assert results.keys() == set(map(str, range(30)))
    assert {job_id for job_id, result in results.items() if result.error is not None} <= may_fail
    assert any(result.error is None for result in results.values())
    assert sum(script.num_pending for script in scripts) == 0


def test_a_transfer_that_does_not_end_is_logged_and_keeps_its_load(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As over NIXL from a stopped process: what may still land keeps its blocks, and the log says so."""
    monkeypatch.setattr(executor_module, "QUIET_SECONDS", 0.02)
    executor = Executor()
    script.is_held, script.polls_until_quiet = True, 1 << 60
    try:
        executor.submit(Moving([script], time.monotonic() + 0.05, "stuck"))
        wait_until(lambda: bool(caplog.messages))
        time.sleep(0.05)
        assert [("cannot be revoked" in text, "deadline-exceeded" in text) for text in caplog.messages] == [
            (True, True)
        ]
        assert executor.collect() == []
        script.polls_until_quiet = 0
        assert error_of(collect(executor, 1)["stuck"]).reason is Reason.DEADLINE_EXCEEDED
        assert "stuck ended" in caplog.messages[-1]
    finally:
        executor.close()


def test_a_quarantined_load_ends_before_it_is_quiet_and_is_reported_when_quiet(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the report that the load is not quiet: until then its blocks are not quarantined."""
    monkeypatch.setattr(executor_module, "QUIET_SECONDS", 0.1)
    reports: list[frozenset[str]] = []
    executor = Executor(report_still_writing=reports.append)
    script.is_held, script.polls_until_quiet = True, 1 << 60
    try:
        executor.submit(Moving([script], time.monotonic() + 0.05, "stuck"))
        executor.quarantine("stuck")
        wait_until(lambda: reports == [frozenset({"stuck"})])
        assert executor.collect() == []
        for job_id in ("another", "stuck", "stuck"):
            executor.quarantine(job_id)
        assert error_of(collect(executor, 1)["stuck"]).reason is Reason.DEADLINE_EXCEEDED
        assert script.num_pending > 0
        script.polls_until_quiet = 0
        wait_until(lambda: reports[1:] == [frozenset()])
        assert script.num_pending == 0
        assert executor.collect() == [], "reported twice"
    finally:
        executor.close()


def test_close_gives_up_what_is_in_progress_once_it_is_quiet(script: Script) -> None:
    executor = Executor()
    script.is_held, script.polls_until_quiet = True, 20
    executor.submit(Moving([script], job_id="moving"))
    wait_until(lambda: script.has_begun)
    executor.submit(load_of(lambda: None, job_id="queued"))
    assert executor.close()
    assert executor.close()
    assert not executor._thread.is_alive()
    assert script.num_pending == 0
    assert {error_of(result).reason for result in collect(executor, 2).values()} == {Reason.CLOSED}


def test_close_returns_within_its_bound_although_a_transfer_stays(script: Script) -> None:
    executor = Executor()
    script.is_held, script.polls_until_quiet = True, 1 << 60
    executor.submit(Moving([script]))
    wait_until(lambda: script.has_begun)
    started_at = time.monotonic()
    assert not executor.close(timeout_seconds=0.2)
    executor._thread.join(10)
    assert not executor.close(timeout_seconds=0.2), "the thread has ended, and the transfer has not"
    assert time.monotonic() - started_at < 5
    assert executor.collect() == [], "blocks that may still be written were reported"
    executor._thread.join(20)
    assert not executor._thread.is_alive()


def test_close_returns_within_its_bound_although_a_preparation_hangs() -> None:
    executor, hangs = Executor(), threading.Event()

    def prepare() -> None:
        hangs.wait(30)

    executor.submit(load_of(prepare))
    started_at = time.monotonic()
    executor.close(timeout_seconds=0.2)
    assert time.monotonic() - started_at < 5
    hangs.set()


def test_an_idle_executor_uses_no_processor_and_closes_at_once(executor: Executor) -> None:
    clock = time.pthread_getcpuclockid(executor._thread.ident or 0)
    before = time.clock_gettime(clock)
    time.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.01
    executor.close()
    assert not executor._thread.is_alive()


def test_the_transfer_thread_gets_the_interpreter_soon_beside_a_thread_that_computes() -> None:
    before = sys.getswitchinterval()
    try:
        for interval in (0.005, 0.0001):
            sys.setswitchinterval(interval)
            Executor().close()
            assert sys.getswitchinterval() == pytest.approx(min(interval, SWITCH_SECONDS), abs=2e-6)
    finally:
        sys.setswitchinterval(before)


def test_a_load_that_waits_is_not_asked_without_pause(executor: Executor) -> None:
    asked: list[float] = []
    executor.submit(load_of(lambda: asked.append(time.monotonic()), job_id="waiting"))
    time.sleep(0.3)
    executor.cancel("waiting", ABORTED)
    collect(executor, 1)
    gaps = np.diff(asked)
    assert len(gaps) > 1
    assert (gaps >= WAIT_SECONDS / 2).all()
    # A wait is a share of the time since the begin: 1, 1 + 1/8, (1 + 1/8)^2, ... after the first short ones.
    assert len(asked) <= 1 / WAIT_SHARE + np.log(0.3 / WAIT_SECONDS) / np.log1p(WAIT_SHARE) + 5


@given(st.floats(1e-6, 0.1), st.booleans())
def test_an_end_is_noticed_soon_and_costs_few_looks(seconds: float, is_moving: bool) -> None:
    now, looks = 0.0, 0
    while now < seconds:
        now, looks = now + seconds_until_next_look(now, is_moving=is_moving), looks + 1
    assert now - seconds <= max(WAIT_SECONDS, min(WAIT_SHARE * seconds, MAX_WAIT_SECONDS))
    assert now - seconds <= MAX_MOVING_WAIT_SECONDS or not is_moving
    longest = MAX_MOVING_WAIT_SECONDS if is_moving else MAX_WAIT_SECONDS
    assert looks <= 1 / WAIT_SHARE + np.log(longest / WAIT_SECONDS) / np.log1p(WAIT_SHARE) + seconds / longest + 2


def test_a_load_that_waits_for_long_is_asked_less_often_and_keeps_no_other_waiting(
    executor: Executor, script: Script
) -> None:
    asked: list[float] = []
    executor.submit(load_of(lambda: asked.append(time.monotonic()), job_id="waiting"))
    time.sleep(0.6)
    later, since = len(asked), time.monotonic()
    time.sleep(0.2)
    assert 1 <= len(asked) - later <= (time.monotonic() - since) / MAX_WAIT_SECONDS + 2
    executor.submit(Moving([script], job_id="other"))
    assert collect(executor, 1)["other"].error is None
    executor.cancel("waiting", ABORTED)
    collect(executor, 1)


def test_the_thread_runs_on_the_cores_it_was_given() -> None:
    core = min(os.sched_getaffinity(0))
    mine = os.sched_getaffinity(0)
    executor = Executor(cores=[core])
    try:
        assert os.sched_getaffinity(executor._thread.native_id or 0) == {core}
        assert os.sched_getaffinity(0) == mine
    finally:
        executor.close()


def test_the_cores_that_compute_copy_too_while_the_engine_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only while something moves: a job that waits for a peer takes no core."""
    core, *others = sorted(os.sched_getaffinity(0))
    executor = Executor(cores=[core], compute_cores=others)

    class Waiting:
        """A job of this phase, whatever is asked of it."""

        job_id, error, given_up_at = "r", None, None
        is_for_log = can_wait = fills_blocks = False
        phase = Phase.PREPARING

        def advance(self, now: float) -> bool:
            return False

        def is_ending(self, now: float) -> bool:
            return False

        def cancel(self, error: KVFerryError) -> None:
            self.phase = Phase.DONE

        def result(self, finished_at: float) -> JobResult:
            return JobResult("r", None)

    job = Waiting()

    def use(cores: set[int]) -> None:
        executor.wake()
        wait_until(lambda: not executor._orders and os.sched_getaffinity(executor._thread.native_id or 0) == cores)

    def stay_on(cores: set[int]) -> None:
        time.sleep(0.05)
        use(cores)

    try:
        use({core})
        executor.submit(job)
        stay_on({core})
        job.phase = Phase.MOVING
        use({core, *others})
        with executor.computing():
            use({core})
            with executor.computing():
                stay_on({core})
            stay_on({core})
        use({core, *others})
        # The next step is likely to follow at once.
        monkeypatch.setattr(executor_module, "IDLE_SECONDS", 60.0)
        with executor.computing():
            use({core})
        stay_on({core})
    finally:
        executor.close()


@pytest.mark.parametrize("core", [1 << 12, 1 << 40, -1])
def test_cores_that_do_not_exist_are_refused_at_the_start(core: int) -> None:
    with pytest.raises(SettingsError) as caught:
        Executor(cores=[core])
    assert caught.value.reason is Reason.INVALID_SETTING
    assert str(core) in caught.value.message


def test_a_load_that_is_given_up_ends_with_the_reason_for_that(executor: Executor) -> None:
    executor.submit(load_of(lambda: None, job_id="cmpl-7"))
    executor.cancel("cmpl-7", lease_lost("cmpl-7"))
    error = error_of(collect(executor, 1)["cmpl-7"])
    assert (error.reason, "cmpl-7" in error.message) == (Reason.LEASE_EXPIRED, True)


def test_results_that_nobody_collects_are_kept_up_to_a_bound_but_every_load_is_reported(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers cause writes, also of an engine that does nothing."""
    monkeypatch.setattr(executor_module, "MAX_REPORTS", 3)

    def failed() -> NoReturn:
        raise ABORTED

    assert (Write.is_for_log, AwaitedLoad.is_for_log) == (True, False)
    for number in range(10):
        write = load_of(failed, job_id=f"write {number}")
        write.is_for_log = True  # type: ignore[misc]
        executor.submit(write)
    for number in range(10):
        executor.submit(load_of(failed, job_id=f"load {number}"))
    wait_until(lambda: len(executor._results) == 13)
    results = executor.collect()
    assert [each.job_id for each in results] == [
        *(f"write {number}" for number in range(3)),
        *(f"load {number}" for number in range(10)),
    ]


def test_the_default_cores_are_those_that_the_process_may_use() -> None:
    """As in a container's set of cores: the machine has others, of which none may be asked for."""
    core = min(os.sched_getaffinity(0))
    asked = "from kvferry.execution.executor import cores_that_do_not_compute as cores; print(*cores())"
    bind = f"import os, subprocess, sys; os.sched_setaffinity(0, [{core}]); "
    parent = bind + f"subprocess.run([sys.executable, '-c', {asked!r}])"
    found = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == [str(core)]


def test_a_worker_that_is_bound_copies_on_the_other_cores_of_its_parent() -> None:
    every = os.sched_getaffinity(0)
    bind = f"import os; os.sched_setaffinity(0, [{min(every)}]); "
    # The thread of a first connector does not compute either.
    asked = (
        "from kvferry.execution.executor import Executor, cores_that_do_not_compute as cores; "
        "first = Executor(cores()); print(*cores()); first.close()"
    )
    command = [sys.executable, "-c", bind + asked]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert set(map(int, found.stdout.split())) == (every - {min(every)} or every)


def test_short_waits_for_orders_end_although_orders_come_meanwhile() -> None:
    """A wait of ``queue.SimpleQueue`` does not always: its lock is free after each order, and a short timeout is over
    when the queue looks again.
    """
    inbox: Inbox[int] = Inbox()
    taken: list[int] = []

    def wait_often() -> None:
        while len(taken) < 20_000:
            inbox.wait(1e-9)
            taken.extend(inbox.take())

    thread = threading.Thread(target=wait_often, daemon=True)
    thread.start()
    for number in range(20_000):
        inbox.put(number)
    thread.join(60)
    assert taken == list(range(20_000))


@pytest.mark.parametrize(
    "bound",
    [{"GOMP_CPU_AFFINITY": "{} {}"}, {"OMP_PLACES": "{{{},{}}}", "OMP_PROC_BIND": "true"}],
    ids=["each thread", "the process"],
)
def test_all_cores_to_which_openmp_binds_a_worker_compute(bound: dict[str, str]) -> None:
    """GOMP_CPU_AFFINITY binds the main thread to the first of the cores only."""
    every = sorted(os.sched_getaffinity(0))
    two = every[0], every[-1]
    asked = (
        "import torch; torch.ones(1 << 20).sum(); "
        "from kvferry.execution.executor import cores_that_compute as cores; print(*cores())"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "2"} | {name: text.format(*two) for name, text in bound.items()}
    command = [sys.executable, "-c", asked]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert set(map(int, found.stdout.split())) == set(two)
