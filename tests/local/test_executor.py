"""Loads and the transfer thread: real bytes over memcpy, and every way to end over a scripted transport."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import ClassVar, NoReturn

import numpy as np
import pytest

from kvferry.arrays import Descriptors
from kvferry.errors import HandoffError, KVFerryError, PlanError, Reason, SettingsError, TransportError
from kvferry.execution import executor as executor_module
from kvferry.execution.destination import AwaitedLoad
from kvferry.execution.destinations import LOOK_SECONDS, Meeting
from kvferry.execution.executor import MAX_WAIT_SECONDS, WAIT_SECONDS, Executor
from kvferry.execution.guard_words import GuardWords, Scratch
from kvferry.execution.job import JobResult, Phase
from kvferry.execution.read import Guard, RankRead, Read
from kvferry.execution.source import Write
from kvferry.handoff.guard_word import CLEARED, WORD_BYTES
from kvferry.handoff.holds import lease_lost
from kvferry.handoff.pull_read import State
from kvferry.transport.memcpy import MemcpyTransport
from kvferry.transport.protocol import (
    Capabilities,
    Direction,
    Peer,
    Region,
    RegionTable,
    Status,
    Transfer,
    Transport,
    reach,
)
from kvferry.transport.registry import Link

from ..waits import wait_until

SLOT, WORD = 1, bytes(range(1, 17))
NUM_BYTES = 1 << 16
FAR = 1e12
ABORTED = HandoffError(Reason.ABORTED, "the request was aborted.")


def region(array: np.ndarray) -> Region:
    return Region(array.ctypes.data, array.nbytes)


class ScriptedTransport:
    """Copies on ``poll``, when the script lets it; the script is the public attributes."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(name="scripted", cancel_is_immediate=False)
        self.holds_words = self.holds_data = False
        self.polls_until_quiet = 0
        self.before_data: Callable[[], None] = lambda: None
        self.after_data: Callable[[], None] = lambda: None
        self.fails_data: TransportError | None = None
        self.drops_words_after_data = False
        self.cancel_raises = False
        self.submitted: list[str] = []
        self.num_pending = 0
        self._rows: dict[int, Descriptors] = {}

    def register(self, regions: Sequence[Region]) -> bytes:
        raise NotImplementedError

    def connect(self, end_point: bytes) -> Peer:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def submit(self, peer: Peer, direction: Direction, descriptors: Descriptors) -> Transfer:
        assert direction is Direction.READ
        transfer = Transfer(peer, direction, len(descriptors), int(descriptors[:, 2].sum()))
        kind = "word" if transfer.num_bytes == WORD_BYTES else "data"
        self.submitted.append(kind)
        self._rows[id(transfer)] = descriptors.copy()
        self.num_pending += 1
        return transfer

    def poll(self, transfer: Transfer) -> Status:
        is_word = transfer.num_bytes == WORD_BYTES
        if transfer.status is not Status.PENDING or (self.holds_words if is_word else self.holds_data):
            return transfer.status
        if not is_word and self.fails_data is not None:
            self.num_pending -= 1
            return transfer.fail(self.fails_data)
        if not is_word:
            self.before_data()
        if not (is_word and self.drops_words_after_data and "data" in self.submitted):
            for source, destination, length in self._rows[id(transfer)].tolist():
                ctypes.memmove(destination, source, length)
        if not is_word:
            self.after_data()
        transfer.bytes_done, transfer.status = transfer.num_bytes, Status.DONE
        self.num_pending -= 1
        return transfer.status

    def cancel(self, transfer: Transfer) -> Status:
        if self.cancel_raises:
            raise RuntimeError("cancel failed")
        if self.polls_until_quiet > 0:
            self.polls_until_quiet -= 1
            return Status.PENDING
        transfer.status = Status.CANCELLED
        self.num_pending -= 1
        return transfer.status


