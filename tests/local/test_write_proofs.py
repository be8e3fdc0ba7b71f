"""What proves that a source writes no more, and what does not: refused connections, ended processes, fences."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from kvferry.errors import HandoffError, KVFerryError, Reason, TransportError
from kvferry.execution import destination
from kvferry.execution.destination import Announcer
from kvferry.execution.executor import JobResult, Phase
from kvferry.execution.peers import Peers
from kvferry.handoff.holds import handle_of_transfer
from kvferry.handoff.messages import (
    Announce,
    Handle,
    Noted,
    Question,
    Release,
    WriteFailed,
    WriteKey,
    WriteSeconds,
    Written,
)
from kvferry.handoff.remote_holds import RemoteHold
from kvferry.handoff.source import END
from kvferry.handoff.wire.client import ask
from kvferry.layout.shard import Region
from kvferry.transport import registry
from kvferry.transport.network import Network
from kvferry.transport.protocol import (
    Capabilities,
    Direction,
    Peer,
    ProcessIdentity,
    Status,
    Transfer,
    Transport,
    own_identity,
    parse_start_time,
    read_stat,
)
from kvferry.transport.registry import Connecting, Link, TransportSet

from ..support.faults import FaultPlan, FaultyTransport
from ..support.null_transport import NullTransport
from ..waits import wait_until
from .engines_in_process import EPOCH, HOST, Rank
from .engines_that_write import (
    Pairs,
    Parts,
    ReceivingRank,
    SendingEngine,
    check_arrived,
    engines,
    questions_to_own_engine,
)

pytestmark = pytest.mark.slow

__all__ = ["engines"]

SECONDS = 20.0


@pytest.fixture(autouse=True)
def _loopback_reaches_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are said to be on another host are on this one."""
    monkeypatch.setattr(destination, "is_on_this_host", lambda _: True)