class Source:
    """A held request of one rank: labelled bytes, its guard word, and the local memory they are read into."""

    alive: ClassVar[list["Source"]] = []
    """Descriptors are addresses: whatever they point to stays."""

    def __init__(self, seed: int = 0, num_bytes: int = NUM_BYTES) -> None:
        self.alive.append(self)
        self.data = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
        self.destination = np.zeros(num_bytes, dtype=np.uint8)
        self.words = GuardWords(num_slots=4)
        self.words.set(SLOT, WORD)
        # Descending descriptors of unequal length, as block ids come.
        edges = np.array([0, num_bytes // 8, num_bytes // 2, num_bytes], dtype=np.uint64)
        starts, lengths = edges[:-1][::-1], np.diff(edges)[::-1]
        base = np.uint64(self.data.ctypes.data), np.uint64(self.destination.ctypes.data)
        self.descriptors = np.stack([starts + base[0], starts + base[1], lengths], axis=1)

    def read(self, transport: Transport, peer: Peer | None = None, expected: bytes | None = None) -> RankRead:
        guard = Guard(self.words.address + SLOT * WORD_BYTES, expected or WORD)
        link = Link(transport.capabilities.name, transport, peer or Peer("scripted", RegionTable([])))
        return RankRead(link, self.descriptors, guard=guard)

    @property
    def is_whole(self) -> bool:
        return bool((self.destination == self.data).all())


def load_of(prepare: Callable[[], Sequence[RankRead] | None], deadline: float = FAR, job_id: str = "r") -> Read:
    return Read(job_id, prepare, deadline)


def run(load: Read, scratch: Scratch, now: float = 0.0, max_steps: int = 1000) -> JobResult:
    for _ in range(max_steps):
        load.advance(scratch, now)
        if load.phase is Phase.DONE:
            return load.result(now)
    raise AssertionError(f"still {load.phase}")


def error_of(result: JobResult) -> KVFerryError:
    assert result.error is not None
    return result.error


@pytest.fixture
def scratch() -> Scratch:
    return Scratch(num_words=8)


@pytest.fixture
def transport() -> ScriptedTransport:
    return ScriptedTransport()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def executor(scratch: Scratch) -> Iterator[Executor]:
    executor = Executor(scratch)
    yield executor
    executor.close()


# One load, step by step.


def test_two_ranks_commit_with_exact_bytes_over_memcpy(scratch: Scratch) -> None:
    sources = [Source(seed) for seed in range(2)]
    transports = [MemcpyTransport() for _ in sources]
    destination = MemcpyTransport()
    destination.register([scratch.region, *(region(source.destination) for source in sources)])
    reads = []
    for source, transport in zip(sources, transports, strict=True):
        end_point = transport.register([region(source.data), region(source.words.array)])
        reads.append(source.read(destination, reach(destination, end_point)))
    result = run(load_of(lambda: reads), scratch)
    assert result.error is None
    assert all(source.is_whole for source in sources)
    assert (result.num_bytes, result.num_descriptors, result.num_sources) == (2 * NUM_BYTES, 6, 2)
    assert result.num_staged_bytes == 0
    assert result.transport == "memcpy"
    assert scratch.has_room(8)


def test_the_order_is_words_data_words(transport: ScriptedTransport, source: Source, scratch: Scratch) -> None:
    other = Source(1)
    result = run(load_of(lambda: [source.read(transport), other.read(transport)]), scratch)
    assert result.error is None
    assert transport.submitted == ["word", "word", "data", "data", "word", "word"]


def test_no_word_is_read_again_before_all_data_has_come(
    transport: ScriptedTransport, source: Source, scratch: Scratch
) -> None:
    slow = ScriptedTransport()
    slow.holds_data = True
    load = load_of(lambda: [source.read(transport), Source(1).read(slow)])
    for _ in range(50):
        load.advance(scratch, 0.0)
    assert load._pull.state is State.DATA
    assert transport.submitted == ["word", "data"]
    slow.holds_data = False
    assert run(load, scratch).error is None


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        (CLEARED, Reason.SOURCE_CHANGED),
        (WORD[:8] + CLEARED[8:], Reason.SOURCE_CHANGED),
        (WORD[::-1], Reason.WRONG_PARAMETERS),
        (bytes([WORD[0] ^ 2, *WORD[1:]]), Reason.WRONG_PARAMETERS),
    ],
)
def test_a_wrong_word_before_means_no_data_is_read(
    transport: ScriptedTransport, source: Source, scratch: Scratch, word: bytes, reason: Reason
) -> None:
    source.words.set(SLOT, word)
    error = error_of(run(load_of(lambda: [source.read(transport)]), scratch))
    assert error.reason is reason
    assert "data" not in transport.submitted
    assert not source.destination.any()
    assert scratch.has_room(8)


@pytest.mark.parametrize("moment", ["before_data", "after_data"])
def test_aws_do_eks_84_a_word_that_changes_while_the_data_is_read_is_no_commit(
    transport: ScriptedTransport, source: Source, scratch: Scratch, moment: str
) -> None:
    setattr(transport, moment, lambda: source.words.clear(SLOT))
    error = error_of(run(load_of(lambda: [Source(1).read(transport), source.read(transport)]), scratch))
    assert error.reason is Reason.SOURCE_CHANGED
    assert "while" in error.message


def test_a_word_that_never_lands_is_not_taken_for_the_one_read_before(
    transport: ScriptedTransport, source: Source, scratch: Scratch
) -> None:
    transport.drops_words_after_data = True
    error = error_of(run(load_of(lambda: [source.read(transport)]), scratch))
    assert error.reason is Reason.SOURCE_CHANGED


def test_deadline_while_preparing(scratch: Scratch) -> None:
    load = load_of(lambda: None, deadline=10.0)
    assert not load.advance(scratch, 9.99)
    error = error_of(run(load, scratch, now=10.0, max_steps=1))
    assert error.reason is Reason.DEADLINE_EXCEEDED
    assert "preparing" in error.message


def test_deadline_while_the_data_is_pending_waits_until_the_transfer_is_quiet(
    transport: ScriptedTransport, source: Source, scratch: Scratch
) -> None:
    transport.holds_data, transport.polls_until_quiet = True, 5
    load = load_of(lambda: [source.read(transport)], deadline=10.0)
    for _ in range(10):
        load.advance(scratch, 0.0)
    assert load._pull.state is State.DATA
    for _ in range(5):
        load.advance(scratch, 10.0)
        assert load.phase.name == "STOPPING"
        assert not scratch.has_room(8), "the word's memory was given away under a transfer"
    error = error_of(run(load, scratch, now=10.0, max_steps=1))
    assert error.reason is Reason.DEADLINE_EXCEEDED
    assert "reading the data" in error.message
    assert transport.num_pending == 0
    assert scratch.has_room(8)


def test_a_failed_load_counts_no_bytes(transport: ScriptedTransport, source: Source, scratch: Scratch) -> None:
    """The words before are right, all data lands, the words behind are wrong: nothing of it is used."""
    transport.after_data = lambda: source.words.clear(SLOT)
    result = run(load_of(lambda: [source.read(transport)]), scratch)
    assert error_of(result).reason is Reason.SOURCE_CHANGED
    assert source.is_whole
    assert (result.num_bytes, result.num_staged_bytes, result.num_descriptors) == (0, 0, 3)


def test_deadline_while_the_words_are_pending(transport: ScriptedTransport, source: Source, scratch: Scratch) -> None:
    transport.holds_words = True
    load = load_of(lambda: [source.read(transport)], deadline=10.0)
    load.advance(scratch, 0.0)
    assert error_of(run(load, scratch, now=11.0)).reason is Reason.DEADLINE_EXCEEDED
    assert transport.num_pending == 0


def test_one_failed_rank_stops_the_others(transport: ScriptedTransport, source: Source, scratch: Scratch) -> None:
    failing, slow = transport, ScriptedTransport()
    failing.fails_data = TransportError(Reason.PEER_DIED, "gone.")
    slow.holds_data = True
    result = run(load_of(lambda: [Source(1).read(slow), source.read(failing)]), scratch)
    assert str(error_of(result)) == str(failing.fails_data)
    assert slow.num_pending == 0
    assert scratch.has_room(8)