@contextmanager
def running_process() -> Iterator[tuple[ProcessIdentity, subprocess.Popen[bytes]]]:
    """A process that stands for the one of a source rank, which is in the test's process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            start_time = parse_start_time(read_stat(child.pid))
            yield msgspec.structs.replace(own_identity(), pid=child.pid, start_time=start_time), child
        finally:
            child.kill()


def elsewhere() -> ProcessIdentity:
    return msgspec.structs.replace(own_identity(), boot_id="of another host")


def is_introduced(sender: SendingEngine) -> bool:
    return all(rank.writer._writes.num_open for rank in sender.ranks)


def test_hole_1_a_refused_connection_does_not_prove_that_the_sender_has_ended(engines: Pairs) -> None:
    """A firewall answers the same. The sender goes on writing, into blocks that the engine must still keep."""
    sender, [receiver] = engines.open(process=elsewhere())
    [source] = sender.ranks
    receiver.receive(sender.hold(), [0, 3])
    wait_until(lambda: is_introduced(sender))
    source.listener.close()
    assert receiver.is_waiting(2.5)
    assert [job.error is not None and job.error.reason for job in receiver.executor._active] == [
        Reason.PEER_UNREACHABLE
    ], "the client need not wait"
    sender.compute(END, [5, 1])
    wait_until(lambda: np.array_equal(receiver.rank.cache[[0, 3]], source.rank.cache[[5, 1]]))


def test_another_process_at_the_senders_address_does_not_prove_that_the_sender_has_ended(engines: Pairs) -> None:
    """An address may be given to another host while the former process lives behind it."""
    sender, [receiver] = engines.open(process=elsewhere())
    [source] = sender.ranks
    receiver.receive(sender.hold(), [0, 3])
    wait_until(lambda: is_introduced(sender))

    def refuse(question: Question) -> Noted:
        raise HandoffError(Reason.PEER_CHANGED, "another epoch.")

    writer, source.answerer = source.answerer, type("Other", (), {"answer": staticmethod(refuse)})()
    receiver.executor.cancel("r", HandoffError(Reason.ABORTED, "the client went away."))
    assert receiver.is_waiting(1.5)
    source.answerer = writer
    error = receiver.result(10.0).error
    assert error is not None


@pytest.mark.parametrize("kind", ["failed", "landed"])
def test_a_strangers_report_does_not_give_blocks_back_that_the_sender_still_writes(kind: str, engines: Pairs) -> None:
    """Without keys everybody may report, and a refusal names the rank and its epoch: both are no secrets."""
    sender, [receiver] = engines.open()
    receiver.receive(sender.hold(), [0, 3])
    wait_until(lambda: is_introduced(sender))
    with pytest.raises(HandoffError, match="this rank is") as refused:
        report(receiver, WriteKey("?", 0, 1), kind)
    found = re.search(r"this rank is (\S+) in epoch (\d+)", refused.value.message)
    assert found is not None
    for number in range(100):
        report(receiver, WriteKey(found[1], int(found[2]), number), kind)
    assert receiver.is_waiting()
    sender.compute(END, [5, 1])
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [5, 1], [0, 3])


def report(receiver: ReceivingRank, key: WriteKey, kind: str) -> None:
    failed = WriteFailed("aborted", "it is given up.", key=key, source_index=0, may_land=False)
    landed = Written(key, 0, "of another part", 0, 0, "cma", WriteSeconds())
    ask(HOST, receiver.answers_at.port, failed if kind == "failed" else landed, SECONDS)


def test_the_end_of_the_senders_process_is_proof_on_one_host(engines: Pairs) -> None:
    with running_process() as (process, child):
        sender, [receiver] = engines.open(process=process)
        receiver.receive(sender.hold(), [0, 3])
        wait_until(lambda: is_introduced(sender))
        sender.ranks[0].listener.close()
        assert receiver.is_waiting(1.5)
        child.kill()
        child.wait()
        error = receiver.result(5.0).error
    assert error is not None
    assert error.reason in (Reason.PEER_DIED, Reason.PEER_UNREACHABLE)


def test_nothing_is_announced_to_a_process_that_has_ended(engines: Pairs) -> None:
    with running_process() as (process, child):
        sender, [receiver] = engines.open(process=process)
        child.kill()
        child.wait()
        receiver.receive(sender.hold(), [0, 3])
        error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.PEER_DIED
    assert sender.ranks[0].writer._writes.num_open == 0


def test_a_process_is_known_by_its_start_time_and_its_end_by_a_descriptor() -> None:
    peers = Peers()
    with running_process() as (process, child):
        later = msgspec.structs.replace(process, start_time=process.start_time - 1)
        assert not peers.meet(later), "the pid is that of a later process"
        assert peers.meet(process)
        assert not peers.has_ended(process)
        child.kill()
        wait_until(lambda: peers.has_ended(process))
        child.wait()
        assert peers.has_ended(process)
        assert not Peers().has_ended(process), "nobody who has not held the process knows that"
        assert not Peers().meet(process)


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_of_a_process_elsewhere_nothing_is_known(field: str) -> None:
    """Its pid may be free here, or another process's."""
    peers = Peers()
    value = "of another host" if field == "boot_id" else 1
    other = msgspec.structs.replace(own_identity(), pid=(1 << 22) + 5, **{field: value})
    assert (peers.meet(other), peers.has_ended(other), peers.is_elsewhere(other)) == (True, False, True)
    assert (peers.meet(None), peers.has_ended(None), peers.is_elsewhere(None)) == (True, False, False)
    assert peers.is_elsewhere(other, "cuda:0") is (field == "boot_id"), "all of one host may map a GPU's memory"


# Fences.

TRANSPORTS = [
    "nixl",
    pytest.param("mooncake", marks=pytest.mark.mooncake),
]


def plan_of(sender: SendingEngine, plan: FaultPlan) -> None:
    for rank in sender.ranks:
        for transport in rank.transports.transports.values():
            assert isinstance(transport, FaultyTransport)
            transport._plan = plan


class Vanishing:
    """Lets the writes of a sender hang, whose host has vanished or is stopped: they cannot be revoked either."""

    def __init__(self, sender: SendingEngine, patch: pytest.MonkeyPatch) -> None:
        self._sender = sender
        for rank in sender.ranks:
            for transport in rank.transports.transports.values():
                patch.setattr(transport, "cancel", self._cancel)
        self._is_back = False

    def _cancel(self, transfer: Transfer) -> Status:
        return transfer.cancel() if self._is_back else Status.PENDING

    def come_back(self) -> None:
        self._is_back = True
        plan_of(self._sender, FaultPlan())


def old_links(sender: SendingEngine) -> list[Link]:
    links = [known.link for rank in sender.ranks for known in rank.writer.destinations.known.values()]
    assert all(isinstance(link, Link) or link.name for link in links)
    found = [link.poll() for link in links]
    return [link for link in found if link is not None]