def test_a_submission_that_is_refused_stops_those_before_it(scratch: Scratch, source: Source) -> None:
    slow, memcpy = ScriptedTransport(), MemcpyTransport()
    slow.holds_words = True
    peer = reach(memcpy, memcpy.register([region(source.data)]))
    error = error_of(run(load_of(lambda: [Source(1).read(slow), source.read(memcpy, peer)]), scratch))
    assert error.reason is Reason.UNREGISTERED_RANGE
    assert slow.num_pending == 0
    assert scratch.has_room(8)


def test_a_load_that_waits_for_scratch_is_prepared_once(
    transport: ScriptedTransport, source: Source, scratch: Scratch
) -> None:
    taken, calls = scratch.take(8), []

    def prepare() -> Sequence[RankRead]:
        calls.append(1)
        return [source.read(transport)]

    load = load_of(prepare)
    for _ in range(10):
        assert not load.advance(scratch, 0.0)
    scratch.give_back(taken)
    assert run(load, scratch).error is None
    assert len(calls) == 1


def test_descriptors_of_another_shape_are_no_read(source: Source, transport: ScriptedTransport) -> None:
    source.descriptors = source.descriptors[:, :2]
    with pytest.raises(TransportError) as caught:
        source.read(transport)
    assert caught.value.reason is Reason.INVALID_REQUEST


# The thread.


def collect(executor: Executor, number: int, seconds: float = 30.0) -> dict[str, JobResult]:
    results: list[JobResult] = []
    end = time.monotonic() + seconds
    while len(results) < number:
        assert time.monotonic() < end, f"only {len(results)} of {number} loads ended"
        results += executor.collect()
        time.sleep(0.001)
    assert max(Counter(result.job_id for result in results).values(), default=1) == 1
    return {result.job_id: result for result in results}


def test_more_loads_than_scratch_words_all_commit(transport: ScriptedTransport) -> None:
    executor = Executor()
    sources = [Source(seed, num_bytes=256) for seed in range(40)]
    try:
        for number in range(20):
            reads = [source.read(transport) for source in sources[2 * number : 2 * number + 2]]
            executor.submit(load_of(lambda reads=reads: reads, job_id=str(number)))  # type: ignore[misc]
        assert {result.error for result in collect(executor, 20).values()} == {None}
        assert all(source.is_whole for source in sources)
    finally:
        executor.close()


def test_a_load_that_needs_more_words_than_there_are_ends_at_its_deadline(transport: ScriptedTransport) -> None:
    executor = Executor()
    try:
        reads = [Source(seed).read(transport) for seed in range(2)]
        executor.submit(load_of(lambda: reads, deadline=time.monotonic() + 0.1, job_id="large"))
        executor.submit(load_of(lambda: reads[:1], job_id="small"))
        results = collect(executor, 2)
        assert results["small"].error is None
        assert error_of(results["large"]).reason is Reason.DEADLINE_EXCEEDED
    finally:
        executor.close()


def test_cancel_before_the_start_in_the_middle_and_afterwards(
    executor: Executor, transport: ScriptedTransport, source: Source
) -> None:
    executor.submit(load_of(lambda: None, job_id="preparing"))
    executor.cancel("preparing", ABORTED)
    assert error_of(collect(executor, 1)["preparing"]).reason is Reason.ABORTED

    transport.holds_data, transport.polls_until_quiet = True, 20
    executor.submit(load_of(lambda: [source.read(transport)], job_id="middle"))
    wait_until(lambda: "data" in transport.submitted)
    executor.cancel("middle", ABORTED)
    executor.cancel("middle", ABORTED)
    assert error_of(collect(executor, 1)["middle"]).reason is Reason.ABORTED
    assert transport.num_pending == 0

    transport.holds_data = False
    executor.submit(load_of(lambda: [source.read(transport)], job_id="done"))
    assert collect(executor, 1)["done"].error is None
    executor.cancel("done", ABORTED)
    executor.cancel("never heard of", ABORTED)
    time.sleep(0.05)
    assert executor.collect() == []


def test_collecting_waits_for_the_first_that_ends(executor: Executor, source: Source) -> None:
    assert executor.collect(0.01) == []
    transport = ScriptedTransport()
    transport.before_data = lambda: time.sleep(0.05)
    executor.submit(load_of(lambda: [source.read(transport)]))
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
    executor: Executor, transport: ScriptedTransport, source: Source, raised: Exception, reason: Reason
) -> None:
    def prepare() -> None:
        raise raised

    executor.submit(load_of(prepare, job_id="bad"))
    executor.submit(load_of(lambda: [source.read(transport)], job_id="good"))
    results = collect(executor, 2)
    assert error_of(results["bad"]).reason is reason
    assert results["good"].error is None


def test_a_fault_in_a_turn_ends_neither_the_thread_nor_leaves_a_load_without_end(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Read, "result", lambda *_: 1 / 0)
    executor.submit(load_of(lambda: [], job_id="a"))
    assert error_of(collect(executor, 1)["a"]).reason is Reason.TRANSFER_FAILED
    monkeypatch.undo()
    monkeypatch.setattr(Executor, "_report_if_late", lambda *_: 1 / 0)
    executor.submit(load_of(lambda: None, job_id="b"))
    wait_until(lambda: "a turn of the transfer thread failed" in caplog.text)
    monkeypatch.undo()
    executor.submit(load_of(lambda: [], job_id="c"))
    assert collect(executor, 1)["c"].error is None


def test_a_transfer_that_cannot_even_be_stopped_keeps_no_other_waiting(
    executor: Executor, transport: ScriptedTransport, source: Source
) -> None:
    stuck = ScriptedTransport()
    stuck.holds_data = stuck.cancel_raises = True
    executor.submit(load_of(lambda: [Source(1).read(stuck)], job_id="stuck"))
    wait_until(lambda: "data" in stuck.submitted)
    executor.cancel("stuck", ABORTED)
    executor.submit(load_of(lambda: [source.read(transport)], job_id="good"))
    assert collect(executor, 1)["good"].error is None
    stuck.cancel_raises = False
    assert error_of(collect(executor, 1)["stuck"]).reason is Reason.ABORTED


def test_a_deadline_is_kept_while_an_earlier_load_moves(
    executor: Executor, transport: ScriptedTransport, source: Source
) -> None:
    """An early load that always moves goes first, but not before one whose time is over."""
    endless = EndlessTransport()
    executor.submit(load_of(lambda: [Source(1).read(endless)], job_id="endless"))
    wait_until(lambda: "data" in endless.submitted)
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

    def advance(self, scratch: Scratch, now: float) -> bool:
        self.phase = Phase.DONE
        self._executor.submit(Ended(self._executor, self._number + 1))
        return True

    def is_ending(self, now: float) -> bool:
        return True

    def cancel(self, error: KVFerryError) -> None:
        self.phase = Phase.DONE

    def result(self, finished_at: float) -> JobResult:
        return JobResult(self.job_id, None)


def test_pushes_that_are_given_up_one_after_the_other_keep_no_transfer_waiting(
    executor: Executor, transport: ScriptedTransport, source: Source
) -> None:
    """Strangers announce as many as they like; those that are over go first, since they keep their blocks."""
    executor.submit(Ended(executor, 0))
    executor.submit(load_of(lambda: [source.read(transport)], job_id="good"))
    results: dict[str, JobResult] = {}
    wait_until(lambda: results.update({each.job_id: each for each in executor.collect()}) or "good" in results)
    assert results["good"].error is None


class Connection:
    """Of a meeting; it is made once it may be."""

    name = "cma"

    def __init__(self) -> None:
        self.num_looks = 0
        self.is_made = False

    def poll(self) -> "Connection | None":
        self.num_looks += 1
        return self if self.is_made else None