def require(transport: str) -> None:
    pytest.importorskip({"nixl": "nixl", "mooncake": "mooncake.engine"}[transport], exc_type=ImportError)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_hole_2_a_sender_whose_host_vanished_is_fenced_and_the_blocks_come_back(
    transport: str, engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write hangs and is never confirmed. After the fence no byte lands by the former end point, and the next push
    goes to the memory that was registered anew.
    """
    require(transport)
    sender, [receiver] = engines.open(
        faults=FaultPlan(hang=True), transport=transport, process=elsewhere(), fence_seconds=0.5
    )
    [source] = sender.ranks
    vanishing = Vanishing(sender, monkeypatch)
    receiver.receive(sender.hold(), [0, 3], seconds=2.0)
    sender.compute(END, [5, 1])
    wait_until(lambda: any(known.link.name for known in source.writer.destinations.known.values()))
    [link] = old_links(sender)
    error = receiver.result(15.0).error
    assert error is not None
    assert error.reason is Reason.DEADLINE_EXCEEDED
    assert receiver.announcer.num_fences == 1
    check_dead(link, source.rank.cache, receiver.rank.cache)
    vanishing.come_back()
    receiver.receive(sender.hold(), [2, 4], "y", "s")
    sender.compute(END, [5, 1], "y")
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [5, 1], [2, 4])
    assert [known.registration for known in source.writer.destinations.known.values()] == [1]


def check_dead(link: Link, sent: np.ndarray, cache: np.ndarray) -> None:
    """Write by a link whose other end was closed: it must not arrive."""
    cache[:] = 7
    row = np.array([[sent.ctypes.data, cache.ctypes.data, 4096]], np.uint64)
    inner = link.transport._inner if isinstance(link.transport, FaultyTransport) else link.transport
    try:
        transfer = inner.submit(link.peer, Direction.WRITE, row)
        end = time.monotonic() + 3.0
        while inner.poll(transfer) is Status.PENDING and time.monotonic() < end:
            time.sleep(0.002)
        assert transfer.status is not Status.DONE
    except TransportError:
        pass
    assert (cache == 7).all()


@contextmanager
def writing_process(transport: str, boot_id: str) -> Iterator[tuple[RemoteHold, subprocess.Popen[bytes]]]:
    """A prefill engine that pushes slowly, in a process that a test may stop or kill. UCX uses TCP only."""
    arguments = [sys.executable, "-m", "tests.local.writing_process", transport, boot_id]
    root = Path(__file__).parents[2]
    environment = os.environ | {"UCX_TLS": "tcp", "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    child = subprocess.Popen(
        arguments, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        yield RemoteHold("p", EPOCH, HOST, port, Handle("x", 0)), child
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("end", ["stopped", "killed"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_of_a_sender_that_was_stopped_or_killed_lands_after_the_blocks_were_given_back(
    transport: str, end: str
) -> None:
    """A process of its own, whose bytes are on their way. The stopped one, which seems to be on another host, goes on
    after the fence.
    """
    require(transport)
    receiver = ReceivingRank(Rank(0, 1), transport=transport, fence_seconds=0.3)
    cache = receiver.rank.cache
    try:
        with writing_process(transport, "of another host" if end == "stopped" else "") as (hold, child):
            receiver.receive(hold, [0, 1, 2, 3], seconds=2.5)
            wait_until(lambda: bool(cache.any()))
            assert not cache[3].all(), "the push is not over"
            child.send_signal(signal.SIGSTOP if end == "stopped" else signal.SIGKILL)
            error = receiver.result(12.0).error
            assert error is not None
            assert error.reason is (Reason.DEADLINE_EXCEEDED if end == "stopped" else Reason.PEER_DIED)
            assert receiver.announcer.num_fences == 1
            cache[:] = 7
            if end == "stopped":
                child.send_signal(signal.SIGCONT)
            time.sleep(2.0)
            assert (cache == 7).all()
    finally:
        receiver.close()


SLOW = 4096
"""Bytes a second: a write of two blocks takes a second or two."""


class Fencing:
    """A job that fences a rank once, on the transfer thread."""

    fills_blocks = is_for_log = can_wait = False
    job_id, given_up_at, error = "fence", None, None

    def __init__(self, announcer: Announcer) -> None:
        self._announcer, self.phase = announcer, Phase.PREPARING

    def advance(self, now: float) -> bool:
        self._announcer.fence("another host")
        self.phase = Phase.DONE
        return True

    def is_ending(self, now: float) -> bool:
        return True

    def cancel(self, error: KVFerryError) -> None:
        self.phase = Phase.DONE

    def result(self, finished_at: float) -> JobResult:
        return JobResult(self.job_id)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_load_that_is_written_while_a_fence_drains_lands_whole(transport: str, engines: Pairs) -> None:
    """It goes on over the former connection, whose memory closes behind it; the next load goes to the latter."""
    require(transport)
    sender, [receiver] = engines.open(faults=FaultPlan(bytes_per_second=SLOW), transport=transport)
    [source] = sender.ranks
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(END, [5, 1])
    wait_until(lambda: any(known.link.name for known in source.writer.destinations.known.values()))
    [link] = old_links(sender)
    receiver.executor.submit(Fencing(receiver.announcer))
    assert receiver.result(SECONDS).job_id == "fence"
    assert receiver.announcer.num_fences == 1
    result = receiver.result()
    assert (result.error, result.job_id) == (None, "r")
    check_arrived(sender, [receiver], [5, 1], [0, 3])
    receiver.receive(sender.hold(), [2, 4], "y", "s")
    sender.compute(END, [5, 1], "y")
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [5, 1], [2, 4])
    check_dead(link, source.rank.cache, receiver.rank.cache)
    assert [known.registration for known in source.writer.destinations.known.values()] == [1]


@pytest.mark.parametrize("transport", [TRANSPORTS[0]])
def test_hole_1_bytes_of_a_sender_that_has_ended_may_lie_in_a_connection_so_a_fence_comes_before_the_blocks(
    transport: str, engines: Pairs
) -> None:
    require(transport)
    with running_process() as (process, child):
        sender, [receiver] = engines.open(faults=FaultPlan(hang=True), transport=transport, process=process)
        receiver.receive(sender.hold(), [0, 3])
        wait_until(lambda: is_introduced(sender))
        child.kill()
        child.wait()
        error = receiver.result(10.0).error
    assert error is not None
    assert error.reason is Reason.PEER_DIED
    assert receiver.announcer.num_fences == 1


class Breaking:
    """Lets the writes of a source rank fail after their first descriptor, as where a connection breaks: the rest lies
    in the connection, until :meth:`deliver`.
    """

    def __init__(self, rank: Parts, patch: pytest.MonkeyPatch) -> None:
        [transport] = rank.transports.transports.values()
        assert isinstance(transport, FaultyTransport)
        self._inner, self._submit = transport._inner, transport.submit
        self._left: list[tuple[Peer, np.ndarray]] = []
        patch.setattr(transport, "submit", self._break)

    def _break(self, peer: Peer, direction: Direction, rows: np.ndarray) -> Transfer:
        if direction is Direction.WRITE:
            self._left.append((peer, rows[1:].copy()))
        return self._submit(peer, direction, rows)

    def deliver(self) -> int:
        """Let what lies in the connections land, where they are still open; return the number of bytes."""
        landed = 0
        for peer, rows in self._left:
            with suppress(TransportError):
                transfer = self._inner.submit(peer, Direction.WRITE, rows)
                end = time.monotonic() + 2.0
                while self._inner.poll(transfer) is Status.PENDING and time.monotonic() < end:
                    time.sleep(0.002)
                landed += transfer.bytes_done
        self._left = []
        return landed


@pytest.mark.parametrize("is_elsewhere", [True, False], ids=["another host", "this host"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_hole_1_a_write_that_failed_may_still_land_so_a_fence_comes_before_the_blocks(
    transport: str, is_elsewhere: bool, engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender says at once that it has given up and writes no more. That is true, and says nothing of the bytes."""
    require(transport)
    process = elsewhere() if is_elsewhere else own_identity()
    sender, [receiver] = engines.open(faults=FaultPlan(fail_after=1), transport=transport, process=process)
    with monkeypatch.context() as patch:
        breaking = Breaking(sender.ranks[0], patch)
        receiver.receive(sender.hold(), [0, 3])
        sender.compute(END, [5, 1])
        error = receiver.result(15.0).error
        assert error is not None
        assert error.reason is Reason.TRANSFER_FAILED
        receiver.rank.cache[:] = 7
        breaking.deliver()
        assert (receiver.rank.cache == 7).all(), "the blocks are another request's by now"
        assert receiver.announcer.num_fences == 1
    plan_of(sender, FaultPlan())
    receiver.receive(sender.hold(), [2, 4], "y", "s")
    sender.compute(END, [5, 1], "y")
    assert receiver.result().error is None
    check_arrived(sender, [receiver], [5, 1], [2, 4])


def test_what_the_test_of_hole_1_delivers_lands_where_nothing_fences_it(
    engines: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("nixl")
    sender, [receiver] = engines.open(faults=FaultPlan(fail_after=1), transport="nixl")
    breaking = Breaking(sender.ranks[0], monkeypatch)
    monkeypatch.setattr(receiver.announcer, "fence", lambda where: None)
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(END, [5, 1])
    assert receiver.is_waiting(0.5), "no word of the sender gives the blocks back"
    assert breaking.deliver() > 0
    assert receiver.announcer.num_fences == 0


@pytest.mark.parametrize(
    ("transport", "fail_after"),
    [("cma", 1), ("nixl", 0)],
    ids=["a transport whose calls end with their bytes", "before a byte was submitted"],
)
def test_a_write_that_failed_and_cannot_land_costs_no_fence(transport: str, fail_after: int, engines: Pairs) -> None:
    sender, [receiver] = engines.open(faults=FaultPlan(fail_after=fail_after), transport=transport, process=elsewhere())
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(END, [5, 1])
    error = receiver.result(5.0).error
    assert error is not None
    assert error.reason is Reason.TRANSFER_FAILED
    assert receiver.announcer.num_fences == 0


def test_a_stopped_sender_of_this_host_is_not_fenced_and_the_log_says_so(
    engines: Pairs, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes into this process by itself: no transport that this rank closes would stop that."""
    sender, [receiver] = engines.open(faults=FaultPlan(hang=True), process=own_identity(), fence_seconds=0.2)
    vanishing = Vanishing(sender, monkeypatch)
    with caplog.at_level(logging.WARNING):
        receiver.receive(sender.hold(), [0, 3], seconds=0.5)
        sender.compute(END, [5, 1])
        wait_until(lambda: "stay quarantined" in caplog.text)
    assert receiver.is_waiting(0.5)
    assert receiver.announcer.num_fences == 0
    vanishing.come_back()
    error = receiver.result(10.0).error
    assert error is not None


def test_an_announcement_that_a_fence_overtook_is_refused(engines: Pairs) -> None:
    """Its blocks have another request by now, and the memory is open again."""
    sender, [receiver] = engines.open(process=elsewhere())
    [source] = sender.ranks
    asked: list[Question] = []
    writer = source.answerer

    class Recording:
        def answer(self, question: Question) -> object:
            asked.append(question)
            return writer.answer(question)

    source.answerer = Recording()  # type: ignore[assignment]
    receiver.receive(sender.hold(), [0, 3])
    sender.compute(END, [5, 1])
    assert receiver.result().error is None
    [introduced, announced] = asked
    assert isinstance(announced, Announce)
    writer.answer(msgspec.structs.replace(introduced, registration=1))
    key = msgspec.structs.replace(announced.key, number=99)
    for registration, reason in ((0, Reason.FENCED), (2, Reason.UNKNOWN_REQUEST)):
        with pytest.raises(HandoffError) as refused:
            writer.answer(msgspec.structs.replace(announced, key=key, registration=registration))
        assert refused.value.reason is reason
    writer.answer(introduced)
    assert [known.registration for known in writer.destinations.known.values()] == [1], "an earlier one comes late"


class Closing(NullTransport):
    """A transport that a fence must close."""

    def __init__(self, closes: bool = True) -> None:
        super().__init__()
        self.capabilities = Capabilities("null", close_ends_writes=True)
        self.registered: list[Sequence[Region]] = []
        self._closes = closes

    def register(self, regions: Sequence[Region]) -> bytes:
        self.registered.append(regions)
        return super().register(regions)

    def close(self) -> bool:
        return super().close() and self._closes


class Fence(NamedTuple):
    """The end points of memory that was registered anew, and why a byte of a former peer may still land."""

    end_points: dict[str, bytes]
    holes: tuple[str, ...]


def fence_of(transports: TransportSet) -> Fence:
    """Fence transports over which no load goes on."""
    return Fence(transports.renew(), transports.close_former())


@pytest.mark.parametrize("closes", [True, False])
def test_a_fence_opens_transports_anew_with_the_same_memory_and_tells_of_holes(closes: bool) -> None:
    former, stays, opened = Closing(closes), NullTransport(), list[Closing]()

    def open_anew(name: str) -> Closing:
        opened.append(Closing())
        return opened[-1]

    transports = TransportSet({"nixl": former, "cma": stays}, open_anew)
    regions = [Region(4096, 4096)]
    before = transports.register(regions)
    fence = fence_of(transports)
    [latter] = opened
    assert latter.registered == [regions]
    assert transports.transports == {"cma": stays, "nixl": latter}
    assert fence.end_points.keys() == before.keys()
    assert fence.end_points["cma"] == before["cma"]
    assert bool(fence.holes) is not closes
    assert (former._closed, stays._closed) == (True, False)


def test_a_fence_is_counted_once_the_transports_are_open_anew() -> None:
    """Whoever sees that the count has changed connects, and must not take the former transports."""
    seen: list[tuple[int, list[Transport]]] = []

    class Watched(TransportSet):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "num_fences":
                seen.append((value, list(self.transports.values())))
            super().__setattr__(name, value)

    former, latter = Closing(), Closing()
    transports = Watched({"nixl": former}, lambda _: latter)
    transports.register([Region(4096, 4096)])
    fence_of(transports)
    assert seen == [(0, [former]), (1, [latter])]


def test_a_connection_that_begins_during_a_fence_fails_as_closed_and_the_next_is_made() -> None:
    """The server's thread introduces ranks meanwhile; that connection could never be made, and no push helped."""
    begun: list[Connecting] = []

    def open_anew(name: str) -> Closing:
        begun.append(transports.connect(before))
        return Closing()

    transports = TransportSet({"nixl": Closing(), "closing": Closing()}, open_anew)
    before = transports.register([Region(4096, 4096)])
    fence = fence_of(transports)
    for connecting in begun:
        with pytest.raises(TransportError) as refused:
            connecting.poll()
        assert refused.value.reason is Reason.CLOSED
    assert len(begun) == 2
    assert transports.connect(fence.end_points).poll() is not None


@pytest.mark.parametrize("fails", ["close", "open"])
def test_a_fence_in_which_a_library_fails_is_told_and_leaves_the_other_transports(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that is being stopped runs the fence: its unexpected errors are not logged, and it has no second one."""

    class Failing(Closing):
        def close(self) -> bool:
            raise RuntimeError("of a library")

    def open_anew(name: str) -> Closing:
        if fails == "open":
            raise RuntimeError("of a library")
        return Closing()

    stays = NullTransport()
    transports = TransportSet({"nixl": Failing() if fails == "close" else Closing(), "cma": stays}, open_anew)
    transports.register([Region(4096, 4096)])
    fence = fence_of(transports)
    assert "of a library" in caplog.text
    assert bool(fence.holes) is (fails == "close"), "else nothing of a peer lands"
    assert transports.transports["cma"] is stays
    assert ("nixl" in fence.end_points) is ("nixl" in transports.transports) is (fails == "close")


@pytest.mark.parametrize("setting", ["auto", "nixl"])
@pytest.mark.parametrize("listens_at", ["", "127.0.0.1"])
def test_a_fence_opens_a_transport_as_it_was_opened_before(
    setting: str, listens_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise other hosts could not reach the rank after the first fence, or could although they should not."""
    made: list[tuple[str, Any]] = []

    def make(factory: str, **options: Any) -> Closing:
        made.append((factory, options))
        return Closing()

    monkeypatch.setattr(registry, "make", make)
    transports = registry.open_transports(setting, network=Network(listens_at))
    transports.register([Region(4096, 4096)])
    before = list(made)
    fence_of(transports)
    assert made == [*before, *before]


def test_a_transport_that_cannot_be_opened_anew_is_left_out() -> None:
    def refuse(name: str) -> Closing:
        raise TransportError(Reason.TRANSPORT_UNAVAILABLE, "no room.")

    transports = TransportSet({"nixl": Closing(), "cma": NullTransport()}, refuse)
    transports.register([Region(4096, 4096)])
    assert fence_of(transports).end_points.keys() == {"cma"}
    assert transports.transports.keys() == {"cma"}


# The other side.


def test_hole_12_a_decode_engine_that_is_killed_in_a_push_lets_the_prefill_blocks_go_before_the_lease_ends(
    engines: Pairs,
) -> None:
    """The push waits for its prompt: no write would fail. The rank asks its engine to end the hold."""
    sender, [receiver] = engines.open()
    [source] = sender.ranks
    with questions_to_own_engine(source) as asked:
        receiver.receive(sender.hold(), [0, 3])
        wait_until(lambda: is_introduced(sender))
        receiver.listener.close()
        wait_until(lambda: bool(asked))
    assert asked == [Release(7, (handle_of_transfer("x"),))]
    [result] = sender.written(1)
    assert result.error is not None
    assert result.error.reason is Reason.PEER_UNREACHABLE