def test_a_destination_is_met_while_transfers_never_pause_and_one_that_does_not_answer_holds_them_up_little(
    executor: Executor,
) -> None:
    """Unmet it would read for ten minutes; and strangers may have a rank connect to a thousand silent addresses."""
    endless, connection, told = EndlessTransport(), Connection(), threading.Event()
    executor.submit(load_of(lambda: [Source(1).read(endless)], job_id="endless"))
    wait_until(lambda: "data" in endless.submitted)
    began_at = time.monotonic()
    executor.submit(Meeting("meeting", connection, 0, told.set, lambda: connection))  # type: ignore[arg-type]
    wait_until(lambda: connection.num_looks >= 5)
    assert connection.num_looks <= (time.monotonic() - began_at) / LOOK_SECONDS + 1
    assert not told.is_set()
    connection.is_made = True
    assert told.wait(20.0)
    assert collect(executor, 1)["meeting"].error is None
    executor.cancel("endless", ABORTED)
    assert error_of(collect(executor, 1)["endless"]).reason is Reason.ABORTED


class EndlessTransport(ScriptedTransport):
    """Its data always moves a little and never ends."""

    def poll(self, transfer: Transfer) -> Status:
        if transfer.num_bytes > WORD_BYTES:
            transfer.bytes_done += 1
            return Status.PENDING
        return super().poll(transfer)


@pytest.mark.parametrize("seed", range(40))
def test_every_load_ends_exactly_once_whatever_happens(seed: int) -> None:
    """Random loads, failures, cancellations and delays: one result each, and nothing left behind."""
    random = Random(seed)
    scratch = Scratch(num_words=5)
    executor = Executor(scratch)
    transports = [ScriptedTransport() for _ in range(3)]
    transports[1].fails_data = TransportError(Reason.PEER_DIED, "gone.")
    transports[2].holds_data, transports[2].polls_until_quiet = True, random.randrange(30)
    outcomes: dict[str, Source] = {}
    try:
        for number in range(30):
            source, job_id = Source(number, num_bytes=128), str(number)
            reads = [source.read(random.choice(transports[:1] * 4 + transports)) for _ in range(random.randint(1, 3))]
            waits = iter([None] * random.randrange(5))
            deadline = time.monotonic() + random.choice([0.0, 0.02, 0.05])
            deadline = FAR if all(read.link.transport is transports[0] for read in reads) else deadline
            executor.submit(
                load_of(lambda waits=waits, reads=reads: next(waits, reads), deadline, job_id)  # type: ignore[misc]
            )
            outcomes[job_id] = source
            if random.random() < 0.3:
                executor.cancel(str(random.randrange(number + 1)), ABORTED)
        results = collect(executor, 30)
    finally:
        executor.close()
    assert executor.collect() == []
    assert results.keys() == outcomes.keys()
    assert all(outcomes[job_id].is_whole for job_id, result in results.items() if result.error is None)
    assert any(result.error is None for result in results.values())
    assert scratch.has_room(5)
    assert not scratch.has_room(6)
    assert sum(transport.num_pending for transport in transports) == 0


def test_a_transfer_that_does_not_end_is_logged_and_keeps_its_load(
    transport: ScriptedTransport, source: Source, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As over NIXL from a stopped process: what may still land keeps its blocks, and the log says so."""
    monkeypatch.setattr(executor_module, "QUIET_SECONDS", 0.02)
    executor = Executor()
    transport.holds_data, transport.polls_until_quiet = True, 1 << 60
    try:
        executor.submit(load_of(lambda: [source.read(transport)], deadline=time.monotonic() + 0.05, job_id="stuck"))
        wait_until(lambda: bool(caplog.messages))
        time.sleep(0.05)
        assert [("cannot be revoked" in text, "deadline-exceeded" in text) for text in caplog.messages] == [
            (True, True)
        ]
        assert executor.collect() == []
        transport.polls_until_quiet = 0
        assert error_of(collect(executor, 1)["stuck"]).reason is Reason.DEADLINE_EXCEEDED
        assert "stuck ended" in caplog.messages[-1]
    finally:
        executor.close()


def test_a_quarantined_load_ends_before_it_is_quiet_and_is_reported_when_quiet(
    transport: ScriptedTransport, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the report that the load is not quiet: until then its blocks are not quarantined."""
    monkeypatch.setattr(executor_module, "QUIET_SECONDS", 0.1)
    reports: list[frozenset[str]] = []
    executor = Executor(report_still_writing=reports.append)
    transport.holds_data, transport.polls_until_quiet = True, 1 << 60
    try:
        executor.submit(load_of(lambda: [source.read(transport)], deadline=time.monotonic() + 0.05, job_id="stuck"))
        executor.quarantine("stuck")
        wait_until(lambda: reports == [frozenset({"stuck"})])
        assert executor.collect() == []
        for job_id in ("another", "stuck", "stuck"):
            executor.quarantine(job_id)
        assert error_of(collect(executor, 1)["stuck"]).reason is Reason.DEADLINE_EXCEEDED
        assert transport.num_pending > 0
        transport.polls_until_quiet = 0
        wait_until(lambda: reports[1:] == [frozenset()])
        assert transport.num_pending == 0
        assert executor.collect() == [], "reported twice"
    finally:
        executor.close()


def test_close_gives_up_what_is_in_progress_once_it_is_quiet(transport: ScriptedTransport, source: Source) -> None:
    executor = Executor()
    transport.holds_data, transport.polls_until_quiet = True, 20
    executor.submit(load_of(lambda: [source.read(transport)], job_id="moving"))
    wait_until(lambda: "data" in transport.submitted)
    executor.submit(load_of(lambda: None, job_id="queued"))
    assert executor.close()
    assert executor.close()
    assert not executor._thread.is_alive()
    assert transport.num_pending == 0
    assert {error_of(result).reason for result in collect(executor, 2).values()} == {Reason.CLOSED}


def test_close_returns_within_its_bound_although_a_transfer_stays(transport: ScriptedTransport, source: Source) -> None:
    executor = Executor()
    transport.holds_data, transport.polls_until_quiet = True, 1 << 60
    executor.submit(load_of(lambda: [source.read(transport)]))
    wait_until(lambda: "data" in transport.submitted)
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


def test_a_load_that_waits_is_not_asked_without_pause(executor: Executor) -> None:
    asked: list[float] = []
    executor.submit(load_of(lambda: asked.append(time.monotonic()), job_id="waiting"))
    time.sleep(0.3)
    executor.cancel("waiting", ABORTED)
    collect(executor, 1)
    assert 2 <= len(asked) <= (asked[-1] - asked[0]) / WAIT_SECONDS + 1


def test_a_load_that_waits_for_long_is_asked_less_often_and_keeps_no_other_waiting(
    executor: Executor, transport: ScriptedTransport, source: Source
) -> None:
    asked: list[float] = []
    executor.submit(load_of(lambda: asked.append(time.monotonic()), job_id="waiting"))
    time.sleep(0.6)
    later, since = len(asked), time.monotonic()
    time.sleep(0.2)
    assert 1 <= len(asked) - later <= (time.monotonic() - since) / MAX_WAIT_SECONDS + 2
    executor.submit(load_of(lambda: [source.read(transport)], job_id="other"))
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
    """Peers cause writes and meetings, also of an engine that does nothing."""
    monkeypatch.setattr(executor_module, "MAX_REPORTS", 3)

    def failed() -> NoReturn:
        raise ABORTED

    assert (Write.is_for_log, Meeting.is_for_log, AwaitedLoad.is_for_log) == (True, True, False)
    for number in range(10):
        write = Read(f"write {number}", failed, FAR)
        write.is_for_log = True
        executor.submit(write)
    for number in range(10):
        executor.submit(Read(f"load {number}", failed, FAR))
    wait_until(lambda: executor._results.qsize() == 13)
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
    asked = bind + "from kvferry.execution.executor import cores_that_do_not_compute as cores; print(*cores())"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    assert set(map(int, found.stdout.split())) == (every - {min(every)} or every)
